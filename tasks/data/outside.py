"""Stage ``outside``: text of a domain that no model, alignment or training sees, to judge on."""

from pathlib import Path

from tasks.engine.artifacts import DOCUMENTS, TOKENS
from tasks.engine.stage import StageRun, stage
from upcycle_core.corpora.config import CorpusConfig, Source
from upcycle_core.corpora.documents import write_heldout
from upcycle_core.corpora.shards import write_corpus
from upcycle_core.progress import Progress


@stage(
    "outside/{outside}",
    lambda recipe, name: [f"sources/outside/{name}.json", "tokenizer"],
    params=("seed", "corpus.min_characters", "outside.{outside}"),
    each=lambda recipe: recipe.outside,
)
def outside(run: StageRun) -> None:
    """Write ``documents/heldout.parquet`` and ``tokens/heldout``."""
    run.run_one(
        outside_piece,
        "corpora",
        name=run.item,
        source=run.recipe.outside[run.item],
        config=run.recipe.corpus,
        seed=run.recipe.seed,
        folder=run.recipe.text_folder,
        tokenizer=run.path("tokenizer"),
    )


def outside_piece(
    *,
    out: Path,
    progress: Progress,
    name: str,
    source: Source,
    config: CorpusConfig,
    seed: int,
    folder: Path | None,
    tokenizer: Path,
) -> None:
    """The piece: one text."""
    write_heldout(
        source,
        out / DOCUMENTS,
        config=config,
        seed=seed,
        folder=folder,
        progress=progress,
        name=f"outside.{name}",
    )
    (out / TOKENS).mkdir()
    write_corpus(out / DOCUMENTS, tokenizer, out / TOKENS, progress=progress)
