"""Stage ``vocabulary``: the union of the strangers' tokenizers, in the place of a shared one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.data.segmentation import union_of
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.backbone.vocabulary import write_union_tokenizer
from upcycle_core.progress import Progress


@stage(
    "tokenizer",
    inputs=lambda recipe, item: each(recipe, "experts/{domain}"),
    params=("symphony.segmentation",),
)
def tokenizer(run: StageRun) -> None:
    """Write the union's tokenizer."""
    run.run_one(union_piece, "assembly", **union_arguments(run))


def union_arguments(run: StageRun) -> dict[str, Any]:
    """What ``union_of`` takes."""
    recipe = run.recipe
    assert recipe.symphony is not None
    return {
        "models": {name: run.path(f"experts/{name}") for name in recipe.domains},
        "segmentation": recipe.symphony.segmentation,
    }


def union_piece(
    *, out: Path, progress: Progress, models: Mapping[str, Path], segmentation: str | None
) -> None:
    """The piece."""
    progress.start("uniting the vocabularies", 1, "vocabularies")
    write_union_tokenizer(union_of(models, segmentation), out)
    progress.advance()
