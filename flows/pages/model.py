"""What people look at after a run: Prefect artifacts, MLflow files, and lines in the terminal."""

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from prefect.artifacts import (
    create_image_artifact,
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)

from flows.pages import joining
from flows.running.datasets import corpora_of
from flows.running.naming import words_of
from flows.running.session import FlowSession
from infra.tracking.records import DatasetRecord, Version
from infra.versioning.versions import code_version
from tasks.engine.sources import CODE
from tasks.release.versions import Outcome
from upcycle_core.errors import Fault
from upcycle_core.evaluation.report.files import MARKDOWN, PAGE, TEXT, write_json
from upcycle_core.evaluation.report.numbers import number, slug
from upcycle_core.evaluation.report.page import stamped
from upcycle_core.evaluation.report.parts import Table, text_of
from upcycle_core.evaluation.text.results import title_of

# A card in Prefect's UI shows some forty characters.
PICTURES = {
    "routing": "Which domain's tokens go to which expert",
    "scores": "Every model in every domain",
    "sweep_ridge_lambda": "Scores by λ of the ridge regression",
    "sweep_top_k": "Scores by experts a token",
    "sweep_window": "Scores by tokens of a paragraph seen",
}


def folder_faults(out: Path | None) -> list[Fault]:
    """What keeps a page from being written into ``out``, said before anything runs."""
    if out is None or not out.exists() or out.is_dir():
        return []
    return [Fault("--out", str(out), "is a file; name a folder")]


def publish_artifacts(session: FlowSession, outcome: Outcome) -> None:
    """Log the report to MLflow and show it in the Prefect UI."""
    report = session.workspace.path("report")
    metrics = json.loads((report / "metrics.json").read_text())
    perplexity, timings = metrics["perplexity"][session.recipe.method], session.timings()
    figures = {
        **{f"normalised_average/{row}": v for row, v in metrics["normalised_average"].items()},
        **{f"perplexity/{domain}": value for domain, value in perplexity.items()},
        "share_of_time/router": timings["stages"].get("router", 0.0) / timings["wall"],
        "share_of_time/overhead": 1 - timings["pieces"] / timings["wall"],
        **{f"core_seconds/{part}": seconds for part, seconds in joined(session).items()},
    }
    name, scores = session.recipe.name, _scores(metrics)
    publish_outcome(session, outcome, figures, corpora_of(session.workspace, session.recipe))
    create_markdown_artifact(
        key=slug(f"{name}-model"),
        markdown=_page(session, outcome),
        description="The version, champion or not and why.",
    )
    publish_table(f"{name}-scores", scores, "Perplexity, 100: the domain's own expert.")


def joined(session: FlowSession) -> dict[str, float]:
    """{part of joining: core seconds}; of a method that joins nothing in closed form none."""
    return joining.core_seconds(session.recipe, session.workspace)


def publish_outcome(
    session: "FlowSession",
    outcome: Outcome,
    figures: Mapping[str, float],
    datasets: Sequence[DatasetRecord],
) -> None:
    """Log to the flow's run in MLflow what came of it, show pictures and links in the Prefect UI.

    The timings are kept in the workspace.

    Args:
        session: Its report is up to date.
        outcome: What became of the model.
        figures: Metrics besides the timings.
        datasets: What the run has read.
    """
    run, timings = session.run, session.timings()
    seconds = {**timings["stages"], "wall": timings["wall"]}
    # What was logged of a new version, its run has.
    logged = outcome.version.metrics if outcome.is_new else {}
    figures = {name: value for name, value in figures.items() if name not in logged}
    run.log_metrics({**figures, **{f"seconds/{name}": value for name, value in seconds.items()}})
    write_json(session.workspace.root / "timings.json", timings)
    cost = joining.sentence(joined(session))
    log_report(session, session.workspace.path("report"), "report", outcome.version, cost=cost)
    run.log_text((session.workspace.root / "params.yaml").read_text(), "recipe.yaml")
    run.log_text(session.versions.lock_text(), "dvc.lock")
    run.log_inputs(datasets)
    version = outcome.version.reference
    run.set_tags({"upcycle.version": version, "upcycle.decision": outcome.verdict})
    report = session.workspace.path("report")
    words = words_of(outcome)
    came = f"**{words[0].upper()}{words[1:]}** (`{version}`: {outcome.verdict})"
    lines = (came, session.link, (report / MARKDOWN).read_text(), cost)
    run.describe("\n\n".join(filter(None, lines)))
    publish_pictures(session.recipe.name, sorted(report.glob("*.png")))
    publish_links(session, outcome.version)


def log_report(
    session: "FlowSession",
    folder: Path,
    name: str,
    version: Version | None = None,
    *,
    cost: str = "",
) -> None:
    """Log a report's files to MLflow; its page says there what an artifact may not depend on.

    Args:
        session: The flow at work.
        folder: The report.
        name: Of its folder in MLflow.
        version: That it is of.
        cost: A sentence on what it took.
    """
    session.run.log_artifacts(folder, name)
    commit, _, modified = code_version(CODE).partition("-")
    words = f"commit {commit[:10]}{', modified' if modified else ''}"
    facts = [*([version.reference] if version else []), date.today().isoformat(), words]
    session.run.log_text(stamped((folder / PAGE).read_text(), facts, cost), f"{name}/{PAGE}")


def publish_table(key: str, table: Table, description: str) -> None:
    """Show a report's table in the Prefect UI."""
    rows = [dict(zip(table.header, map(text_of, row), strict=True)) for row in table.rows]
    create_table_artifact(key=slug(key), table=rows, description=description)


def publish_links(session: "FlowSession", version: Version) -> None:
    """Show the way to the registered version in MLflow."""
    if "version" in (pages := _pages(session, version)):
        link, text = pages["version"]
        create_link_artifact(
            key=slug(f"{session.recipe.name}-mlflow-version"),
            link=link,
            link_text=text,
            description=f"In MLflow: {text}.",
        )


def publish_pictures(name: str, pictures: Sequence[Path]) -> None:
    """Show PNG files in the Prefect UI, whole, under keys that begin with ``name``."""
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        create_image_artifact(
            key=slug(f"{name}-{picture.stem}-plot"),
            image_url=f"data:image/png;base64,{data}",
            description=PICTURES.get(picture.stem, picture.stem.replace("_", " ")),
        )


def summary(session: "FlowSession", outcome: Outcome, *, more: str = "") -> str:
    """The last thing a run prints: scores, where everything lies, and what to type next.

    Args:
        session: Its report is up to date.
        outcome: What became of the model.
        more: A sentence under the scores.
    """
    report = session.workspace.path("report")
    version = outcome.version
    alias = "champion" if "champion" in version.aliases else "challenger"
    timings = session.timings()
    stages = "".join(
        f"\n  {stage:<12}{seconds:8.1f} s"
        for stage, seconds in timings["stages"].items()
        if seconds
    )
    scores = f"{(report / TEXT).read_text()}\n{more}".rstrip()
    return f"""
{scores}

Time in the flow: {timings["wall"]:.0f} s, of which pieces on Ray {timings["pieces"]:.0f} s{stages}

Model     {session.workspace.path("model")}
Report    {report / PAGE}
Registry  {version.reference} ({", ".join(version.aliases) or "no alias"}): {outcome.verdict}

See runs and models:  {_where(session, version)}
Generate text:        .venv/bin/python -m flows.generate {version.name}@{alias} "The first"
"""


def _where(session: FlowSession, version: Version) -> str:
    """Pages of the servers that run, or what starts them."""
    prefect, mlflow = session.settings.prefect_api_url, session.settings.mlflow_url
    if prefect is None or mlflow is None:
        return "make up      (then open the two addresses that it prints)"
    return f"{prefect.removesuffix('/api')} and {_pages(session, version)['version'][0]}"


def _pages(session: FlowSession, version: Version) -> dict[str, tuple[str, str]]:
    """Addresses in MLflow and what they show; none where its pages are not ours to know."""
    url = session.settings.mlflow_pages
    if url is None:
        return {}
    place = f"/#/models/{version.name}/versions/{version.number}?workflowType=machine_learning"
    return {
        "run": (f"{url}{session.run.page}", "the run, with every stage's curves"),
        "version": (f"{url}{place}", f"{version.name}, version {version.number}"),
    }


def _page(session: FlowSession, outcome: Outcome) -> str:
    """What became of the model, on one page: the verdict, where to look, the table."""
    version = outcome.version
    aliases = " and ".join(sorted(version.aliases)) or "neither champion nor challenger"
    pages = _pages(session, version).values()
    links = " · ".join(f"[{text}]({link})" for link, text in pages)
    return f"""# {version.name}, version {version.number}: {aliases}

{outcome.verdict}

`{version.reference}` {links}

{version.description}

{joining.sentence(joined(session))}
"""


def _scores(metrics: Mapping[str, Any]) -> Table:
    domains = list(metrics["heldout"])
    averages = metrics["normalised_average"]
    rows = [
        [title_of(row, domains), *(number(own.get(d)) for d in domains), number(averages.get(row))]
        for row, own in metrics["normalised"].items()
    ]
    return Table(["Method", *domains, "Average"], rows)
