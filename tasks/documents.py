"""Stage ``documents``: a domain's text, deduplicated and split by document."""

from pathlib import Path

from tasks.sources import folder_of
from tasks.stage import StageRun, stage
from upcycle_core.corpora.config import CorpusConfig, Domain
from upcycle_core.corpora.documents import write_documents
from upcycle_core.progress import Progress


@stage(
    "documents/{domain}",
    inputs=lambda recipe, domain: [f"sources/{domain}.json"],
    params=(
        "seed",
        "corpus",
        "domains.{domain}.train",
        "domains.{domain}.calibration",
        "domains.{domain}.heldout",
        "domains.{domain}.elsewhere",
    ),
    sources=(
        "upcycle_core/corpora/distinct.py",
        "upcycle_core/corpora/documents.py",
        "upcycle_core/corpora/harvest.py",
        "upcycle_core/corpora/readers.py",
        "upcycle_core/corpora/seeded.py",
        "upcycle_core/corpora/sources.py",
        "upcycle_core/corpora/splits.py",
    ),
)
def documents(run: StageRun) -> None:
    """Write ``SPLIT.parquet`` and a manifest."""
    run.run_one(
        split_text,
        "corpora",
        domain=run.recipe.domains[run.domain],
        config=run.recipe.corpus,
        seed=run.recipe.seed,
        folder=folder_of(run.recipe),
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
