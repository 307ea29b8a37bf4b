"""Stage ``instructions``: what is tuned on and judged by, in one form, unseen categories apart."""

from pathlib import Path

from tasks.sources import INSTRUCTIONS, folder_of
from tasks.stage import StageRun, stage
from upcycle_core.corpora.tuning.config import InstructionsConfig
from upcycle_core.corpora.tuning.prepare import prepare_instructions
from upcycle_core.progress import Progress

FAMILIES = (
    "arithmetic",
    "calendar",
    "catalogue",
    "family",
    "lists",
    "lookup",
    "strings",
    "words",
)
PREPARING = ("choose", "prepare", "prompts", "readers", "records", "superni")


@stage(
    INSTRUCTIONS,
    inputs=lambda recipe, item: [f"sources/{INSTRUCTIONS}.json"],
    params=("seed", "folder", "instructions"),
    sources=(
        "tasks/instructions.py",
        *(f"upcycle_core/corpora/families/{name}.py" for name in FAMILIES),
        *(f"upcycle_core/corpora/tuning/{name}.py" for name in PREPARING),
        "upcycle_core/corpora/conversations.py",
        "upcycle_core/corpora/readers.py",
        "upcycle_core/corpora/seeded.py",
    ),
    needed=lambda recipe: recipe.simoe is not None,
)
def instructions(run: StageRun) -> None:
    """Write ``train/DOMAIN.jsonl``, ``seen.jsonl``, ``unseen.jsonl`` and a manifest."""
    run.run_one(
        prepare_piece,
        "corpora",
        config=run.recipe.instructions,
        folder=folder_of(run.recipe),
        seed=run.recipe.seed,
    )


def prepare_piece(
    *, out: Path, progress: Progress, config: InstructionsConfig, folder: Path | None, seed: int
) -> None:
    """The piece: all sources together."""
    out.mkdir()
    prepare_instructions(config, out, folder=folder, seed=seed, progress=progress)
