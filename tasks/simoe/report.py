"""Stage ``report``: every tuned model's scores on instructions, tables and pictures."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from infra.recipe.schema import Recipe
from tasks.engine.artifacts import ANSWERS, SUMMARY
from tasks.engine.stage import StageRun, stage
from tasks.simoe.limit import held_to_limit
from tasks.simoe.rows import SIMOE, model_of, row_title, section, tuned
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.instructions.activations import Activation
from upcycle_core.evaluation.instructions.report import write_instruction_report
from upcycle_core.evaluation.instructions.results import InstructionEvaluation, Row, Run
from upcycle_core.evaluation.instructions.scores import SplitScore
from upcycle_core.evaluation.instructions.structure import Structure
from upcycle_core.simoe.config import SimoeUpcyclingConfig

MODELS, ABLATIONS = "Models", "SIMoE, other ways"
SWEEPS = {"tau": "Sparsity τ", "beta": "Orthogonality β"}
NO_PENALTY = "no-orthogonality"


def _inputs(recipe: Recipe, item: str) -> list[str]:
    trained = [row for row in tuned(recipe) if row != "seed"]
    return [*(f"answers/{row}" for row in tuned(recipe)), *(model_of(row) for row in trained)]


@stage("report", _inputs, params=("name", "baselines", "simoe", "tuning.least_exact_match"))
def report(run: StageRun) -> None:
    """Write metrics.json, tables, the paper's three pictures and the CSV behind them.

    Raises:
        InputError: Full finetuning stays below ``tuning.least_exact_match``.
    """
    recipe = run.recipe
    found = {
        row: json.loads((run.path(f"answers/{row}") / ANSWERS).read_text()) for row in tuned(recipe)
    }
    check_reached(recipe, found)
    evaluation = InstructionEvaluation(
        rows={row: _row(run, row, own) for row, own in found.items()}, highlight=SIMOE
    )
    # Fig. 5: without the penalty, then with it.
    shown = [row for row in (NO_PENALTY, SIMOE) if "structure" in found.get(row, {})]
    write_instruction_report(
        run.out,
        evaluation,
        model=recipe.name,
        structures={row: Structure.from_dict(found[row]["structure"]) for row in shown},
        activations=[Activation.from_dict(own) for own in found[SIMOE]["activations"]],
    )


def figures(metrics: Mapping[str, Any], row: str) -> dict[str, float]:
    """What the gate looks at, of one row of a metrics.json, in percent."""
    own = metrics["rows"][row]
    return {
        f"{metric}_{split}": 100 * own[split][metric]["mean"]
        for split in ("seen", "unseen")
        if own[split] is not None
        for metric in ("exact_match", "rouge_l")
    }


def _row(run: StageRun, row: str, found: Mapping[str, Any]) -> Row:
    summary: dict[str, Any] = {"trained_parameters": 0}
    if row != "seed":
        summary = json.loads((run.path(model_of(row)) / SUMMARY).read_text())
    scores = {split: SplitScore.from_dict(own) for split, own in found["scores"].items()}
    return Row(
        title=row_title(run.recipe, row),
        runs=(
            Run(
                total_parameters=found["parameters"],
                trained_parameters=summary["trained_parameters"],
                density_parameters=found.get("density_parameters"),
                effective_experts=found.get("use", {}).get("effective"),
                tasks_apart=found.get("use", {}).get("apart"),
                seen=scores.get("seen"),
                unseen=scores["unseen"],
            ),
        ),
        groups=_groups(run.recipe, row),
    )


def _groups(recipe: Recipe, row: str) -> tuple[str, ...]:
    """The tables that a row stands in: SIMoEs that differ in tau or beta alone are sweeps of it."""
    every = {
        name: _varied(own.simoe or SimoeUpcyclingConfig(), section(recipe))
        for name, own in recipe.baselines.items()
        if own.method == "simoe"
    }
    if row == SIMOE:
        return (MODELS, *dict.fromkeys(group for groups in every.values() for group in groups))
    return every.get(row, (MODELS,))


def _varied(one: SimoeUpcyclingConfig, other: SimoeUpcyclingConfig) -> tuple[str, ...]:
    changed = {f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)}
    if changed == {"tau"}:
        return (SWEEPS["tau"],)
    if changed == {"beta"}:
        return (ABLATIONS, SWEEPS["beta"]) if one.beta == 0 else (SWEEPS["beta"],)
    return (ABLATIONS,)


def check_reached(recipe: Recipe, found: Mapping[str, Any]) -> None:
    """Nothing is reported of instructions that are too hard for the model."""
    least = recipe.tuning.least_exact_match
    for name in held_to_limit(recipe):
        reached = found[name]["scores"].get("seen", {}).get("exact_match")
        if least is not None and reached is not None and reached < least:
            remedy = f"{name} reaches {reached:.3f} on the seen categories: the instructions are "
            remedy += "too hard for this model or training; train longer, or lower the limit"
            raise InputError(Fault("tuning.least_exact_match", least, remedy))
