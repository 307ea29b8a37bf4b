"""Stage ``sweeps``: one model's experts as base and deltas, stored in every way, each scored."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.cluster.pieces import Piece
from infra.recipe.schema import Recipe
from tasks.ders.section import section
from tasks.engine.artifacts import ORIGINAL, SWEEP
from tasks.engine.params import MEASURING
from tasks.engine.stage import StageRun, each, stage
from tasks.scoring.evaluation import held_arguments
from upcycle_core.ders.config import CodecConfig
from upcycle_core.evaluation.compression.cosine import cosine_similarities
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
    return run.path("seed") if section(run.recipe).base == "seed" else None


def sweep_inputs(recipe: Recipe, row: str) -> list[str]:
    """What compressing ``row`` and scoring it reads."""
    base = ["seed"] if section(recipe).base == "seed" else []
    return [*each(recipe, "corpora/{domain}/heldout"), artifact_of(recipe, row), *base]


@stage(
    "sweeps/{source}",
    sweep_inputs,
    params=(*STORING, *MEASURING, "moe.max_shard_bytes"),
    each=lambda recipe: section(recipe).models,
)
def sweeps(run: StageRun) -> None:
    """Write sweep.json: scores, sizes and errors of every way to store the deltas."""
    recipe, how = run.recipe, section(run.recipe)
    model = run.path(artifact_of(recipe, run.item))
    common = {"model": model, "base": base_of(run), **held_arguments(run)}
    storing = {
        "minimum_cosine": how.minimum_cosine,
        "seed": how.seed,
        "max_shard_bytes": recipe.moe.max_shard_bytes,
    }
    pieces = [
        Piece.of(ORIGINAL, original_piece, **common),
        *(
            Piece.of(name, codec_piece, codec=codec, storing=storing, **common)
            for name, codec in how.codecs.items()
        ),
    ]
    done = run.run(pieces, "evaluation")
    found = {name: piece.result for name, piece in done.items()}
    (run.out / SWEEP).write_text(json.dumps(found, indent=1) + "\n")


def original_piece(
    *, out: Path, progress: Progress, model: Path, base: Path | None, **common: Any
) -> dict[str, Any]:
    """The piece: the model as it is, and how alike its experts are."""
    return {
        "scores": evaluate_checkpoint(model, progress=progress, **common),
        "cosines": cosine_similarities(model, base),
        "expert_bytes": expert_bytes(model),
    }


def codec_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    codec: CodecConfig,
    storing: Mapping[str, Any],
    base: Path | None,
    **common: Any,
) -> dict[str, Any]:
    """The piece: the model with its deltas stored in one way; the weights are not kept."""
    from upcycle_core.ders.compress import compress  # imports models of transformers

    stored = out / "model"
    report = compress(model, stored, config=codec, base=base, progress=progress, **storing)
    scores: Scores = evaluate_checkpoint(stored, progress=progress, **common)
    shutil.rmtree(out)
    return {"scores": scores, "codec": asdict(codec), "report": asdict(report)}
