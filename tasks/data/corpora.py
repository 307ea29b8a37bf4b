"""Stage ``corpora``: a domain's documents as memory-mapped tokens."""

from pathlib import Path

from tasks.engine.stage import StageRun, stage
from upcycle_core.corpora.shards import write_corpus
from upcycle_core.progress import Progress


@stage(
    "corpora/{domain}",
    inputs=lambda recipe, domain: [f"documents/{domain}", "tokenizer"],
)
def corpora(run: StageRun) -> None:
    """Write ``SPLIT/tokens.bin`` and a manifest."""
    run.run_one(
        tokenise,
        "corpora",
        documents=run.path(f"documents/{run.domain}"),
        tokenizer=run.path("tokenizer"),
    )


def tokenise(*, out: Path, progress: Progress, documents: Path, tokenizer: Path) -> None:
    """The piece: one domain."""
    out.mkdir()
    write_corpus(documents, tokenizer, out, progress=progress)
