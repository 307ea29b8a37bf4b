"""What people look at after instruction tuning: Prefect, MLflow, the terminal, and a page."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact

from flows.pages.model import publish_links, publish_pictures
from flows.running.command_line import SUMMARY
from flows.running.session import FlowSession
from infra.recipe.schema import SIMOE, Recipe, recipe_yaml
from infra.tracking.records import DatasetRecord
from tasks.engine.artifacts import SUMMARY as TRAINED
from tasks.release.versions import Outcome
from tasks.simoe.answers import model_of
from tasks.simoe.report import figures, row_title
from upcycle_core.evaluation.instructions.activations import Activation
from upcycle_core.evaluation.instructions.report import write_instruction_report
from upcycle_core.evaluation.instructions.results import across_runs, from_metrics
from upcycle_core.evaluation.instructions.structure import Structure
from upcycle_core.evaluation.report.numbers import slug
from upcycle_core.evaluation.text.scores import mean_and_deviation

KEYS = (
    "domains",
    "seed_model",
    "instructions",
    "tuning",
    "simoe",
    "experts",
    "baselines",
)
PAGE = """\
# {name}: sparse experts found by instruction tuning

Made by

```
python -m flows.simoe {files} {options}--out {out}
```

{tables}

## Experts

What the training came to: share of expert parameters whose mask is exactly zero (mean over experts;
and for none of them), mean overlap of two experts, and the step whose weights were kept.

{experts}

{pictures}
Every number is in [{name}/metrics.json]({name}/metrics.json).

## The recipe

```yaml
{recipe}
```
"""


def publish_tuning(session: FlowSession, outcome: Outcome) -> None:
    """Log the report to MLflow, show it in the Prefect UI, leave a summary for people."""
    recipe, run, version = session.recipe, session.run, outcome.version
    report = session.workspace.path("report")
    metrics = json.loads((report / "metrics.json").read_text())
    for row in recipe.tuned:
        own = figures(metrics, row).items()
        run.log_metrics({f"{figure}/{row}": value for figure, value in own})
    run.log_metrics(_simoe_figures(session.workspace.path(model_of(SIMOE))))
    timings = session.timings()
    run.log_metrics({f"seconds/{stage}": value for stage, value in timings["stages"].items()})
    run.log_metrics({"seconds/wall": timings["wall"]})
    (session.workspace.root / "timings.json").write_text(json.dumps(timings, indent=1) + "\n")
    run.log_artifacts(report, "report")
    run.log_text((session.workspace.root / "params.yaml").read_text(), "recipe.yaml")
    run.log_text(session.versions.lock_text(), "dvc.lock")
    run.log_inputs(_datasets(session))
    run.set_tags({"upcycle.version": version.reference, "upcycle.decision": outcome.decision})
    table = (report / "table.md").read_text()
    run.describe(f"{table}\n`{version.reference}`: {outcome.decision}")
    create_markdown_artifact(
        key=slug(f"{recipe.name}-instructions"),
        markdown=f"# `{version.reference}`\n\n{outcome.decision}\n\n{table}",
        description="Exact match and ROUGE-L on instructions, and the registered version.",
    )
    publish_pictures(recipe.name, sorted(report.glob("*.png")))
    publish_links(session, version)
    (session.workspace.root / SUMMARY).write_text(_summary(session, outcome, timings))


def write_page(
    recipe: Recipe,
    runs: Sequence[Recipe],
    files: Sequence[str],
    options: str,
    *,
    home: Path,
    out: Path,
) -> None:
    """Write ``NAME.md`` and ``NAME/``: the report of all seeds together; pictures of the first.

    Args:
        recipe: What was run.
        runs: Its recipe with each seed.
        files: The recipe's files, as named in the command.
        options: Further words of the command, with a blank behind them.
        home: Where the workspaces are.
        out: The folder.
    """
    reports = [home / run.name / "report" for run in runs]
    metrics = [json.loads((report / "metrics.json").read_text()) for report in reports]
    first, folder = metrics[0], out / recipe.name
    shutil.rmtree(folder, ignore_errors=True)
    write_instruction_report(
        folder,
        across_runs([from_metrics(own) for own in metrics]),
        structures={r: Structure.from_dict(own) for r, own in first["structures"].items()},
        activations=[Activation.from_dict(own) for own in first["activations"]],
    )
    tables = (folder / "table.md").read_text()
    for name in ("table.md", "table.txt", "report.html"):
        (folder / name).unlink()
    pictures = "".join(
        f"![{path.stem.replace('_', ' ')}]({recipe.name}/{path.name})\n\n"
        for path in sorted(folder.glob("*.png"))
    )
    page = PAGE.format(
        name=recipe.name,
        files=" ".join(files),
        options=options,
        out="FOLDER" if out.is_absolute() else out,
        tables=tables.rstrip(),
        experts=_experts(recipe, [home / run.name for run in runs]),
        pictures=pictures,
        recipe=recipe_yaml(recipe, KEYS).rstrip(),
    )
    (out / f"{recipe.name}.md").write_text(page)


def _experts(recipe: Recipe, workspaces: Sequence[Path]) -> str:
    """A line a SIMoE: its sparsity and overlap."""
    lines = [
        "| | zeros, mean | zeros of all | overlap | step |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in recipe.tuned:
        if row != SIMOE and (row == "seed" or recipe.baselines[row].method != "simoe"):
            continue
        found = [json.loads((w / model_of(row) / TRAINED).read_text()) for w in workspaces]
        cells = [
            _spread([100 * own["sparsity_mean"] for own in found]),
            _spread([100 * own["sparsity_union"] for own in found]),
            _spread([100 * _overlap(own) for own in found]),
            ", ".join(str(own["kept_step"]) for own in found),
        ]
        lines.append(f"| {' | '.join([row_title(recipe, row), *cells])} |")
    return "\n".join(lines)


def _simoe_figures(model: Path) -> dict[str, float]:
    found = json.loads((model / TRAINED).read_text())
    return {
        "simoe/sparsity": found["sparsity_mean"],
        "simoe/sparsity_union": found["sparsity_union"],
        "simoe/overlap": _overlap(found),
        "simoe/kept_step": found["kept_step"],
    }


def _overlap(found: Mapping[str, Any]) -> float:
    """Mean over pairs of different experts."""
    pairs = [
        value for i, row in enumerate(found["overlap"]) for j, value in enumerate(row) if i != j
    ]
    return sum(pairs) / len(pairs)


def _spread(values: Sequence[float]) -> str:
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.1f} %" if len(values) == 1 else f"{mean:.1f} ± {deviation:.1f} %"


def _summary(session: FlowSession, outcome: Outcome, timings: Mapping[str, Any]) -> str:
    report = session.workspace.path("report")
    version = outcome.version
    alias = "champion" if "champion" in version.aliases else "challenger"
    found = _simoe_figures(session.workspace.path(model_of(SIMOE)))
    return f"""
{(report / "table.txt").read_text().rstrip()}

Experts: {100 * found["simoe/sparsity"]:.1f} % of their parameters are zero, \
{100 * found["simoe/sparsity_union"]:.1f} % for all of them; two overlap by \
{100 * found["simoe/overlap"]:.0f} %.

Time in the flow: {timings["wall"]:.0f} s, of which pieces on Ray {timings["pieces"]:.0f} s

Model     {session.workspace.path("model")}
Report    {report / "report.html"}
Registry  {version.reference} ({", ".join(version.aliases) or "no alias"}): {outcome.decision}

See runs and models:  make up      (then open the two addresses that it prints)
Generate text:        .venv/bin/python -m flows.generate {version.name}@{alias} "The first"
"""


def _datasets(session: FlowSession) -> list[DatasetRecord]:
    folder = session.workspace.path("instructions")
    manifest = json.loads((folder / "manifest.json").read_text())
    return [
        DatasetRecord(
            name=f"instructions/{name}",
            sha256=own["sha256"],
            source=str(folder / name),
            context="training" if name.startswith("train/") else "evaluation",
            profile={"instances": own["instances"]},
        )
        for name, own in manifest["files"].items()
    ]
