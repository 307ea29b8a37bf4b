import random
import re

import pytest
from nltk.stem.porter import PorterStemmer

from upcycle_core.evaluation.tasks.rouge import rouge_l


def slow_rouge_l(prediction: str, reference: str) -> float:
    """F-measure of the longest common subsequence, by the table of its definition."""
    stem = PorterStemmer().stem
    a, b = (
        [stem(word) if len(word) > 3 else word for word in re.findall("[a-z0-9]+", text.lower())]
        for text in (prediction, reference)
    )
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, first in enumerate(a):
        for j, second in enumerate(b):
            skipped = max(lengths[i][j + 1], lengths[i + 1][j])
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if first == second else skipped
    common = lengths[-1][-1]
    return 2 * common / (len(a) + len(b)) if common else 0.0


def test_scores_equal_the_slow_oracle():
    draw = random.Random(0)
    words = [
        "The",
        "cats",
        "cat",
        "running",
        "runs,",
        "sat.",
        "was",
        "wa",
        "42",
        "houses",
        "(house)",
    ]
    for _ in range(200):
        prediction, reference = (
            " ".join(draw.choices(words, k=draw.randint(1, 8))) for _ in range(2)
        )
        # The package divides twice; the oracle once.
        expected = pytest.approx(slow_rouge_l(prediction, reference), abs=1e-12)
        assert rouge_l(prediction, [reference]) == expected


def test_precision_and_recall_weigh_the_same():
    # Two of three words, two of two: 2 * (2/3 * 1) / (2/3 + 1).
    assert rouge_l("the cat sat", ["the cat"]) == pytest.approx(0.8)
    assert rouge_l("the cat", ["the cat sat"]) == pytest.approx(0.8)


def test_order_counts():
    assert rouge_l("b a", ["a b"]) == pytest.approx(0.5)


def test_the_best_reference_counts():
    assert rouge_l("yes", ["no", "Yes.", "yes indeed"]) == 1.0


def test_case_punctuation_and_endings_make_no_difference():
    assert rouge_l("Running, houses!", ["run house"]) == 1.0
    assert rouge_l("runs", ["run"]) == 1.0  # four letters are stemmed
    assert rouge_l("was", ["wa"]) == 0.0  # three are not


def test_an_answer_without_words_scores_nothing():
    assert rouge_l("", ["a"]) == 0.0
    assert rouge_l("...", ["..."]) == 0.0
    assert rouge_l("да", ["да"]) == 0.0
