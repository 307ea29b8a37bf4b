"""ROUGE-L of an answer, as Super-NaturalInstructions is scored (arXiv 2204.07705)."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of words (Lin 2004), the best reference's.

    As the published evaluation: ``rouge_score`` with the Porter stemmer, so that case, punctuation
    and the endings of words longer than three letters make no difference. Words are made of
    ``a-z0-9``: text in other alphabets scores 0.

    Args:
        prediction: What the model said.
        references: Right answers, at least one.

    Returns:
        0 (no word in common) to 1 (the same words in the same order).
    """
    scores = (_scorer().score(target, prediction)["rougeL"] for target in references)
    return float(max(score.fmeasure for score in scores))


@functools.cache  # making a stemmer takes longer than using it
def _scorer() -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)
