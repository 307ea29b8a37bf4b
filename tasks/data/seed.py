"""Stage ``seed``: the model that all experts start from, and training pieces."""

from pathlib import Path
from typing import Any

from infra.recipe.schema import Recipe
from tasks.data.given import place_given
from tasks.engine.artifacts import FORMS, SEED, TOKENS
from tasks.engine.params import seed_keys
from tasks.engine.stage import StageRun, each, stage
from tasks.training import Texts, train_one, train_piece
from upcycle_core.progress import Progress
from upcycle_core.training import workers
from upcycle_core.training.config import LlamaShape
from upcycle_core.training.seed import initialise_model


def _texts(recipe: Recipe) -> list[str]:
    """What a seed is trained on."""
    if recipe.seed_text is not None:
        return [f"seed_text/{TOKENS}/train"]
    return list(each(recipe, "corpora/{domain}/train"))


@stage(
    "seed",
    lambda recipe, domain: (
        [*_texts(recipe), "tokenizer"]
        if recipe.trains_seed
        else [f"sources/{SEED}.json", f"sources/{FORMS}/{SEED}"]
    ),
    params=lambda recipe, item: seed_keys(recipe),
    each=lambda recipe: [""] if recipe.has_seed else [],
)
def seed(run: StageRun) -> None:
    """Write the seed checkpoint."""
    recipe = run.recipe
    if recipe.seed_model.model is not None:
        place_given(run, recipe.seed_model.model, SEED, run.out)
        return
    train_one(
        run,
        seed_piece,
        "seed",
        tokenizer=run.path("tokenizer"),
        shape=recipe.seed_model.shape,
        data=Texts(train=[run.path(name) for name in _texts(recipe)]),
        config=recipe.seed_model.training,
        seed=recipe.seed,
        device=run.device("seed"),
    )


def seed_piece(
    *,
    out: Path,
    progress: Progress,
    tokenizer: Path,
    shape: LlamaShape,
    seed: int,
    **training: Any,
) -> dict[str, Any]:
    """The piece: a new Llama with this tokenizer, trained."""
    initial = out.with_suffix(".initial")
    if workers.rank() == 0:
        initialise_model(shape, tokenizer, initial, seed=seed)
    workers.wait()
    return train_piece(out=out, progress=progress, start=initial, seed=seed, **training)
