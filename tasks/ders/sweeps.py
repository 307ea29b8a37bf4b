"""Stage ``sweeps``: one model's experts as base and deltas, stored in every way, each scored."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.cluster.compute import Piece
from infra.recipe.schema import Recipe
from tasks.engine.artifacts import ORIGINAL, SWEEP
from tasks.engine.params import MEASURING
from tasks.engine.stage import StageRun, each, stage
from tasks.scoring.evaluation import heldout_arguments
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig
from upcycle_core.evaluation.compression.cosine import cosine_similarities
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import Scores, evaluate_checkpoint
from upcycle_core.moe.size import expert_bytes
from upcycle_core.progress import Progress

STORING = tuple(f"compression.{name}" for name in ("codecs", "base", "minimum_cosine", "seed"))
"""How deltas are stored, in every way that is measured."""


def artifact_of(recipe: Recipe, row: str) -> str:
    """Where the checkpoint of a row that is compressed lies."""
    return "model" if row == recipe.method else f"baselines/{row}"


def base_of(run: StageRun) -> Path | None:
    """The dense model that deltas are taken from; None for the mean of the experts."""
    assert run.recipe.compression is not None
    return run.path("seed") if run.recipe.compression.base == "seed" else None


def sweep_inputs(recipe: Recipe, row: str) -> list[str]:
    """What compressing ``row`` and scoring it reads."""
    assert recipe.compression is not None
    base = ["seed"] if recipe.compression.base == "seed" else []
    return [*each(recipe, "corpora/{domain}/heldout"), artifact_of(recipe, row), *base]


@stage(
    "sweeps/{source}",
    inputs=sweep_inputs,
    params=(*STORING, *MEASURING, "moe.max_shard_bytes"),
    each=lambda recipe: recipe.compressed,
)
def sweeps(run: StageRun) -> None:
    """Write sweep.json: scores, sizes and errors of every way to store the deltas."""
    recipe = run.recipe
    assert recipe.compression is not None
    model = run.path(artifact_of(recipe, run.item))
    common = {"model": model, **heldout_arguments(run)}
    base = {"base": base_of(run)}
    pieces = [
        Piece(name=ORIGINAL, function=original_piece, arguments={**common, **base}),
        *(
            Piece(
                name=name,
                function=codec_piece,
                arguments={
                    **common,
                    **base,
                    "codec": codec,
                    "minimum_cosine": recipe.compression.minimum_cosine,
                    "seed": recipe.compression.seed,
                    "max_shard_bytes": recipe.moe.max_shard_bytes,
                },
            )
            for name, codec in recipe.compression.codecs.items()
        ),
    ]
    done = run.run(pieces, "evaluation")
    found = {name: piece.result for name, piece in done.items()}
    (run.out / SWEEP).write_text(json.dumps(found, indent=1) + "\n")


def original_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    base: Path | None,
    corpora: Mapping[str, Path],
    config: EvaluationConfig,
    device: str,
) -> dict[str, Any]:
    """The piece: the model as it is, and how alike its experts are."""
    scores = evaluate_checkpoint(model, corpora, config=config, device=device, progress=progress)
    return {
        "scores": scores,
        "cosines": cosine_similarities(model, base),
        "expert_bytes": expert_bytes(model),
    }


def codec_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    base: Path | None,
    codec: CodecConfig,
    minimum_cosine: float,
    seed: int,
    max_shard_bytes: int,
    corpora: Mapping[str, Path],
    config: EvaluationConfig,
    device: str,
) -> dict[str, Any]:
    """The piece: the model with its deltas stored in one way; the weights are not kept."""
    stored = out / "model"
    report = compress(
        model,
        stored,
        config=codec,
        base=base,
        minimum_cosine=minimum_cosine,
        seed=seed,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
    scores: Scores = evaluate_checkpoint(
        stored, corpora, config=config, device=device, progress=progress
    )
    shutil.rmtree(out)
    return {"scores": scores, "codec": asdict(codec), "report": asdict(report)}
