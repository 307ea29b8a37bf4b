"""Stage ``documents``: a domain's text, deduplicated and split by document."""

from tasks.engine.params import document_keys, draws_text
from tasks.engine.stage import StageRun, stage
from upcycle_core.corpora.documents import write_documents


@stage(
    "documents/{domain}", lambda recipe, domain: [f"sources/{domain}.json"], params=document_keys
)
def documents(run: StageRun) -> None:
    """Write ``SPLIT.parquet`` and a manifest."""
    run.run_one(
        write_documents,
        "corpora",
        domain=run.recipe.domains[run.domain],
        config=run.recipe.corpus,
        seed=run.recipe.seed if draws_text(run.recipe, run.domain) else 0,
        folder=run.recipe.text_folder,
        name=f"domains.{run.domain}",
    )
