"""Stage ``instructions``: what is tuned on and judged by, in one form, unseen categories apart."""

from pathlib import Path

from tasks.engine.artifacts import INSTRUCTIONS
from tasks.engine.stage import StageRun, stage
from upcycle_core.corpora.tuning.config import InstructionsConfig
from upcycle_core.corpora.tuning.prepare import prepare_instructions
from upcycle_core.progress import Progress


@stage(
    INSTRUCTIONS,
    inputs=lambda recipe, item: [f"sources/{INSTRUCTIONS}.json"],
    params=("seed", "folder", "instructions"),
)
def instructions(run: StageRun) -> None:
    """Write ``train/DOMAIN.jsonl``, ``seen.jsonl``, ``unseen.jsonl`` and a manifest."""
    run.run_one(
        prepare_piece,
        "corpora",
        config=run.recipe.instructions,
        folder=run.recipe.text_folder,
        seed=run.recipe.seed,
    )


def prepare_piece(
    *, out: Path, progress: Progress, config: InstructionsConfig, folder: Path | None, seed: int
) -> None:
    """The piece: all sources together."""
    out.mkdir()
    prepare_instructions(config, out, folder=folder, seed=seed, progress=progress)
