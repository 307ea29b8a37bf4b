"""Take a domain out of a model: nothing is computed but the router.

``python -m flows.shrink RECIPE DOMAIN [--rebuild] [--set dotted.key=value ...]``

The domain's terms are left out of the sums, and its files go. Its expert stays in the backbone's
average; with ``--rebuild`` the others alone are averaged, and their statistics computed again.
"""

import shutil
import sys
from dataclasses import replace

from prefect import flow

from flows.dume import build
from flows.making.change import DEPLOYED, begin_change, domain_faults, finish_change, unfinished
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow
from flows.running.session import THREADS, open_session
from infra.recipe.schema import Recipe, resolve
from infra.settings import configure
from tasks.dume.backbone import averaged
from tasks.engine.workspace import Workspace
from tasks.living.lineage import begin, modelled, without_backbone
from tasks.methods import every_stage
from tasks.recipes import validate
from upcycle_core.errors import Fault, raise_faults


@flow(name="shrink", task_runner=THREADS)
def shrink(recipe: Recipe, domain: str, rebuild: bool = False) -> str:
    """Take a domain out of the recipe's model.

    Args:
        recipe: Of the model; it may still name the domain, or no longer.
        domain: The one that leaves.
        rebuild: Average the others alone into the backbone, and compute their statistics again.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = without(validate(resolve(recipe)), domain)
    workspace = Workspace(configure().home / recipe.name)
    look(recipe, workspace, domain)
    with open_session("shrink", recipe) as session:
        shrunk = begin(session.recipe, session.workspace)
        change = begin_change(session, f"shrink {domain}")
        session.adopt(without_backbone(shrunk) if rebuild else shrunk)
        outcome = build(session, changed=[])
        _remove(workspace, domain)
        finish_change(session, change, outcome, notes=(_note(session.recipe, domain),))
    return outcome.version.reference


def without(recipe: Recipe, domain: str) -> Recipe:
    """The recipe without a domain.

    Raises:
        InputError: It then is no recipe, e.g. for lack of domains.
    """
    domains = {name: found for name, found in recipe.domains.items() if name != domain}
    averaged = recipe.backbone.experts
    if averaged is not None:
        averaged = tuple(name for name in averaged if name != domain)
    backbone = replace(recipe.backbone, experts=averaged)
    return validate(resolve(replace(recipe, domains=domains, backbone=backbone)))


def look(recipe: Recipe, workspace: Workspace, domain: str) -> None:
    """Refuse what cannot be taken out; ``recipe`` is that without the domain.

    Raises:
        InputError: With every fault of the request.
    """
    known = modelled(workspace)
    change = unfinished(workspace)
    if not known:
        raise_faults([Fault("workspace", str(workspace.root), "holds no model; run flows.dume")])
    if domain not in known and (change is None or change.what != f"shrink {domain}"):
        remedy = f"is no domain of the model; those are {', '.join(known)}"
        raise_faults([Fault("domain", domain, remedy)])
    raise_faults(domain_faults("domains", recipe.domains, {*known} - {domain}))


def _remove(workspace: Workspace, domain: str) -> None:
    """Delete what was published for the domain alone."""
    for stage in every_stage():
        if stage.by_domain:
            shutil.rmtree(workspace.path(stage.artifact(domain)), ignore_errors=True)


def _note(recipe: Recipe, domain: str) -> str:
    if domain in averaged(recipe):
        note = f"The expert of {domain} is still in the backbone's average ({_listed(recipe)})"
        return note + "; to take it out there too: flows.shrink --rebuild."
    return f"The backbone averages {_listed(recipe)}."


def _listed(recipe: Recipe) -> str:
    return ", ".join(averaged(recipe))


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow."""
    chosen = parser_of("shrink").parse_args(arguments)
    run_flow(
        load(chosen),
        look=lambda recipe, workspace: look(
            without(recipe, chosen.domain), workspace, chosen.domain
        ),
        run=lambda recipe: shrink(recipe, chosen.domain, chosen.rebuild),
    )
    print(f"If {chosen.recipe} still names {chosen.domain}, take it out there as well.")
    print(DEPLOYED.format(chosen.recipe))


if __name__ == "__main__":
    sys.exit(main())
