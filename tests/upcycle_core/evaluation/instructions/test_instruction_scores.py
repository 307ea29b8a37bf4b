"""Exact match and ROUGE-L by hand, and what is averaged over what."""

import json

import pytest

from upcycle_core.corpora.families.catalogue import FAMILIES, generate
from upcycle_core.errors import InputError
from upcycle_core.evaluation.instructions.scores import (
    SplitScore,
    exact_match,
    normalised,
    references_of,
    score_answers,
)


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("The cat.", ["the cat"], True),
        ("  the \n CAT!", ["The cat?"], True),
        ("cat", ["dog", "Cat"], True),
        ("cat", ["the cat"], False),  # articles stay, unlike SQuAD's
        ("5!", ["5."], True),
        ("-5", ["5"], False),  # published: True
        ("$-5", ["-5"], True),
        ("3-5", ["35"], True),  # as published
        ("3.5", ["35"], False),  # published: True
        ("3.5.", ["3.5"], True),
        (".5", ["5"], False),  # published: True
        ("$.50!", [".50"], True),
        ("-.5", [".5"], False),
        ("-.5", ["5"], False),
        ("...5", ["5"], True),
        ("v.5", ["v5"], True),
        ("1, 2", ["12"], False),
        ("", ["a"], False),
        ("été", ["Été"], True),
    ],
)
def test_exact_match_is_that_of_super_naturalinstructions(answer, references, expected):
    assert exact_match(answer, references) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("", False), ("...", False), ("-", False), (" + ", True), ("+\n", True)],
)
def test_a_reference_of_punctuation_alone_is_compared_as_it_stands(answer, expected):
    """Without its punctuation it is nothing, and so is an empty answer."""
    assert exact_match(answer, ["+"]) is expected


def test_an_empty_answer_is_never_right():
    assert not exact_match("", [""])
    assert not exact_match(" ", ["...", " "])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_wrong_answers_to_a_generated_family_score_nothing(name):
    answers = {record["response"] for record in generate(name, 300, seed=0)}
    assert len(answers) > 1
    assert all(map(normalised, answers))
    assert len(set(map(normalised, answers))) == len(answers)
    for answer in answers:
        assert exact_match(answer, [answer])
        wrong = ["", "...", f"-{answer}" if answer.isdecimal() else f"{answer} {answer}"]
        wrong += sorted(answers - {answer})[:5]
        rows = [row(name, answer)] * len(wrong)
        assert score_answers(wrong, rows).exact_match == 0


def longest_common(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence, by trying every way."""
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + longest_common(a[1:], b[1:])
    return max(longest_common(a[1:], b), longest_common(a, b[1:]))


def slow_rouge(answer: str, references: list[str]) -> float:
    """F-measure of words of at most three letters, which no stemmer changes."""
    best = 0.0
    for reference in references:
        mine, theirs = answer.split(), reference.split()
        common = longest_common(mine, theirs)
        if common:
            precision, recall = common / len(mine), common / len(theirs)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def row(category: str, *references: str) -> dict:
    return {"category": category, "references": list(references), "response": "not used"}


def test_scores_are_means_over_instances_and_then_over_categories():
    rows = [row("b", "a b c", "d e"), row("a", "a b"), row("b", "a a a"), row("b", "x")]
    texts = ["A c e!", "a b.", "a b a", "y"]
    found = score_answers(texts, rows, truncated=2)
    plain = ["a c e", "a b", "a b a", "y"]
    slow = [slow_rouge(t, r["references"]) for t, r in zip(plain, rows, strict=True)]
    assert list(found.categories) == ["a", "b"]
    b = found.categories["b"]
    assert (b.count, b.exact_match) == (3, 0.0)
    assert b.rouge_l == pytest.approx((slow[0] + slow[2] + slow[3]) / 3)  # fp64
    assert slow[0] == pytest.approx(2 / 3)  # by hand: 2 of 3 words on both sides
    assert found.exact_match == (1 + 0) / 2  # not 1 of 4
    assert found.rouge_l == pytest.approx((1 + b.rouge_l) / 2)
    assert (found.count, found.truncated) == (4, 2)
    assert SplitScore.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_a_row_without_references_has_its_response():
    found = score_answers(["yes"], [{"category": "c", "response": "Yes."}])
    assert found.exact_match == found.rouge_l == 1.0


def test_faults_are_told_together():
    rows = [{"category": "", "references": ["a"]}, {"category": "c", "references": []}]
    with pytest.raises(InputError) as raised:
        score_answers(["a", "b"], rows)
    assert [f.field for f in raised.value.faults] == ["rows[0].category", "rows[1].references"]
    with pytest.raises(InputError, match="one answer a row"):
        score_answers(["a"], [row("c", "a")] * 2)
    with pytest.raises(InputError, match="nothing to score"):
        score_answers([], [])


@pytest.mark.parametrize(
    "row",
    [
        {"references": ["<think>\nlet me add\n</think>\n\n42", "forty-two"]},
        {"response": "two score and two </think> 42"},
    ],
)
def test_what_a_reference_thinks_first_is_no_part_of_it(row):
    """Answers are compared without what they think."""
    score = score_answers(["42"], [{"category": "sums", **row}])
    assert (score.exact_match, score.rouge_l) == (1.0, 1.0)
    assert references_of(row)[0] == "42"
    assert references_of({"response": "nothing is said</think>"}) == ["nothing is said</think>"]
