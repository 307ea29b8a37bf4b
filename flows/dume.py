"""DUME end to end: text or ready experts in, a registered stock-format MoE out.

``python -m flows.dume recipes/demo.yaml [--set dotted.key=value ...] [--rebuild]``
"""

import sys
from collections.abc import Callable, Sequence

from prefect import flow
from prefect.states import State

from flows.making.building import made, publish
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow
from flows.running.refused import in_a_line
from flows.running.session import THREADS, FlowSession
from infra.recipe.schema import Recipe, resolve
from tasks.data.corpora import corpora
from tasks.data.documents import documents
from tasks.data.seed import seed
from tasks.data.seed_text import seed_text
from tasks.data.sources import sources
from tasks.data.tokenizer import tokenizer
from tasks.dume.backbone import backbone
from tasks.dume.experts import experts, parents
from tasks.dume.method import METHOD
from tasks.dume.model import model
from tasks.dume.repaired import repaired
from tasks.dume.report import report
from tasks.dume.routed import routed
from tasks.dume.router import router
from tasks.dume.statistics import statistics
from tasks.methods import METHODS, TASKS, scored_models
from tasks.recipes import validate
from tasks.release.versions import Outcome
from upcycle_core.errors import Fault, raise_faults


@flow(name="dume", task_runner=THREADS)
@in_a_line
def dume(recipe: Recipe, rebuild: bool = False) -> State:
    """Turn the recipe's domains into one Mixture-of-Experts in the MLflow registry.

    Args:
        recipe: What to make.
        rebuild: Make tokenizer, seed, backbone and experts anew where domains came, left or learnt
            since they were made (`flows.grow`, `flows.shrink`, `flows.retrain`).

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    return made("dume", recipe, build, rebuild=rebuild)


def build(
    session: FlowSession,
    *,
    changed: Sequence[str] | None = None,
    also: Callable[[FlowSession], None] = lambda session: None,
) -> Outcome:
    """Bring every stage up to date, judge the model beside the champion, and register it.

    Args:
        session: The recipe at work.
        changed: Domains whose text and experts are looked at; all by default.
        also: Makes what is asked for beside the model, before that is registered.
    """
    session.ensure(sources)
    session.ensure(documents, only=changed)
    has_tasks = TASKS.asked(session.recipe)
    if has_tasks:
        session.ensure(TASKS.stages()[0])
    session.ensure(tokenizer)
    session.ensure(corpora, only=changed)
    session.ensure(seed_text)
    session.ensure(seed)
    session.ensure(parents)
    session.ensure(experts, only=changed)
    session.ensure(backbone)
    session.ensure(repaired)
    session.ensure(statistics)
    session.ensure(router)
    session.ensure(routed)
    session.ensure(model)
    session.ensure(report)
    own = [r for r in scored_models(session.recipe) if r not in session.recipe.baselines]
    if has_tasks:
        _, task_scores, task_routing = TASKS.stages()
        session.ensure(task_scores, only=own)
        session.ensure(task_routing)
    also(session)
    session.finish()
    return publish(session, own)


def _faults(recipe: Recipe) -> list[Fault]:
    if recipe.method == METHOD.name:
        return []
    remedy = f"is not what flows.dume makes; run {METHODS[recipe.method].flow}"
    return [Fault("method", recipe.method, remedy)]


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow on a recipe file."""
    chosen = parser_of("dume").parse_args(arguments)
    recipe = load(chosen)
    raise_faults(_faults(recipe))
    run_flow(recipe, lambda recipe: dume(recipe, chosen.rebuild))


if __name__ == "__main__":
    sys.exit(main())
