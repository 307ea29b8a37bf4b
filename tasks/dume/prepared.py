"""What tokenised text lacks for what a recipe asks of it, before a model is trained on it."""

from collections.abc import Iterator

import numpy as np

from infra.recipe.schema import Recipe
from tasks.data.given import given_model, given_models, known_files
from tasks.dume.backbone import regressed
from tasks.dume.checks import CROSS_VALIDATED
from tasks.dume.files import calibration_splits
from tasks.engine.stage import Session
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.batches import counted_tokens, fold_of
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.dume.calibration import UNDIVIDED, halves_of
from upcycle_core.dume.checks import fewest_tokens
from upcycle_core.dume.collect import read_paragraphs
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.text.perplexity import scored_paragraphs


def text_faults(session: Session) -> Iterator[Fault]:
    """What calibration text lacks for repairs, for a merge that is fitted to it and for a
    cross-validated lambda, of all domains; and responses that it, or held-out text, does not tell.

    Args:
        session: Whose ``corpora`` are there.
    """
    yield from heldout_faults(session)
    recipe = session.recipe
    repairs = recipe.experts.repair != "none"
    needed = fewest_tokens(_shape(session)) if repairs else 0
    fitted = () if "backbone" in recipe.pinned else regressed(recipe)
    for domain in recipe.domains:
        for split in calibration_splits(recipe, domain):
            repaired_on = needed if split == "calibration" else 0
            is_divided = repaired_on > 0 or f"corpora/{domain}/{split}" in fitted
            is_chosen_on = recipe.router.ridge_lambda == CROSS_VALIDATED
            if is_divided or is_chosen_on or recipe.statistics.count == "responses":
                yield from _faults(session, domain, split, repaired_on, is_divided)


def heldout_faults(session: Session) -> Iterator[Fault]:
    """Held-out text that does not tell its responses, where these alone are scored, or has none.

    Args:
        session: Whose ``corpora`` are there.
    """
    config = session.recipe.evaluation.measuring
    for domain in session.recipe.domains if config.loss == "responses" else ():
        try:
            path = session.workspace.path(f"corpora/{domain}/heldout")
            scored_paragraphs(TokenCorpus(path), config)
        except InputError as error:
            yield from error.faults


def fold_faults(session: Session) -> Iterator[Fault]:
    """What calibration text lacks for a cross-validated lambda, of all domains."""
    if session.recipe.router.ridge_lambda == CROSS_VALIDATED:
        for domain in session.recipe.domains:
            yield from _faults(session, domain, "calibration")


def _faults(
    session: Session, domain: str, split: str, needed: int = 0, is_divided: bool = False
) -> Iterator[Fault]:
    """The same of one text, where a repair needs so many tokens, and what is solved on one half of
    it is judged on the other."""
    recipe = session.recipe
    corpus = TokenCorpus(session.workspace.path(f"corpora/{domain}/{split}"))
    try:
        documents, tokens = _counted(recipe, corpus)
    except InputError as error:  # responses that it does not tell
        yield from error.faults
        return
    field, count = f"domains.{domain}.{split}", int(tokens.sum())
    if count < needed:
        remedy = f"experts.repair needs at least {needed:,} that are counted: give more text, or "
        yield Fault(field, f"{count:,} tokens", f"{remedy}repair none")
    elif not count:
        yield Fault(field, "0 tokens", "none are counted, and no router is solved: give more text")
    elif is_divided and halves_of(documents, tokens) is None:
        yield Fault(field, f"{count:,} tokens", UNDIVIDED)
    if recipe.router.ridge_lambda == CROSS_VALIDATED:
        folds = recipe.statistics.parts
        filled = np.unique(fold_of(documents[tokens > 0], folds))
        if len(filled) < 2:
            remedy = f"all lie in one of statistics.folds = {folds}, and a cross-validated "
            remedy += "router.ridge_lambda judges them by routers that have seen none of them: "
            remedy += "give it as several documents, or name a number"
            yield Fault(field, f"{count:,} tokens", remedy)


def _counted(recipe: Recipe, corpus: TokenCorpus) -> tuple[np.ndarray, np.ndarray]:
    """The document of each paragraph that statistics read, [N], and its counted tokens, [N]."""
    config = recipe.statistics
    pieces = read_paragraphs(corpus, config)
    return pieces.rows[:, 0], counted_tokens(corpus, pieces, config.count)


def _shape(session: Session) -> dict[str, int]:
    """The number of activations, as config.json says it, that all experts have."""
    recipe = session.recipe
    if recipe.trains_seed:
        return {"intermediate_size": recipe.seed_model.shape.intermediate_size}
    cache = session.workspace.models
    given = given_model(recipe, next(iter(given_models(recipe).values())), cache)
    return CheckpointReader(given, known=known_files(recipe, cache)).config
