"""Add a domain to a model: with DUME its expert and its statistics are all that is computed.

``python -m flows.grow RECIPE DOMAIN [--rebuild] [--set dotted.key=value ...]``

The recipe names the domain beside those of the model. DUME's backbone stays the average that it
was; with ``--rebuild`` the new expert is averaged into it too, and all statistics are computed
again. With Symphony-MoE the new model alone is trained, and all are joined again; with SIMoE it is
a set of instructions that is added, and the same seed is tuned again.
"""

import sys

from prefect import flow
from prefect.states import State

from flows.making.builds import build
from flows.making.change import (
    DEPLOYED,
    begin_change,
    domain_faults,
    finish_change,
    rebuild_faults,
    unfinished,
)
from flows.running.command_line import command, load, recipe_parser, run_flow
from flows.running.naming import words_of
from flows.running.session import THREADS, open_session
from infra.recipe.schema import Recipe, resolve
from infra.settings import configure
from tasks.engine.workspace import Workspace
from tasks.living.lineage import begin, life_of, without_backbone
from tasks.methods import METHODS
from tasks.recipes import check, validate
from upcycle_core.errors import Fault, raise_faults


@flow(name="grow", task_runner=THREADS)
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
    look(recipe, Workspace(configure().home / recipe.name), domain, rebuild)
    with open_session("grow", recipe) as session:
        grown = begin(session.recipe, session.workspace, new=[domain])
        change = begin_change(session, f"grow {domain}")
        session.adopt(without_backbone(grown) if rebuild else grown)
        outcome = build(session, changed=[domain])
        note = life_of(recipe).came(session.recipe)
        finish_change(session, change, outcome, notes=(note,))
        return session.completed(words_of(outcome), outcome.version.reference)


def look(recipe: Recipe, workspace: Workspace, domain: str, rebuild: bool = False) -> None:
    """Refuse what cannot be added.

    Raises:
        InputError: With every fault of the request and of what the recipe names.
    """
    life = life_of(recipe)
    known, given = life.modelled(workspace), life.parts(recipe)
    change = unfinished(workspace)
    raise_faults(rebuild_faults(recipe, rebuild))
    if not known:
        remedy = f"holds no model; run {METHODS[recipe.method].flow}"
        raise_faults([Fault("workspace", str(workspace.root), remedy)])
    if domain not in given:
        remedy = f"is no {life.part} of the recipe; name what it is under {life.section}.{domain}"
        raise_faults([Fault("domain", domain, remedy)])
    if domain in known and (change is None or change.what != f"grow {domain}"):
        remedy = "is in the model already; new text of it: python -m flows.retrain RECIPE"
        raise_faults([Fault("domain", domain, remedy)])
    raise_faults(domain_faults(life.section, given, {*known, domain}))
    check(recipe, workspace.root.parent / "models")


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow."""
    parser = recipe_parser("flows.grow", __doc__)
    parser.add_argument("domain", help="the new domain")
    parser.add_argument("--rebuild", action="store_true", help="average it into the backbone too")
    chosen = parser.parse_args(arguments)
    run_flow(
        load(chosen),
        look=lambda recipe, workspace: look(recipe, workspace, chosen.domain, chosen.rebuild),
        run=lambda recipe: grow(recipe, chosen.domain, chosen.rebuild),
    )
    print(DEPLOYED.format(chosen.recipe))


if __name__ == "__main__":
    sys.exit(main())
