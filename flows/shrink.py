"""Take a domain out of a model: with DUME nothing is computed but the router.

``python -m flows.shrink RECIPE DOMAIN [--rebuild] [--set dotted.key=value ...]``

The domain's terms are left out of the sums, and its files go. Its expert stays in DUME's average of
the backbone; with ``--rebuild`` the others alone are averaged, and their statistics computed again.
With Symphony-MoE the others are joined again; with SIMoE it is a set of instructions that leaves,
and the same seed is tuned again.
"""

import sys
from functools import partial

from prefect import flow
from prefect.states import State

from flows.making.builds import aim, build
from flows.making.change import (
    begin_change,
    deploy_again,
    domain_faults,
    finish_change,
    modelled_in,
    rebuild_faults,
    unfinished,
)
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow
from flows.running.naming import words_of
from flows.running.refused import in_a_line
from flows.running.session import THREADS, FlowSession, open_session
from flows.running.turn import turn
from infra.recipe.schema import Recipe, resolve
from infra.settings import configure
from tasks.dume.backbone import averaged
from tasks.engine.workspace import Workspace
from tasks.living.lineage import begin, life_of, with_lineage, without_backbone
from tasks.methods import every_stage
from tasks.recipes import validate
from upcycle_core.errors import Fault, raise_faults


@flow(name="shrink", task_runner=THREADS)
@in_a_line
def shrink(recipe: Recipe, domain: str, rebuild: bool = False) -> State:
    """Take a domain out of the recipe's model.

    Args:
        recipe: Of the model; it may still name the domain, or no longer.
        domain: The one that leaves, or with SIMoE the set of instructions.
        rebuild: Average the others alone into the backbone, and compute their statistics again.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = without(validate(resolve(recipe)), domain)
    workspace = Workspace(configure().home / recipe.name)
    with turn(workspace, "the flow shrink", recipe):  # which says that this run lives
        look(recipe, workspace, domain, rebuild)
        how = partial(begun_without, domain=domain, rebuild=rebuild)
        ahead = aim(recipe, changed=[])
        with open_session("shrink", recipe, is_held=True, begun=how, aim=ahead) as session:
            return _shrunk(session, domain, rebuild)


def begun_without(recipe: Recipe, workspace: Workspace, *, domain: str, rebuild: bool) -> Recipe:
    """The recipe without the domain, with the lineage of the model that it leaves."""
    shrunk = begin(without(recipe, domain), workspace)
    return without_backbone(shrunk) if rebuild else shrunk


def _shrunk(session: FlowSession, domain: str, rebuild: bool) -> State:
    begun = begun_without(session.recipe, session.workspace, domain=domain, rebuild=rebuild)
    change = begin_change(session, f"shrink {domain}", begun, rebuild=rebuild)
    session.adopt(begun)
    outcome = build(session, changed=[])
    life = life_of(session.recipe)
    if life.section == "domains":
        _remove(session.workspace, domain)
    note = life.left(session.recipe, domain)
    finish_change(session, change, outcome, notes=(note,))
    return session.completed(words_of(outcome), outcome.version.reference)


def without(recipe: Recipe, domain: str) -> Recipe:
    """The recipe without a domain.

    Raises:
        InputError: It then is no recipe, e.g. for lack of domains.
    """
    return validate(resolve(life_of(recipe).without(recipe, domain)))


def look(recipe: Recipe, workspace: Workspace, domain: str, rebuild: bool = False) -> None:
    """Refuse what cannot be taken out; ``recipe`` is that without the domain.

    Raises:
        InputError: With every fault of the request.
    """
    life = life_of(recipe)
    change = unfinished(workspace)
    raise_faults(rebuild_faults(recipe, rebuild))
    known = modelled_in(recipe, workspace)
    is_at_work = change is not None and change.what == f"shrink {domain}"
    is_averaged = rebuild and domain in averaged(with_lineage(recipe, workspace))
    if domain not in known and not is_at_work and not is_averaged:
        remedy = f"is no {life.part} of the model; those are {', '.join(known)}"
        raise_faults([Fault("domain", domain, remedy)])
    raise_faults(domain_faults(life.section, life.parts(recipe), {*known} - {domain}))


def _remove(workspace: Workspace, domain: str) -> None:
    """Delete what was published for the domain alone, each whole."""
    for stage in every_stage():
        if stage.by_domain and workspace.path(artifact := stage.artifact(domain)).exists():
            workspace.take_away(artifact)


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow."""
    chosen = parser_of("shrink").parse_args(arguments)
    recipe = load(chosen)
    run_flow(
        recipe,
        look=lambda recipe, workspace: look(
            without(recipe, chosen.domain), workspace, chosen.domain, chosen.rebuild
        ),
        begun=partial(begun_without, domain=chosen.domain, rebuild=chosen.rebuild),
        aim=aim(recipe, changed=[]),
        run=lambda recipe: shrink(recipe, chosen.domain, chosen.rebuild),
    )
    print(f"If {chosen.recipe} still names {chosen.domain}, take it out there as well.")
    print(deploy_again(chosen))


if __name__ == "__main__":
    sys.exit(main())
