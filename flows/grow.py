"""Add a domain to a model: with DUME its expert and its statistics are all that is computed.

``python -m flows.grow RECIPE DOMAIN [--rebuild] [--set dotted.key=value ...]``

The recipe names the domain beside those of the model. DUME's backbone stays the average that it
was; with ``--rebuild`` the new expert is averaged into it too, and all statistics are computed
again. With Symphony-MoE the new model alone is trained, and all are joined again; with SIMoE it is
a set of instructions that is added, and the same seed is tuned again.
"""

import sys
from collections.abc import Iterator
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
from infra.durable import read_json
from infra.recipe.schema import Recipe, resolve
from infra.settings import configure
from tasks.dume.backbone import averaged, backbone
from tasks.dume.model import model
from tasks.dume.repaired import repaired
from tasks.dume.report import report
from tasks.dume.routed import routed
from tasks.dume.router import router
from tasks.dume.statistics import statistics
from tasks.engine.costs import read_cost
from tasks.engine.workspace import Workspace
from tasks.living.lineage import begin, life_of, without_backbone
from tasks.methods import METHODS
from tasks.recipes import check, validate
from upcycle_core.checkpoints.tokenizer import token_ids
from upcycle_core.errors import Fault, raise_faults

BACKBONE = "backbone"
SHOWN = 3
"""Tokens that a sentence names."""
FAR = 80.0
"""Of 100: below it, a domain's expert does not go with the backbone."""
REBUILT = (backbone, repaired, statistics, router, routed, model, report)
"""What is made again with a backbone of all domains."""


@flow(name="grow", task_runner=THREADS)
@in_a_line
def grow(recipe: Recipe, domain: str, rebuild: bool = False) -> State:
    """Add a domain to the recipe's model.

    Args:
        recipe: Names the domain beside those of the model.
        domain: The new one, or with SIMoE the new set of instructions.
        rebuild: Average the new expert into the backbone too, and compute all statistics again.

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    workspace = Workspace(configure().home / recipe.name)
    # Held while it looks: reading an expert's weights takes its time, and a run that neither holds
    # the workspace nor waits for it is taken for dead.
    with turn(workspace, "the flow grow", recipe):
        look(recipe, workspace, domain, rebuild=rebuild)
        how = partial(begun_with, domain=domain, rebuild=rebuild)
        ahead = aim(recipe, changed=[domain])
        with open_session("grow", recipe, is_held=True, begun=how, aim=ahead) as session:
            return _grown(session, domain, rebuild)


def begun_with(recipe: Recipe, workspace: Workspace, *, domain: str, rebuild: bool) -> Recipe:
    """The recipe with the lineage of its model, which a domain joins."""
    grown = begin(recipe, workspace, new=[domain])
    return without_backbone(grown) if rebuild else grown


def _grown(session: FlowSession, domain: str, rebuild: bool) -> State:
    begun = begun_with(session.recipe, session.workspace, domain=domain, rebuild=rebuild)
    change = begin_change(session, f"grow {domain}", begun, rebuild=rebuild)
    session.adopt(begun)
    outcome = build(session, changed=[domain])
    notes = (
        life_of(session.recipe).came(session.recipe),
        *far_off(session.recipe, session.workspace, domain),
        *left_out(session.recipe, session.workspace, domain),
    )
    finish_change(session, change, outcome, notes=notes)
    return session.completed(words_of(outcome), outcome.version.reference)


def far_off(recipe: Recipe, workspace: Workspace, domain: str) -> Iterator[str]:
    """What to do about a domain whose expert does not go with a backbone that it is not part of.

    That shows in the oracle, which routes perfectly: what it loses, the backbone has cost.
    """
    if BACKBONE not in life_of(recipe).pinned(recipe) or domain in averaged(recipe):
        return
    metrics = read_json(workspace.path("report") / "metrics.json") or {}
    kept = metrics.get("normalised", {}).get("oracle", {}).get(domain)
    if kept is None or kept >= FAR:
        return
    again = {stage: items for stage in REBUILT if (items := stage.items(recipe))}
    labels = [stage.label(item) for stage, items in again.items() for item in items]
    costs = [cost for label in labels if (cost := read_cost(workspace, label)) is not None]
    price = sum(cost.core_seconds for cost in costs)
    yield (
        f"{domain} is far from this backbone: on it, its expert keeps {kept:.1f} of 100, however "
        f"well it is routed. To average it in: python -m flows.grow RECIPE {domain} --rebuild. "
        f"That makes {', '.join(stage.name for stage in again)} again, of all domains: "
        f"{price:.0f} core seconds the last time."
    )


def left_out(recipe: Recipe, workspace: Workspace, domain: str) -> Iterator[str]:
    """What to do about tokens of a given expert that the pinned tokenizer does not have."""
    if BACKBONE not in life_of(recipe).pinned(recipe) or recipe.domains[domain].expert is None:
        return
    own, known = (token_ids(workspace.path(p)).ids for p in (f"experts/{domain}", "tokenizer"))
    if lacking := [token for token in own if token not in known]:
        shown = ", ".join(lacking[:SHOWN]) + (", ..." if len(lacking) > SHOWN else "")
        yield (
            f"The model's tokenizer stays, and lacks {len(lacking)} tokens of {domain} ({shown}): "
            f"texts that name them are read as ordinary characters. To take them in, build all "
            f"anew: python -m {METHODS[recipe.method].flow} RECIPE --rebuild."
        )


def look(recipe: Recipe, workspace: Workspace, domain: str, *, rebuild: bool = False) -> None:
    """Refuse what cannot be added.

    Raises:
        InputError: With every fault of the request and of what the recipe names.
    """
    life = life_of(recipe)
    given = life.parts(recipe)
    change = unfinished(workspace)
    raise_faults(rebuild_faults(recipe, rebuild))
    known = modelled_in(recipe, workspace)
    if domain not in given:
        remedy = f"is no {life.part} of the recipe; name what it is under {life.section}.{domain}"
        raise_faults([Fault("domain", domain, remedy)])
    is_at_work = change is not None and change.what == f"grow {domain}"
    if domain in known and not is_at_work and not rebuild:
        remedy = "is in the model already; new text of it: python -m flows.retrain RECIPE"
        remedy += "; to average it into the backbone: --rebuild" if life.averages else ""
        raise_faults([Fault("domain", domain, remedy)])
    raise_faults(domain_faults(life.section, given, {*known, domain}, joining=domain))
    check(recipe, workspace.root.parent)


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow."""
    chosen = parser_of("grow").parse_args(arguments)
    recipe = load(chosen)
    run_flow(
        recipe,
        look=lambda recipe, workspace: look(
            recipe, workspace, chosen.domain, rebuild=chosen.rebuild
        ),
        begun=partial(begun_with, domain=chosen.domain, rebuild=chosen.rebuild),
        aim=aim(recipe, changed=[chosen.domain]),
        run=lambda recipe: grow(recipe, chosen.domain, chosen.rebuild),
    )
    print(deploy_again(chosen))


if __name__ == "__main__":
    sys.exit(main())
