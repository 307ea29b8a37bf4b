"""DUME end to end: text or ready experts in, a registered stock-format MoE out.

``python -m flows.dume recipes/demo.yaml [--set dotted.key=value ...] [--rebuild]``
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from prefect import flow

from flows.making.building import publish
from flows.running.command_line import SUMMARY, command, free_workspace, load, recipe_parser
from flows.running.session import THREADS, FlowSession, open_session
from infra import settings as environment
from infra.recipe.schema import Recipe, resolve
from tasks.data.corpora import corpora
from tasks.data.documents import documents
from tasks.data.seed import seed
from tasks.data.sources import check, sources
from tasks.data.task_sets import task_sets
from tasks.data.tokenizer import tokenizer
from tasks.dume.backbone import backbone
from tasks.dume.experts import experts
from tasks.dume.method import METHOD
from tasks.dume.model import model
from tasks.dume.parents import parents
from tasks.dume.report import report
from tasks.dume.router import router
from tasks.dume.statistics import statistics
from tasks.engine.stage import Stage
from tasks.living.lineage import forget
from tasks.methods import TASKS
from tasks.recipes import validate
from tasks.release.versions import Outcome
from tasks.scoring.task_scores import task_scores


@flow(name="dume", task_runner=THREADS)
def dume(recipe: Recipe, rebuild: bool = False) -> str:
    """Turn the recipe's domains into one Mixture-of-Experts in the MLflow registry.

    Args:
        recipe: What to make.
        rebuild: Make tokenizer, seed, backbone and experts anew where domains came, left or learnt
            since they were made (`flows.grow`, `flows.shrink`, `flows.retrain`).

    Returns:
        The registered version, ``models:/NAME/NUMBER``.
    """
    recipe = validate(resolve(recipe))
    with open_session("dume", recipe) as session:
        if rebuild:
            forget(session.workspace)
            session.adopt(replace(session.recipe, lineage=None))
        outcome = build(session)
    return outcome.version.reference


def build(session: FlowSession, *, changed: Sequence[str] | None = None) -> Outcome:
    """Bring every stage up to date, judge the model beside the champion, and register it.

    Args:
        session: The recipe at work.
        changed: Domains whose text and experts are looked at; all by default.
    """
    session.ensure(sources)
    session.ensure(documents, changed)
    session.ensure(tokenizer)
    session.ensure(corpora, changed)
    session.ensure(seed)
    session.ensure(parents)
    session.ensure(experts, changed)
    session.ensure(backbone)
    session.ensure(statistics)
    session.ensure(router)
    session.ensure(model)
    session.ensure(report)
    own = [row for row in session.recipe.scored_models if row in session.recipe.own_models]
    if TASKS.asked(session.recipe):
        session.ensure(task_sets)
        session.ensure(task_scores, own)
    session.finish()
    return publish(session, own)


def built(recipe: Recipe) -> tuple[Stage, ...]:
    """What ``build`` brings up to date."""
    return (*METHOD.stages, *(TASKS.stages if TASKS.asked(recipe) else ()))


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow on a recipe file."""
    parser = recipe_parser("flows.dume", __doc__)
    parser.add_argument("--rebuild", action="store_true", help="what was built upon, too")
    chosen = parser.parse_args(arguments)
    recipe = load(chosen)
    check(recipe, environment.configure().home / "models")
    workspace = free_workspace(recipe).root
    dume(recipe, chosen.rebuild)
    print((workspace / SUMMARY).read_text())


if __name__ == "__main__":
    sys.exit(main())
