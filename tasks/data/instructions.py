"""Stage ``instructions``: what is tuned on and judged by, in one form, unseen categories apart."""

from tasks.engine.artifacts import INSTRUCTIONS, SEED
from tasks.engine.stage import StageRun, stage
from upcycle_core.corpora.tuning.prepare import prepare_instructions


@stage(
    INSTRUCTIONS,
    lambda recipe, item: [f"sources/{INSTRUCTIONS}.json", SEED],
    params=("seed", "folder", "instructions", "corpus.bos"),
)
def instructions(run: StageRun) -> None:
    """Write ``train/DOMAIN.jsonl``, ``seen.jsonl``, ``unseen.jsonl`` and a manifest."""
    run.run_one(
        prepare_instructions,
        "corpora",
        config=run.recipe.instructions,
        folder=run.recipe.text_folder,
        seed=run.recipe.seed,
        tokenizer=run.path(SEED),
        bos=run.recipe.corpus.bos,
    )
