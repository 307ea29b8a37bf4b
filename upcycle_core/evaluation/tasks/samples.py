"""What the harness logs of an item, as an ``Item``."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.tasks.items import Item
from upcycle_core.evaluation.tasks.tasks import longest_answer

if TYPE_CHECKING:
    from upcycle_core.evaluation.tasks.tasks import HarnessTask

Sample = Mapping[str, Any]
LIKELIHOODS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
"""Metrics whose items come as (log-likelihood, length)."""
LABELS = ("f1", "mcc")
"""Metrics whose items come as (right label, chosen label)."""
LARGEST_EXPONENT = 700.0
"""exp() of more is no double."""


def chosen_metric(task: "HarnessTask", samples: Mapping[str, Sequence[Sample]]) -> tuple[str, str]:
    """The metric and the filter that the recipe names, or the first that the task defines.

    Raises:
        InputError: The task has no such metric, or its parts have none in common.
    """
    measured = [_measured(found) for found in samples.values()]
    common = [key for key in measured[0] if all(key in others for others in measured)]
    filters = dict.fromkeys(name for name, _ in common)
    defined = next(iter(task.tasks.values())).aggregation()
    metrics = dict.fromkeys([*defined, *(metric for _, metric in common)])
    known = [(metric, name) for name in filters for metric in metrics if (name, metric) in common]
    asked = task.settings["metric"]
    for metric, name in known:
        if asked is None or asked in (metric, f"{metric},{name}"):
            return metric, name
    remedy = f"the task has {', '.join(map(','.join, known))}"
    if not known:
        remedy = "its parts have no metric in common; make each a task of its own"
    raise InputError(Fault(f"tasks.{task.name}.metric", asked, remedy))


def _measured(samples: Sequence[Sample]) -> dict[tuple[str, str], None]:
    """(filter, metric) of all items, in order."""
    return {(sample["filter"], metric): None for sample in samples for metric in sample["metrics"]}


def items_of(
    samples: Sequence[tuple[str, Sample]], task: "HarnessTask", *, metric: str, seed: int
) -> list[Item]:
    """Logged samples, each with its subtask, as items of ``task``; those without ``metric`` are
    left out, as the harness leaves them out."""
    ids = {(subtask, str(sample["doc"].get("id", ""))) for subtask, sample in samples}
    by_number = len(ids) < len(samples) or any(not own for _, own in ids)
    return [
        _item_of(sample, task, subtask=subtask, metric=metric, seed=seed, by_number=by_number)
        for subtask, sample in samples
        if metric in sample["metrics"]
    ]


def _item_of(
    sample: Sample, task: "HarnessTask", *, subtask: str, metric: str, seed: int, by_number: bool
) -> Item:
    document, category = sample["doc"], task.extra.get("category")
    prompt, target, response = _texts(sample, task.tasks[subtask], metric)
    return Item(
        task=task.name,
        subtask="" if len(task.tasks) == 1 else subtask,
        category=str(document[category]) if category else "",
        id=str(sample["doc_id"] if by_number else document["id"]),
        seed=seed,
        prompt=prompt,
        target=target,
        response=response,
        metric=metric,
        score=_score(sample[metric], metric, where=f"tasks.{task.name}.metric"),
    )


def is_truncated(sample: Sample, model: Any) -> bool:
    """Whether the model saw only the end of the prompt."""
    for context, *rest in sample["arguments"]:
        if not rest:
            return False  # a rolling likelihood reads the text in windows
        if isinstance(rest[0], dict):
            text, room = context, model.max_length - longest_answer(rest[0])
        else:
            text, room = context + rest[0], model.max_length + 1
        if len(model.tok_encode(text)) > room:
            return True
    return False


def category_means(items: Sequence[Item]) -> dict[str, float]:
    """Mean score by category, or by part of a group."""
    found: dict[str, list[float]] = {}
    for item in items:
        name = item.category or item.subtask
        if name:
            found.setdefault(name, []).append(item.score)
    return {name: sum(scores) / len(scores) for name, scores in sorted(found.items())}


def _texts(sample: Sample, part: Any, metric: str) -> tuple[str, str, str]:
    """Prompt, target and response, as people read them."""
    (prompt, *rest), target = sample["arguments"][0], sample["target"]
    if not rest:
        return "", str(prompt), ""
    answers = sample["filtered_resps"]
    has_choices = part.get_config("doc_to_choice") is not None
    choices = part.doc_to_choice(sample["doc"]) if has_choices else ()
    if isinstance(rest[0], dict):
        return str(prompt), _named(target, choices), str(answers[0])
    if part.get_config("output_type") != "multiple_choice":  # whether one text is what it would say
        _, is_greedy = answers[0]
        return str(prompt), str(target).strip(), str(target).strip() if is_greedy else ""
    if getattr(part, "multiple_input", 0):  # choices stand in the prompts, before one ending
        target = part.doc_to_text(sample["doc"])
    # Score and response agree: lengths count where the metric counts them.
    lengths = {"acc_norm": len, "acc_bytes": lambda choice: len(choice.encode())}
    length = lengths.get(metric, lambda choice: 1)
    found = [float(answers[index][0]) / length(choice) for index, choice in enumerate(choices)]
    return str(prompt), _named(target, choices), choices[found.index(max(found))].strip()


def _named(target: Any, choices: Sequence[str]) -> str:
    """Right answers; an index stands for a choice."""
    targets = target if isinstance(target, list) else [target]
    names = [
        choices[one] if isinstance(one, int) and 0 <= one < len(choices) else str(one)
        for one in targets
    ]
    return " | ".join(name.strip() for name in names)


def _score(value: Any, metric: str, *, where: str) -> float:
    """An item's own figure.

    Raises:
        InputError: The metric has none.
    """
    if metric in LIKELIHOODS:
        likelihood, length = value
        nats = -likelihood / length
        return nats / math.log(2) if metric == "bits_per_byte" else _exp(nats)
    if metric == "perplexity":
        return _exp(-value)
    if metric in LABELS and isinstance(value, tuple):
        right, chosen = value
        return float(right == chosen)
    if isinstance(value, list):  # an item of several parts, each right or wrong
        return sum(map(float, value)) / len(value)
    if isinstance(value, tuple):
        remedy = "has no score of single items, which are compared; choose another metric"
        raise InputError(Fault(where, metric, remedy))
    return float(value)


def _exp(nats: float) -> float:
    return math.exp(min(nats, LARGEST_EXPONENT))
