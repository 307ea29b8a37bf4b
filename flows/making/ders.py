"""How a model's experts are stored as a base and deltas, and the smallest is registered."""

import json

from prefect.artifacts import create_markdown_artifact

from flows.pages.model import log_report, publish_links, publish_pictures
from flows.running.session import FlowSession
from infra.recipe.schema import Recipe
from tasks.baselines.baselines import baselines
from tasks.ders.compression import MODEL, REPORT, compression, row_title
from tasks.ders.register import register_compressed
from tasks.ders.section import section
from tasks.ders.sweeps import sweeps
from tasks.engine.stage import Stage
from tasks.release.versions import Outcome
from upcycle_core.evaluation.report.files import MARKDOWN, METRICS, PAGE, TEXT
from upcycle_core.evaluation.report.numbers import slug

SUMMARY = "compression.txt"


def compressed(recipe: Recipe) -> dict[Stage, list[str]]:
    """What stores the experts of a finished model, and of rows beside it: stages, and items."""
    rows = [row for row in baselines.items(recipe) if row in section(recipe).models]
    return {
        baselines: rows,
        sweeps: sweeps.items(recipe),
        compression: compression.items(recipe),
    }


def compress(session: FlowSession) -> None:
    """Store the experts of a finished model, and of rows beside it, in every way."""
    for stage, items in compressed(session.recipe).items():
        session.ensure(stage, only=items)


def offer(session: FlowSession) -> Outcome | None:
    """Register the smallest compressed model that is good enough, and show all of them."""
    outcome = register_compressed(session.registrar)
    _publish(session, outcome)
    session.workspace.sweep(session.stages.made)
    return outcome


def verdict_of(outcome: Outcome | None) -> str:
    """What became of the compressed model, in a sentence."""
    if outcome is None:
        return "No way to store the deltas is within the tolerance; nothing is registered."
    aliases = ", ".join(outcome.version.aliases) or "no alias"
    return f"`{outcome.version.reference}` ({aliases}): {outcome.verdict}."


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
