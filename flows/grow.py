"""Add a domain to a model: its expert and its statistics are all that is computed.

``python -m flows.grow RECIPE DOMAIN [--rebuild] [--set dotted.key=value ...]``

The recipe names the domain beside those of the model. The backbone stays the average that it was;
with ``--rebuild`` the new expert is averaged into it too, and all statistics are computed again.
"""

import sys

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
from tasks.recipes import check, validate
from upcycle_core.errors import Fault, raise_faults


@flow(name="grow", task_runner=THREADS)
def grow(recipe: Recipe, domain: str, rebuild: bool = False) -> str:
    """Add a domain to the recipe's model.

    Args:
        recipe: Names the domain beside those of the model.
        domain: The new one.
        rebuild: Average the new expert into the backbone too, and compute all statistics again.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    look(recipe, Workspace(configure().home / recipe.name), domain)
    with open_session("grow", recipe) as session:
        grown = begin(session.recipe, session.workspace, new=[domain])
        change = begin_change(session, f"grow {domain}")
        session.adopt(without_backbone(grown) if rebuild else grown)
        outcome = build(session, changed=[domain])
        names = ", ".join(averaged(session.recipe))
        finish_change(session, change, outcome, notes=(f"The backbone averages {names}.",))
    return outcome.version.reference


def look(recipe: Recipe, workspace: Workspace, domain: str) -> None:
    """Refuse what cannot be added.

    Raises:
        InputError: With every fault of the request and of what the recipe names.
    """
    known = modelled(workspace)
    change = unfinished(workspace)
    if not known:
        raise_faults([Fault("workspace", str(workspace.root), "holds no model; run flows.dume")])
    if domain not in recipe.domains:
        remedy = f"is no domain of the recipe; name its text under domains.{domain}"
        raise_faults([Fault("domain", domain, remedy)])
    if domain in known and (change is None or change.what != f"grow {domain}"):
        remedy = "is in the model already; new text of it: python -m flows.retrain RECIPE"
        raise_faults([Fault("domain", domain, remedy)])
    raise_faults(domain_faults("domains", recipe.domains, {*known, domain}))
    check(recipe, workspace.root.parent / "models")


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow."""
    chosen = parser_of("grow").parse_args(arguments)
    run_flow(
        load(chosen),
        look=lambda recipe, workspace: look(recipe, workspace, chosen.domain),
        run=lambda recipe: grow(recipe, chosen.domain, chosen.rebuild),
    )
    print(DEPLOYED.format(chosen.recipe))


if __name__ == "__main__":
    sys.exit(main())
