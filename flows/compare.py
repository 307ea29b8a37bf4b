"""Published ways of upcycling on one seed model, one text and one token budget: one table.

``python -m flows.compare RECIPE [BASELINES ...] [--tokens N] [--seeds 0 1 2] [--out FOLDER]``

The first file is the recipe of ``flows.dume`` or ``flows.symphony``; what has been made is used
again. The others hold ``baselines:``, rows of the table. Several seeds run in workspaces of their
own (``NAME-seed-0``, ...), the ones that ``flows.seeds`` makes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from prefect import flow
from prefect.states import State

from flows.pages import ablation
from flows.pages.comparison import FOLDER, ROWS, TABLE, statement, write_comparison
from flows.pages.model import folder_faults, publish_pictures, publish_table
from flows.pages.page import Command
from flows.pages.seeds import write_seeds
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_apart, run_flow
from flows.running.refused import in_a_line
from flows.running.session import THREADS, FlowSession, open_session
from infra import settings as environment
from infra.recipe.schema import Recipe, resolve
from tasks.baselines.comparison import row_costs
from tasks.baselines.prepared import row_faults
from tasks.engine.stage import Stage
from tasks.methods import COMPARISON, METHODS, TASKS, stages_of
from tasks.planning.made import Aim
from tasks.recipes import check, validate
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.evaluation.report.files import write_json
from upcycle_core.evaluation.report.parts import Notes, Section
from upcycle_core.evaluation.report.text import terminal
from upcycle_core.evaluation.text.comparison import across_seeds
from upcycle_core.evaluation.text.comparison_report import (
    Rows,
    comparison_blocks,
    comparison_table,
    draw_comparison,
)

PLOT = f"{FOLDER}/score-against-compute.png"


def _stages(recipe: Recipe) -> dict[Stage, list[str]]:
    """What is made and shown: stages, and their items."""
    return {s: s.items(recipe) for s in stages_of(recipe) if s not in TASKS.stages()}


AIM = Aim(_stages, registers=())


@flow(name="compare", task_runner=THREADS)
@in_a_line
def compare(recipe: Recipe) -> State:
    """Make, train and evaluate every baseline of the recipe beside its own model.

    Args:
        recipe: What to make; ``baselines`` are the rows, ``comparison.tokens`` their budget.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    with open_session("compare", recipe, aim=AIM) as session:
        for stage in _stages(recipe):
            session.ensure(stage)
            if stage.name == "sources":
                raise_faults(row_faults(session.stages))
        session.finish()
        if COMPARISON.asked(recipe):
            _publish(session)
        else:
            ablation.publish(session)
        session.workspace.sweep(session.stages.made)
        return session.completed(f"beside {', '.join(recipe.baselines)}")


def _faults(recipe: Recipe) -> list[Fault]:
    method = METHODS[recipe.method]
    if not (method.compares or method.ablates):
        remedy = f"its rows are made and shown beside its own model; run {method.flow}"
        return [Fault("method", recipe.method, remedy)]
    if recipe.baselines:
        return []
    remedy = "nothing to compare with; add a file with baselines, e.g. recipes/baselines.yaml"
    return [Fault("baselines", {}, remedy)]


def _publish(session: FlowSession) -> None:
    """Put cost beside score; show the table and the plot in the workspace, Prefect and MLflow."""
    workspace = session.workspace
    metrics = json.loads((workspace.path("comparison") / "metrics.json").read_text())
    costs = row_costs(session.recipe, workspace, metrics)
    for row, cost in costs.items():
        metrics[row] |= asdict(cost)
    rows = across_seeds([metrics])
    write_json(workspace.path(ROWS), metrics)
    workspace.path(TABLE).write_text(_summary(session, rows))
    draw_comparison(rows, workspace.path(PLOT), highlight="dume")
    publish_table(
        f"{session.recipe.name}-comparison",
        comparison_table(rows),
        "Perplexity on held-out text, in percent of each domain's dense expert.",
    )
    publish_pictures(session.recipe.name, [workspace.path(PLOT)])
    session.run.log_metrics(
        {f"normalised_average/{name}": row["normalised_average"] for name, row in metrics.items()}
    )
    session.run.log_artifacts(workspace.path(FOLDER), FOLDER)


def _summary(session: FlowSession, rows: Rows) -> str:
    budget, notes = session.recipe.comparison.tokens, statement(rows, session.recipe)
    notes += [] if budget else ["Every trained row takes steps of its own."]
    scores = [*comparison_blocks(rows, tokens=budget), Notes(notes)]
    return f"""
{terminal([Section("", scores)])}
Time in the flow: {session.timings()["wall"]:.0f} s
Plot    {session.workspace.path(PLOT)}
Rows    {session.workspace.path(ROWS)}
Models  {session.workspace.path("baselines")}
"""


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the comparison."""
    chosen = parser_of("compare").parse_args(arguments)
    recipe = load(chosen)
    home = environment.configure().home
    raise_faults([*_faults(recipe), *folder_faults(chosen.out)])
    if chosen.seeds is None:
        run_flow(recipe, compare, aim=AIM, shown=TABLE)
        workspaces = [home / recipe.name]
    else:
        check(recipe, home)
        workspaces = [run_apart("flows.compare", chosen, recipe, seed) for seed in chosen.seeds]
    if chosen.out is not None:
        _write_page(chosen, recipe, workspaces)


def _write_page(chosen: argparse.Namespace, recipe: Recipe, workspaces: Sequence[Path]) -> None:
    """The page of finished runs, one a seed."""
    made = Command.of("compare", recipe, chosen)
    if not COMPARISON.asked(recipe):
        ablation.write_ablation(made, workspaces)
        return
    write_comparison(made, [json.loads((own / ROWS).read_text()) for own in workspaces])
    if chosen.seeds is not None:  # the page of the same runs gains the rows
        write_seeds(replace(made, flow="seeds", files=[chosen.recipe]), workspaces)


if __name__ == "__main__":
    sys.exit(main())
