"""Super-NaturalInstructions as published (Wang et al. 2022, arXiv 2204.07705).

Prompts are those of Tk-Instruct: the task's definition, its first two positive examples, the
instance. Where a task has fewer examples, fewer are shown.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from upcycle_core.corpora.readers import encodable
from upcycle_core.corpora.tuning.prompts import superni_prompt
from upcycle_core.errors import Fault, InputError, raise_faults

_MAX_NEW_TOKENS = 128  # Tk-Instruct's max_target_length
_Row = dict[str, Any]


def superni_items(
    instances: Path,
    tasks: Path,
    *,
    categories: Sequence[str] = (),
    split: str = "test",
    per_task: int = 100,
) -> list[dict[str, Any]]:
    """Instances with their prompts.

    Tk-Instruct leaves examples out where a prompt exceeds 1024 tokens of its tokenizer. Here they
    stay: a prompt that a model cannot hold is cut, and counted, where models are run.

    Args:
        instances: JSON lines with ``id``, ``task``, ``category``, ``split``, ``prompt`` (the
            input) and ``answer``: a string, or a list of right answers, also found in ``answers``.
        tasks: JSON lines with ``id``, ``category``, ``definition`` and ``positive_examples``
            (``input`` and ``output`` each).
        categories: Those to evaluate, as published the ones held out of training; all by default.
        split: Instances to take.
        per_task: Instances of each task, the first ones in the file; 100 as published.

    Returns:
        One ``{id, task, category, prompt, answers, answer}`` an instance, in the file's order:
        ``answers`` are all references and ``answer`` is the first.

    Raises:
        InputError: A line is no JSON, lacks a field or holds something else in it, an instance's
            task or a category is unknown, or nothing is left to evaluate.
    """
    known = {row["id"]: row for row in _read(tasks, _TASK)}
    rows = _selected(_read(instances, _INSTANCE), split, categories, instances)
    missing = sorted({row["task"] for row in rows} - set(known))
    remedy = f"{tasks} does not define it; add it, or take its instances out"
    raise_faults(Fault(f"{instances}: task", name, remedy) for name in missing)
    taken: Counter[str] = Counter()
    items = []
    for row in rows:
        taken[row["task"]] += 1
        if taken[row["task"]] <= per_task:
            items.append(_item(row, known[row["task"]]))
    return items


def superni_definition() -> dict[str, Any]:
    """How lm-evaluation-harness asks and scores these items.

    Returns:
        Fields of its task configuration, without those that name the task and its data, and two of
        ours: ``rouge_l`` and ``category`` name the fields that hold references and category.
    """
    return {
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "target_delimiter": " ",
        # Tk-Instruct, an encoder-decoder, ends its answers by itself. A decoder without instruction
        # tuning goes on with a further example: the prompt's examples are set off by empty lines.
        "generation_kwargs": {
            "until": ["\n\n"],
            "max_gen_toks": _MAX_NEW_TOKENS,
            "do_sample": False,
        },
        "num_fewshot": 0,
        "rouge_l": "answers",
        "category": "category",
    }


def _selected(
    rows: Sequence[_Row], split: str, categories: Sequence[str], instances: Path
) -> list[_Row]:
    """Instances of a split and of ``categories``, where any are named."""
    rows, all_rows = [row for row in rows if row["split"] == split], rows
    if not rows:
        there = ", ".join(sorted({row["split"] for row in all_rows}))
        raise InputError(Fault("split", split, f"{instances} has none of it; it has {there}"))
    there = ", ".join(sorted({row["category"] for row in rows}))
    remedy = f"{instances} has none of it in this split; it has {there}"
    unknown = set(categories) - {row["category"] for row in rows}
    raise_faults(Fault("categories", name, remedy) for name in categories if name in unknown)
    return [row for row in rows if not categories or row["category"] in categories]


def _item(row: _Row, task: _Row) -> dict[str, Any]:
    answer = row["answer"]
    answers = row.get("answers") or ([answer] if isinstance(answer, str) else answer)
    return {
        "id": row["id"],
        "task": row["task"],
        "category": row["category"],
        "prompt": superni_prompt(row["prompt"], task["definition"], task["positive_examples"]),
        "answers": answers,
        "answer": answers[0],
    }


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    with suppress(ValueError):
        return encodable(value, "it") == value
    return False


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_examples(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and _is_text(one.get("input")) and _is_text(one.get("output"))
        for one in value
    )


_TASK = {
    "id": (_is_text, "a string"),
    "definition": (_is_text, "a string"),
    "positive_examples": (_is_examples, "a list of {input, output}"),
}
_INSTANCE = {
    **dict.fromkeys(("id", "task", "category", "split", "prompt"), (_is_text, "a string")),
    "answer": (lambda own: _is_text(own) or _is_texts(own), "a string or a list of strings"),
    "answers": (lambda own: own is None or _is_texts(own), "a list of strings, or leave it out"),
}


def _read(path: Path, fields: Mapping[str, Any]) -> list[_Row]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(Fault("superni", str(path), f"cannot be read ({error})")) from None
    rows, faults = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            row, found = _parsed(line, fields, f"{path}, line {number}")
            rows.append(row)
            faults += found
    raise_faults(faults)
    return rows


def _parsed(line: str, fields: Mapping[str, Any], where: str) -> tuple[_Row, list[Fault]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return {}, [Fault(where, line[:60], f"no JSON ({error}); correct it")]
    if not isinstance(row, dict):
        return {}, [Fault(where, line[:60], f"give an object with {', '.join(fields)}")]
    return row, [
        Fault(f"{where}: {name}", row.get(name), f"give {meaning}")
        for name, (fits, meaning) in fields.items()
        if not fits(row.get(name))
    ]
