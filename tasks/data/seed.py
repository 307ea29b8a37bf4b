"""Stage ``seed``: the model that all experts start from, and training pieces."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.engine.artifacts import SEED
from tasks.engine.params import seed_keys
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.checkpoints.copy import copy_checkpoint
from upcycle_core.checkpoints.fetch import resolve_model
from upcycle_core.corpora.batches import packed_sequences
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.progress import Progress
from upcycle_core.training.config import LlamaShape, TrainingConfig
from upcycle_core.training.seed import initialise_model
from upcycle_core.training.trainer import train


@stage(
    "seed",
    inputs=lambda recipe, domain: (
        [*each(recipe, "corpora/{domain}/train"), "tokenizer"]
        if recipe.trains_seed
        else [f"sources/{SEED}.json"]
    ),
    params=lambda recipe, item: seed_keys(recipe),
    each=lambda recipe: [""] if recipe.has_seed else [],
)
def seed(run: StageRun) -> None:
    """Write the seed checkpoint."""
    recipe = run.recipe
    if recipe.seed_model.model is not None:
        copy_checkpoint(resolve_model(recipe.seed_model.model, run.models), run.out)
        return
    run.run_one(
        train_piece,
        "seed",
        start=run.path("tokenizer"),
        shape=recipe.seed_model.shape,
        corpora=[run.path(f"corpora/{name}/train") for name in recipe.domains],
        config=recipe.seed_model.training,
        seed=recipe.seed,
        device=run.device("seed"),
    )


def train_piece(
    *,
    out: Path,
    progress: Progress,
    start: Path,
    shape: LlamaShape | None,
    corpora: Sequence[Path],
    config: TrainingConfig,
    seed: int,
    device: str,
) -> dict[str, Any]:
    """The piece: train from the checkpoint ``start``, or a new Llama with the tokenizer ``start``.

    Checkpoints lie beside ``out``; a piece that was killed continues from the last whole one.
    """
    beside = out.with_suffix("")
    if shape is not None:
        initial = beside.with_suffix(".initial")
        initialise_model(shape, start, initial, seed=seed)
        start = initial
    sequences = config.steps * config.batch_size * config.gradient_accumulation
    dataset = packed_sequences(
        [TokenCorpus(path) for path in corpora],
        sequence_length=config.sequence_length,
        count=sequences,
        seed=seed,
    )
    result = train(
        start,
        dataset,
        out,
        config=config,
        seed=seed,
        checkpoints=beside.with_suffix(".checkpoints"),
        progress=progress,
        device=device,
    )
    return {"loss": result.final_loss, "tokens_per_second": result.tokens_per_second}
