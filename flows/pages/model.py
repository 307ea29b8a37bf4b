"""What people look at after a run: Prefect artifacts, MLflow files, and lines in the terminal."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import (
    create_image_artifact,
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)

from flows.running.progress import key_of
from flows.running.session import FlowSession
from infra.tracking.records import DatasetRecord, Version
from tasks.release.versions import Outcome
from upcycle_core.errors import Fault

SPLIT_CONTEXT = {
    "train": "training",
    "calibration": "calibration",
    "heldout": "evaluation",
    "elsewhere": "calibration",
}
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
    _log_to_mlflow(session, outcome, report, metrics)
    name = key_of(session.recipe.name)
    create_markdown_artifact(
        key=f"{name}-model",
        markdown=_page(session, outcome),
        description="The version, champion or not and why.",
    )
    create_table_artifact(
        key=f"{name}-scores",
        table=_rows(metrics),
        description="Perplexity, 100: the domain's own expert.",
    )
    publish_pictures(name, sorted(report.glob("*.png")))
    publish_links(session, outcome.version)


def publish_links(session: FlowSession, version: Version) -> None:
    """Show the way to the run and to the registered version in MLflow, where its server runs."""
    for key, (link, text) in _pages(session, version).items():
        create_link_artifact(
            key=key_of(f"{session.recipe.name}-mlflow-{key}"),
            link=link,
            link_text=text,
            description=f"In MLflow: {text}.",
        )


def publish_pictures(name: str, pictures: Sequence[Path]) -> None:
    """Show PNG files in the Prefect UI, whole, under keys that begin with ``name``."""
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        create_image_artifact(
            key=key_of(f"{name}-{picture.stem}-plot"),
            image_url=f"data:image/png;base64,{data}",
            description=PICTURES.get(picture.stem, picture.stem.replace("_", " ")),
        )


def summary(session: FlowSession, outcome: Outcome) -> str:
    """The last thing a run prints: scores, where everything lies, and what to type next."""
    report = session.workspace.path("report")
    version = outcome.version
    alias = "champion" if "champion" in version.aliases else "challenger"
    timings = session.timings()
    stages = "".join(
        f"\n  {stage:<12}{seconds:8.1f} s"
        for stage, seconds in timings["stages"].items()
        if seconds
    )
    return f"""
{(report / "table.txt").read_text().rstrip()}

Perplexity on held-out text, in percent of each domain's own dense expert: higher is better.
* is the best of its column; an expert on its own domain and the oracle are left out.

Time in the flow: {timings["wall"]:.0f} s, of which pieces on Ray {timings["pieces"]:.0f} s{stages}

Model     {session.workspace.path("model")}
Report    {report / "report.html"}
Registry  {version.reference} ({", ".join(version.aliases) or "no alias"}): {outcome.decision}

See runs and models:  make up      (then open the two addresses that it prints)
Generate text:        .venv/bin/python -m flows.generate {version.name}@{alias} "The first"
"""


def _pages(session: FlowSession, version: Version) -> dict[str, tuple[str, str]]:
    """Addresses in MLflow and what they show; none where its server does not run."""
    url = session.settings.mlflow_url
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

{outcome.decision}

`{version.reference}` {links}

{version.description}
"""


def _log_to_mlflow(
    session: FlowSession, outcome: Outcome, report: Path, metrics: dict[str, Any]
) -> None:
    run, timings = session.run, session.timings()
    router = timings["stages"].get("router", 0.0)
    run.log_metrics(
        {
            **{f"normalised_average/{row}": v for row, v in metrics["normalised_average"].items()},
            **{
                f"perplexity/{d}": v
                for d, v in metrics["perplexity"][session.recipe.method].items()
            },
            **{f"seconds/{stage}": value for stage, value in timings["stages"].items()},
            "seconds/wall": timings["wall"],
            "share_of_time/router": router / timings["wall"],
            "share_of_time/overhead": 1 - timings["pieces"] / timings["wall"],
        }
    )
    (session.workspace.root / "timings.json").write_text(json.dumps(timings, indent=1) + "\n")
    run.log_artifacts(report, "report")
    run.log_text((session.workspace.root / "params.yaml").read_text(), "recipe.yaml")
    run.log_text(session.versions.lock_text(), "dvc.lock")
    run.log_inputs(_datasets(session))
    run.set_tags(
        {"upcycle.version": outcome.version.reference, "upcycle.decision": outcome.decision}
    )
    version = outcome.version.reference
    run.describe(f"{(report / 'table.md').read_text()}\n`{version}`: {outcome.decision}")


def _datasets(session: FlowSession) -> list[DatasetRecord]:
    records = []
    for domain in session.recipe.domains:
        manifest = json.loads(
            (session.workspace.path(f"corpora/{domain}") / "manifest.json").read_text()
        )
        for split, entry in manifest["splits"].items():
            records.append(
                DatasetRecord(
                    name=f"{domain}/{split}",
                    sha256=entry["sha256"],
                    source=str(session.workspace.path(f"corpora/{domain}/{split}")),
                    context=SPLIT_CONTEXT[split],
                    profile={key: entry[key] for key in ("documents", "tokens", "bytes")},
                )
            )
    return records


def _rows(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "model": row.replace("_", " "),
            **{domain: round(value, 1) for domain, value in scores.items()},
            "average": round(metrics["normalised_average"][row], 1),
        }
        for row, scores in metrics["normalised"].items()
    ]
