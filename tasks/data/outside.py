"""Stage ``outside``: text of a domain that no model, alignment or training sees, to judge on."""

from collections.abc import Sequence
from pathlib import Path

from tasks.engine.artifacts import DOCUMENTS, TOKENS
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.corpora.config import CorpusConfig, Source, Split
from upcycle_core.corpora.documents import write_texts
from upcycle_core.corpora.shards import write_corpus
from upcycle_core.progress import Progress


@stage(
    "outside/{outside}",
    lambda recipe, name: [
        f"sources/outside/{name}.json",
        "tokenizer",
        *each(recipe, "documents/{domain}"),
    ],
    params=("seed", "corpus.min_characters", "corpus.bos", "outside.{outside}"),
    each=lambda recipe: recipe.outside,
)
def outside(run: StageRun) -> None:
    """Write ``documents/heldout.parquet`` and ``tokens/heldout``, without what domains hold."""
    domains = [run.path(f"documents/{name}") for name in run.recipe.domains]
    run.run_one(
        text_piece,
        "corpora",
        split="heldout",
        name=f"outside.{run.item}",
        source=run.recipe.outside[run.item],
        apart_from=[file for folder in domains for file in folder.glob("*.parquet")],
        config=run.recipe.corpus,
        seed=run.recipe.seed,
        folder=run.recipe.text_folder,
        tokenizer=run.path("tokenizer"),
    )


def text_piece(
    *,
    out: Path,
    progress: Progress,
    split: Split,
    name: str,
    source: Source,
    config: CorpusConfig,
    seed: int,
    folder: Path | None,
    tokenizer: Path,
    apart_from: Sequence[Path] = (),
) -> None:
    """The piece: one text, its documents and their tokens."""
    write_texts(
        split,
        source,
        out / DOCUMENTS,
        config=config,
        seed=seed,
        folder=folder,
        apart_from=apart_from,
        progress=progress,
        name=name,
    )
    (out / TOKENS).mkdir()
    write_corpus(out / DOCUMENTS, tokenizer, out / TOKENS, bos=config.bos, progress=progress)
