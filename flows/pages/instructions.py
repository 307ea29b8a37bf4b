"""What people look at after instruction tuning: Prefect, MLflow, the terminal, and a page."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from flows.pages.model import publish_outcome, summary
from flows.pages.page import Command, write_page
from flows.running.command_line import SUMMARY
from flows.running.datasets import instructions_of
from flows.running.session import FlowSession
from infra.recipe.schema import Recipe
from tasks.engine.artifacts import SUMMARY as TRAINED
from tasks.release.versions import Outcome
from tasks.simoe.report import figures
from tasks.simoe.rows import SIMOE, model_of, row_title, tuned
from upcycle_core.errors import raise_faults
from upcycle_core.evaluation.instructions.activations import Activation
from upcycle_core.evaluation.instructions.report import write_instruction_report
from upcycle_core.evaluation.instructions.results import (
    InstructionEvaluation,
    across_runs,
    faults,
)
from upcycle_core.evaluation.instructions.structure import Structure, mean_of_pairs
from upcycle_core.evaluation.report.files import MARKDOWN, METRICS, PAGE, TEXT
from upcycle_core.evaluation.report.numbers import number, slug
from upcycle_core.evaluation.report.parts import Section, Table
from upcycle_core.evaluation.text.scores import mean_and_deviation

KEYS = ("domains", "seed_model", "instructions", "tuning", "simoe", "experts", "baselines")
EXPERTS = (
    "What the training came to: share of expert parameters whose mask is exactly zero (mean over "
    "experts; and for none of them), mean overlap of two experts, and the step whose weights were "
    "kept."
)


def publish_tuning(session: FlowSession, outcome: Outcome) -> None:
    """Log the report to MLflow, show it in the Prefect UI, leave a summary for people."""
    recipe, version = session.recipe, outcome.version
    report = session.workspace.path("report")
    metrics = json.loads((report / METRICS).read_text())
    scores = {
        f"{figure}/{row}": value
        for row in tuned(recipe)
        for figure, value in figures(metrics, row).items()
    }
    experts = _simoe_figures(session.workspace.path(model_of(SIMOE)))
    publish_outcome(session, outcome, {**scores, **experts}, instructions_of(session.workspace))
    create_markdown_artifact(
        key=slug(f"{recipe.name}-instructions"),
        markdown=f"# `{version.reference}`\n\n{outcome.verdict}\n\n"
        f"{(report / MARKDOWN).read_text()}",
        description="Exact match and ROUGE-L on instructions, and the registered version.",
    )
    more = (
        f"Experts: {100 * experts['simoe/sparsity']:.1f} % of their parameters are zero, "
        f"{100 * experts['simoe/sparsity_union']:.1f} % for all of them; two overlap by "
        f"{100 * experts['simoe/overlap']:.0f} %.\n"
    )
    (session.workspace.root / SUMMARY).write_text(summary(session, outcome, more=more))


def write_instructions(command: Command, workspaces: Sequence[Path]) -> None:
    """Write ``NAME.md`` and ``NAME/``: the report of all seeds together; pictures of the first."""
    recipe, folder = command.recipe, command.out / command.recipe.name
    metrics = [json.loads((own / "report" / METRICS).read_text()) for own in workspaces]
    first, every = metrics[0], [InstructionEvaluation.from_dict(own) for own in metrics]
    evaluation = across_runs(every)
    raise_faults(faults(evaluation))  # while the page of before is there
    shutil.rmtree(folder, ignore_errors=True)
    write_instruction_report(
        folder,
        evaluation,
        model=recipe.name,
        structures={r: Structure.from_dict(own) for r, own in first["structures"].items()},
        activations=[Activation.from_dict(own) for own in first["activations"]],
    )
    tables = (folder / MARKDOWN).read_text()
    for name in (MARKDOWN, TEXT, PAGE):
        (folder / name).unlink()
    pictures = "\n\n".join(
        f"![{path.stem.replace('_', ' ')}]({recipe.name}/{path.name})"
        for path in sorted(folder.glob("*.png"))
    )
    write_page(
        command,
        recipe.name,
        f"{recipe.name}: sparse experts found by instruction tuning",
        [
            Section("", [tables]),
            Section("Experts", [EXPERTS, _experts(recipe, workspaces), pictures]),
        ],
        keys=KEYS,
    )


def _experts(recipe: Recipe, workspaces: Sequence[Path]) -> Table:
    """A line a SIMoE: its sparsity and overlap."""
    rows = []
    for row in tuned(recipe):
        if row != SIMOE and (row == "seed" or recipe.baselines[row].method != "simoe"):
            continue
        found = [json.loads((own / model_of(row) / TRAINED).read_text()) for own in workspaces]
        rows.append(
            [
                row_title(recipe, row),
                _percent([own["sparsity_mean"] for own in found]),
                _percent([own["sparsity_union"] for own in found]),
                _percent([mean_of_pairs(own["overlap"]) for own in found]),
                ", ".join(str(own["kept_step"]) for own in found),
            ]
        )
    return Table(["Model", "zeros, mean", "zeros of all", "overlap", "step"], rows)


def _simoe_figures(model: Path) -> dict[str, float]:
    found = json.loads((model / TRAINED).read_text())
    return {
        "simoe/sparsity": found["sparsity_mean"],
        "simoe/sparsity_union": found["sparsity_union"],
        "simoe/overlap": mean_of_pairs(found["overlap"]),
        "simoe/kept_step": found["kept_step"],
    }


def _percent(shares: Sequence[float]) -> str:
    mean, deviation = mean_and_deviation([100 * share for share in shares])
    return f"{number(mean, deviation if len(shares) > 1 else None)} %"
