"""What calibration text lacks for routers whose lambda is chosen on it, before work on the rest."""

from collections.abc import Iterator

from infra.recipe.schema import Recipe
from tasks.data.given import given_model, given_models
from tasks.dume.checks import CROSS_VALIDATED
from tasks.dume.prepared import fold_faults, heldout_faults
from tasks.engine.stage import Session
from tasks.symphony.variants import section, solves_routers
from tasks.symphony.vocabulary import segmentation_faults, sharing
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


def expert_faults(session: Session) -> Iterator[Fault]:
    """What is wrong with text and tokenizers, before there are models.

    Args:
        session: Whose ``documents`` are there, and the ``vocabulary`` of models that share one.
    """
    yield from document_faults(session)
    yield from _rule_faults(session)


def _rule_faults(session: Session) -> Iterator[Fault]:
    """Given models and the shared tokenizer of those that are trained here, of other rules.

    Given ones alone are compared before anything is made, and a domain's own tokenizer is refused
    beside them.
    """
    recipe, workspace = session.recipe, session.workspace
    given, shared = given_models(recipe), sharing(recipe)
    if section(recipe).segmentation is not None or not (given and shared):
        return
    places = {
        name: given_model(recipe, given[name], workspace.models)
        if name in given
        else workspace.path("vocabulary")
        for name in recipe.domains
        if name in given or name in shared
    }
    yield from segmentation_faults(places, None)


def corpus_faults(session: Session) -> Iterator[Fault]:
    """Text whose counted tokens lie in one fold, and responses that are scored and not told, of
    all domains.

    Args:
        session: Whose ``corpora`` are there.
    """
    yield from heldout_faults(session)
    if _chooses(session.recipe):
        yield from fold_faults(session)


def _chooses(recipe: Recipe) -> bool:
    return solves_routers(recipe) and recipe.router.ridge_lambda == CROSS_VALIDATED
