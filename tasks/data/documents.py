"""Stage ``documents``: a domain's text, deduplicated and split by document."""

from pathlib import Path

from tasks.engine.params import document_keys, draws_text
from tasks.engine.stage import StageRun, stage
from upcycle_core.corpora.config import CorpusConfig, Domain
from upcycle_core.corpora.documents import write_documents
from upcycle_core.progress import Progress


@stage(
    "documents/{domain}",
    inputs=lambda recipe, domain: [f"sources/{domain}.json"],
    params=document_keys,
)
def documents(run: StageRun) -> None:
    """Write ``SPLIT.parquet`` and a manifest."""
    run.run_one(
        split_text,
        "corpora",
        domain=run.recipe.domains[run.domain],
        config=run.recipe.corpus,
        seed=run.recipe.seed if draws_text(run.recipe, run.domain) else 0,
        folder=run.recipe.text_folder,
        name=run.domain,
    )


def split_text(
    *,
    out: Path,
    progress: Progress,
    domain: Domain,
    config: CorpusConfig,
    seed: int,
    folder: Path | None,
    name: str,
) -> None:
    """The piece: one domain."""
    out.mkdir()
    write_documents(
        domain, out, config=config, seed=seed, folder=folder, progress=progress, name=name
    )
