"""What calibration text lacks for routers whose lambda is chosen on it, before work on the rest."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.dume.checks import CROSS_VALIDATED
from tasks.dume.prepared import fold_faults
from tasks.engine.stage import Session
from tasks.symphony.variants import solves_routers
from upcycle_core.errors import Fault


def document_faults(session: Session) -> Iterator[Fault]:
    """Text that is one document, of all domains: before there are models, whose tokens it gets.

    Args:
        session: Whose ``documents`` are there.
    """
    import pyarrow.parquet as parquet

    if not _chooses(session.recipe):
        return
    for domain in session.recipe.domains:
        file = session.workspace.path(f"documents/{domain}") / "calibration.parquet"
        count = parquet.read_metadata(file).num_rows
        if count < 2:
            remedy = "a cross-validated router.ridge_lambda is judged on documents that a router "
            remedy += "has not seen: give 2 or more, or name a number"
            yield Fault(f"domains.{domain}.calibration", f"{count} documents", remedy)


def corpus_faults(session: Session) -> Iterator[Fault]:
    """Text whose counted tokens lie in one fold, of all domains.

    Args:
        session: Whose ``corpora`` are there.
    """
    if _chooses(session.recipe):
        yield from fold_faults(session)


def _chooses(recipe: Recipe) -> bool:
    return solves_routers(recipe) and recipe.router.ridge_lambda == CROSS_VALIDATED
