"""How good answers to instructions are: exact match and ROUGE-L, by task category."""

import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from upcycle_core.corpora.conversations import without_thoughts
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.evaluation.tasks.rouge import rouge_l
from upcycle_core.plain import Plain

Metric = Literal["exact_match", "rouge_l"]
Split = Literal["seen", "unseen"]
METRICS: tuple[Metric, ...] = ("exact_match", "rouge_l")
SPLITS: tuple[Split, ...] = ("seen", "unseen")
_PUNCTUATION = re.compile(
    rf"(?!(?<!\w)-\.?\d|(?<=\d)\.\d|(?<![\w.])\.\d)[{re.escape(string.punctuation)}]"
)
"""ASCII punctuation, without the minus before a number and the point in one."""


@dataclass(frozen=True, kw_only=True)
class Score(Plain):
    """The mean over instances.

    Args:
        exact_match: Share of answers that are a reference, 0 to 1.
        rouge_l: Mean ROUGE-L, 0 to 1.
        count: Instances.
    """

    exact_match: float
    rouge_l: float
    count: int


@dataclass(frozen=True, kw_only=True)
class SplitScore(Plain):
    """One model's answers to one set of instances.

    Args:
        categories: {category: mean over its instances}, at least one.
        truncated: Prompts that lost tokens from the left.
    """

    categories: Mapping[str, Score]
    truncated: int = 0
    written = ("exact_match", "rouge_l", "count", "truncated", "categories")

    @property
    def exact_match(self) -> float:
        """The mean over categories, each counting the same (the paper's Table 1, Avg.)."""
        return self._mean("exact_match")

    @property
    def rouge_l(self) -> float:
        """The same of ROUGE-L."""
        return self._mean("rouge_l")

    @property
    def count(self) -> int:
        """Instances of all categories."""
        return sum(score.count for score in self.categories.values())

    def _mean(self, metric: Metric) -> float:
        values = [getattr(score, metric) for score in self.categories.values()]
        return math.fsum(values) / len(values)


def exact_match(answer: str, references: Sequence[str]) -> bool:
    """Whether an answer is one of the references, as Super-NaturalInstructions is scored.

    Case, ASCII punctuation and the amount of white space make no difference (``normalize_answer``
    of the published ``compute_metrics.py``, arXiv 2204.07705), with two departures. The published
    code takes ``-5`` and ``5``, or ``3.5`` and ``35``, for the same; here sign and point belong to
    a number. There an empty answer is right where a reference is punctuation alone; here such a
    reference is compared as it stands, and an empty answer is never right.
    """
    return any(_matches(answer, reference) for reference in references)


def _matches(answer: str, reference: str) -> bool:
    expected = normalised(reference)
    if expected:
        return normalised(answer) == expected
    return answer.strip() == reference.strip() != ""


def normalised(text: str) -> str:
    """Lower case, single blanks, no ASCII punctuation but what belongs to a number."""
    return " ".join(_PUNCTUATION.sub("", text.lower()).split())


def score_answers(
    texts: Sequence[str], rows: Sequence[Mapping[str, Any]], *, truncated: int = 0
) -> SplitScore:
    """Scores of one model's answers.

    Args:
        texts: One answer a row.
        rows: Each with ``category`` and ``references``, a list of right answers; without
            ``references``, ``response`` is the only one.
        truncated: Prompts that were cut.

    Raises:
        InputError: No row, another number of answers, or a row without category or references.
    """
    raise_faults(_faults(texts, rows))
    instances: dict[str, list[tuple[bool, float]]] = {}
    for text, row in zip(texts, rows, strict=True):
        references = references_of(row)
        pair = (exact_match(text, references), rouge_l(text, references))
        instances.setdefault(row["category"], []).append(pair)
    return SplitScore(
        categories={
            name: Score(
                exact_match=sum(exact for exact, _ in pairs) / len(pairs),
                rouge_l=math.fsum(rouge for _, rouge in pairs) / len(pairs),
                count=len(pairs),
            )
            for name, pairs in sorted(instances.items())
        },
        truncated=truncated,
    )


def references_of(row: Mapping[str, Any]) -> list[str]:
    """Right answers of a row, without what they think first, as answers are compared."""
    references = row.get("references") or [row["response"]]
    return [without_thoughts(reference) or reference for reference in references]


def _faults(texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Fault]:
    if not rows:
        return [Fault("rows", 0, "nothing to score; give at least one instance")]
    if len(texts) != len(rows):
        return [Fault("texts", len(texts), f"one answer a row is needed: {len(rows)}")]
    faults = []
    for place, row in enumerate(rows):
        name = f"rows[{place}]"
        if not row.get("category"):
            faults.append(Fault(f"{name}.category", row.get("category"), "name its category"))
        if not row.get("references") and not row.get("response"):
            remedy = "give a list of right answers, at least one"
            faults.append(Fault(f"{name}.references", row.get("references"), remedy))
    return faults
