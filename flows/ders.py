"""DeRS: experts of a finished model as one shared base and light deltas, the smallest registered.

``python -m flows.ders RECIPE COMPRESSION [ROWS ...] [--set dotted.key=value ...] [--out FOLDER]``

The first file is the recipe of ``flows.dume``; what has been made is used again. Another holds
``compression:``, the ways to store deltas, and maybe ``baselines:``, models to compress as well.
"""

import json
import sys

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.states import State

from flows.pages.compression import write_compression
from flows.pages.model import folder_faults, log_report, publish_links, publish_pictures
from flows.pages.page import Command
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_flow
from flows.running.naming import words_of
from flows.running.refused import in_a_line
from flows.running.session import THREADS, FlowSession, open_session
from infra import settings as environment
from infra.recipe.schema import Recipe, resolve
from tasks.baselines.baselines import baselines
from tasks.ders.compression import MODEL, REPORT, compression, row_title
from tasks.ders.register import register_compressed
from tasks.ders.section import section
from tasks.ders.sweeps import sweeps
from tasks.dume.method import METHOD as DUME
from tasks.recipes import validate
from tasks.release.versions import Outcome
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.evaluation.report.files import MARKDOWN, METRICS, PAGE, TEXT
from upcycle_core.evaluation.report.numbers import slug

SUMMARY = "compression.txt"


@flow(name="ders", task_runner=THREADS)
@in_a_line
def ders(recipe: Recipe) -> State:
    """Store the experts of the recipe's model as a base and deltas; register the smallest.

    Args:
        recipe: What to make; ``compression`` says in which ways, and how much may be lost.

    Returns:
        The registered version, ``models:/NAME/NUMBER``; None if no way is good enough.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    with open_session("ders", recipe) as session:
        for stage in DUME.stages():
            session.ensure(stage)
        compress(session)
        session.finish()
        outcome = offer(session)
        if outcome is None:
            return session.completed("no way to store deltas is within the tolerance")
        return session.completed(words_of(outcome), outcome.version.reference)


def compress(session: FlowSession) -> None:
    """Store the experts of a finished model, and of rows beside it, in every way."""
    session.ensure(baselines, only=section(session.recipe).models)
    session.ensure(sweeps)
    session.ensure(compression)


def offer(session: FlowSession) -> Outcome | None:
    """Register the smallest compressed model that is good enough, and show all of them."""
    outcome = register_compressed(session.registrar)
    _publish(session, outcome)
    session.workspace.sweep()
    return outcome


def _faults(recipe: Recipe) -> list[Fault]:
    if recipe.compression is not None:
        return []
    remedy = "says how deltas are stored; add a file that does, e.g. recipes/compression.yaml"
    return [Fault("compression", None, remedy)]


def _publish(session: FlowSession, outcome: Outcome | None) -> None:
    """Show the table and the pictures in Prefect and MLflow, and leave a summary for people."""
    recipe, run = session.recipe, session.run
    folder = session.workspace.path("compression")
    report = folder / REPORT
    metrics = json.loads((report / METRICS).read_text())
    table = (report / MARKDOWN).read_text()
    for row in section(recipe).models:
        for name, point in metrics["sweeps"][row_title(recipe, row)]["points"].items():
            for figure in ("normalised_average", "percent_of_original"):
                run.log_metrics({f"{figure}/{row}/{name}": point[figure]})
    log_report(session, report, "compression", outcome.version if outcome else None)
    verdict = verdict_of(outcome)
    run.describe(f"{table}\n{verdict}")
    create_markdown_artifact(
        key=slug(f"{recipe.name}-compression"),
        markdown=f"{table}\n{verdict}",
        description="Size and quality of every way to store the experts' deltas.",
    )
    publish_pictures(f"{recipe.name}-compression", sorted(report.glob("*.png")))
    if outcome is not None:
        publish_links(session, outcome.version)
    text = f"{(report / TEXT).read_text()}\n{verdict}\n\nReport    {report / PAGE}\n"
    if outcome is not None:
        text += f"Model     {folder / MODEL}\n\nGenerate text:  .venv/bin/python -m flows.generate "
        text += f'{outcome.version.name}/{outcome.version.number} "The first"\n'
    (session.workspace.root / SUMMARY).write_text(text)


def verdict_of(outcome: Outcome | None) -> str:
    """What became of the compressed model, in a sentence."""
    if outcome is None:
        return "No way to store the deltas is within the tolerance; nothing is registered."
    aliases = ", ".join(outcome.version.aliases) or "no alias"
    return f"`{outcome.version.reference}` ({aliases}): {outcome.verdict}."


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the flow on recipe files."""
    chosen = parser_of("ders").parse_args(arguments)
    recipe = load(chosen)
    raise_faults([*_faults(recipe), *folder_faults(chosen.out)])
    run_flow(recipe, ders, shown=SUMMARY)
    if chosen.out is not None:
        workspace = environment.configure().home / recipe.name
        write_compression(Command.of("ders", recipe, chosen), workspace)


if __name__ == "__main__":
    sys.exit(main())
