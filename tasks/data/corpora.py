"""Stage ``corpora``: a domain's documents as memory-mapped tokens."""

from tasks.engine.stage import StageRun, stage
from upcycle_core.corpora.shards import write_corpus


@stage(
    "corpora/{domain}",
    lambda recipe, domain: [f"documents/{domain}", "tokenizer"],
    params=("corpus.bos",),
)
def corpora(run: StageRun) -> None:
    """Write ``SPLIT/tokens.bin`` and a manifest."""
    run.run_one(
        write_corpus,
        "corpora",
        documents=run.path(f"documents/{run.domain}"),
        tokenizer=run.path("tokenizer"),
        bos=run.recipe.corpus.bos,
    )
