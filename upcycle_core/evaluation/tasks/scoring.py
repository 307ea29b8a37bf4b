"""Scores that the harness leaves to us: programs that run confined, ROUGE-L, names in an answer."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from upcycle_core.evaluation.tasks.config import CodeConfig
from upcycle_core.evaluation.tasks.rouge import rouge_l
from upcycle_core.evaluation.tasks.sandbox import Limits, run_program

SCORED_BY = ("program", "rouge_l", "contains")
"""Of ``OWN_KEYS`` those that say how an answer is scored."""
OWN_KEYS = (*SCORED_BY, "category")
"""What a definition may say beyond the harness's own keys: a template of the program to run, the
field that holds references, the field that holds the names of which an answer has to hold one, the
field that names an item's category."""


def own_scoring(extra: Mapping[str, Any], code: CodeConfig) -> dict[str, Any]:
    """What the harness is told where a definition says that scores are ours."""
    if "program" in extra:
        return _scored_by("pass@1", _pass_at_1(extra["program"], code))
    if "rouge_l" in extra:
        return _scored_by("rouge_l", partial(_rouge, extra["rouge_l"]))
    if "contains" in extra:
        return _scored_by("contains", partial(_contains, extra["contains"]))
    return {}


def fields_read(extra: Mapping[str, Any]) -> set[str]:
    """Fields that an item needs for them."""
    from jinja2 import Environment, meta

    fields = {extra[key] for key in OWN_KEYS if key in extra and key != "program"}
    program = Environment().parse(extra.get("program", ""))
    return fields | meta.find_undeclared_variables(program) - {"response"}


def _scored_by(metric: str, score: Callable[[Mapping[str, Any], str], float]) -> dict[str, Any]:
    def process_results(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
        return {metric: score(document, results[0])}

    entry = {"metric": metric, "aggregation": "mean", "higher_is_better": True}
    return {"process_results": process_results, "metric_list": [entry]}


def _pass_at_1(template: str, code: CodeConfig) -> Callable[[Mapping[str, Any], str], float]:
    from jinja2 import Environment, StrictUndefined

    program = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(
        template
    )
    limits = Limits(seconds=code.seconds, memory_bytes=code.memory_bytes)

    def score(document: Mapping[str, Any], response: str) -> float:
        source = program.render({**document, "response": response})
        return float(run_program(source, limits=limits).passed)

    return score


def _rouge(field: str, document: Mapping[str, Any], response: str) -> float:
    references = document[field]
    return rouge_l(response, [references] if isinstance(references, str) else references)


def _contains(field: str, document: Mapping[str, Any], response: str) -> float:
    names = document[field]
    if isinstance(names, str):  # PopQA has several as a text, a list in JSON
        names = json.loads(names) if names.startswith("[") else [names]
    cleaned = (name.strip().lower() for name in names)
    return float(any(name and name in response.lower() for name in cleaned))
