"""Stage ``sweeps``: one model's experts as base and deltas, stored in every way, each scored."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.compute import Piece
from infra.recipe import Recipe
from tasks.architectures import MODEL_OF_DERS
from tasks.report import heldout_arguments
from tasks.stage import StageRun, each, stage
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig, CompressionConfig
from upcycle_core.evaluation.compression.cosine import cosine_similarities
from upcycle_core.evaluation.config import EvaluationConfig
from upcycle_core.evaluation.pieces import Scores, evaluate_checkpoint
from upcycle_core.moe.size import expert_bytes
from upcycle_core.progress import Progress

ORIGINAL = "original"
SWEEP = "sweep.json"
CODE_OF_DERS = (
    *MODEL_OF_DERS,
    "upcycle_core/architectures/dense_of.py",
    "upcycle_core/backbone/average.py",
    "upcycle_core/checkpoints/writer.py",
    "upcycle_core/ders/codecs/low_rank.py",
    "upcycle_core/ders/codecs/quantised.py",
    "upcycle_core/ders/codecs/sparse.py",
    "upcycle_core/ders/codecs/choose.py",
    "upcycle_core/ders/codecs/codec.py",
    "upcycle_core/ders/compress.py",
    "upcycle_core/ders/decompose.py",
    "upcycle_core/ders/sizes.py",
    "upcycle_core/moe/random.py",
)
"""What decides a compressed model."""


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
    params=("compression", "evaluation", "moe.max_shard_bytes", "compute.evaluation"),
    sources=(
        *CODE_OF_DERS,
        "tasks/sweeps.py",
        "upcycle_core/evaluation/compression/cosine.py",
        "upcycle_core/corpora/batches.py",
        "upcycle_core/corpora/mixture.py",
        "upcycle_core/corpora/seeded.py",
        "upcycle_core/evaluation/perplexity.py",
        "upcycle_core/evaluation/pieces.py",
        "upcycle_core/evaluation/scores.py",
        "upcycle_core/backbone/stitch.py",
        "upcycle_core/moe/inspect.py",
        "upcycle_core/moe/size.py",
    ),
    needed=lambda recipe: recipe.compression is not None,
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
                    "compression": recipe.compression,
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
    compression: CompressionConfig,
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
        minimum_cosine=compression.minimum_cosine,
        seed=compression.seed,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
    scores: Scores = evaluate_checkpoint(
        stored, corpora, config=config, device=device, progress=progress
    )
    shutil.rmtree(stored)
    return {"scores": scores, "codec": asdict(codec), "report": asdict(report)}
