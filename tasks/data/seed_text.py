"""Stage ``seed_text``: text that the seed alone is trained on, where it is not the domains'."""

from tasks.data.outside import text_piece
from tasks.engine.artifacts import SEED
from tasks.engine.stage import StageRun, each, stage


@stage(
    "seed_text",
    lambda recipe, item: [
        f"sources/{SEED}.json",
        "tokenizer",
        *each(recipe, "documents/{domain}"),
    ],
    params=("seed", "corpus.min_characters", "corpus.bos", "seed_model.text"),
    each=lambda recipe: [] if recipe.seed_text is None else [""],
)
def seed_text(run: StageRun) -> None:
    """Write ``documents/train.parquet`` and ``tokens/train``, without what domains hold out."""
    domains = [run.path(f"documents/{name}") for name in run.recipe.domains]
    run.run_one(
        text_piece,
        "corpora",
        split="train",
        name="seed_model.text",
        source=run.recipe.seed_text,
        apart_from=[
            file for folder in domains for file in folder.glob("*.parquet") if file.stem != "train"
        ],
        config=run.recipe.corpus,
        seed=run.recipe.seed,
        folder=run.recipe.text_folder,
        tokenizer=run.path("tokenizer"),
    )
