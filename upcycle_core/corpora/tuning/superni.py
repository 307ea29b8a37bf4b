"""Super-NaturalInstructions: the published task files, and instances as JSON lines."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from upcycle_core.corpora.conversations import place_rows
from upcycle_core.corpora.readers import is_text, is_written
from upcycle_core.corpora.tuning.choose import rank
from upcycle_core.corpora.tuning.config import InstructionSource
from upcycle_core.corpora.tuning.prompts import EXAMPLES, superni_prompt
from upcycle_core.corpora.tuning.records import EMPTY, OVER, Found, LeftOut, Record
from upcycle_core.errors import Fault

Row = Mapping[str, Any]
REMEDY_EMPTY = "must be text that is not empty; fill it or remove the instance"


def task_file_records(
    source: InstructionSource,
    paths: Iterable[Path],
    tasks: frozenset[str] | None,
    *,
    seed: int,
    most: Callable[[str], int | None],
) -> Iterator[Found]:
    """Instances of published task files; a file's name is its task, its first category the task's.

    All instances are looked at, and prompts are written of those that ``most`` takes: a
    task has thousands, and each prompt repeats definition and examples.

    Args:
        source: Its constants.
        paths: One JSON a task: ``Definition``, ``Categories``, ``Positive Examples`` (``input`` and
            ``output`` each) and ``Instances`` (``input``, and ``output``, all right answers).
        tasks: Those to take; None takes all.
        seed: Decides which instances ``most`` takes.
        most: Category to the most instances of one of its tasks; None takes all.
    """
    for path in paths:
        if tasks is not None and path.stem not in tasks:
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError) as error:
            yield Fault("instructions", str(path), f"is no JSON in UTF-8 ({error}); get it again")
            continue
        faults = list(_task_faults(found, path))
        if faults:
            yield from faults
            continue
        definition = found["Definition"]
        task = {
            "definition": definition if isinstance(definition, str) else definition[0],
            "positive_examples": found["Positive Examples"],
            "examples": source.examples,
        }
        category = (found.get("Categories") or [source.category or path.stem])[0]
        rows = []
        for number, row in enumerate(found["Instances"]):
            row = {**row, "prompt": row.get("input"), "answers": row.get("output")}
            wrong = list(_unusable(row, category, f"{path}, instance {number}"))
            yield from wrong
            rows += [] if wrong else [row]
        own = (task, path.stem, category, source.domain)
        # As they are held out by, so that what is drawn no more was not the last to be trained on.
        ranks = [rank(_record(row, *own).prompt, seed) for row in rows]
        drawn = sorted(range(len(rows)), key=ranks.__getitem__)[: most(category)]
        for place in sorted(drawn):
            yield _record(rows[place], *own)
        if len(rows) > len(drawn):
            yield LeftOut(OVER, len(rows) - len(drawn))


def row_records(
    source: InstructionSource, paths: Iterable[Path], definitions: Path
) -> Iterator[Found]:
    """Instances as JSON lines, the form of ``evaluation.harness.superni``.

    Args:
        source: Its split and constants.
        paths: Lines with ``id``, ``task``, ``category``, ``split``, ``prompt`` (the input), and
            ``answers`` or ``answer``, a text or a list.
        definitions: Lines with ``id``, ``definition`` and ``positive_examples``.
    """
    tasks: dict[str, Row] = {}
    for place, row in _rows(definitions):
        if isinstance(row, Fault):
            yield row
        elif faults := list(_definition_faults(row, place)):
            yield from faults
        else:
            tasks[row["id"]] = {**row, "examples": source.examples}
    for path in paths:
        for place, row in _rows(path):
            if isinstance(row, Fault):
                yield row
                continue
            if source.split is not None and row.get("split") != source.split:
                continue
            task = row.get("task")
            if not is_text(task) or task not in tasks:
                remedy = f"{definitions} does not define it; add it, or take its instances out"
                yield Fault(f"{place}, task", task, remedy)
                continue
            answers = row.get("answers") or row.get("answer")
            row["answers"] = [answers] if isinstance(answers, str) else answers
            category = row.get("category") or tasks[task].get("category") or source.category
            domain = row.get("domain") if is_text(row.get("domain")) else source.domain
            wrong = list(_unusable(row, category or task, place))
            yield from wrong
            if not wrong:
                yield _record(row, tasks[task], task, category or task, domain)


def _unusable(row: Row, category: Any, place: str) -> Iterator[Fault | LeftOut]:
    """What keeps an instance from being one: its faults, or that nothing is a right answer."""
    answers = row["answers"]
    faults = []
    if not is_text(category):
        remedy = "must be text that is not empty; mend it"
        faults.append(Fault(f"{place}, category", category, remedy))
    if not is_written(row.get("prompt")):
        faults.append(Fault(f"{place}, input", row.get("prompt"), "must be text; mend it"))
    empty = Fault(f"{place}, output", answers, REMEDY_EMPTY)
    if not isinstance(answers, list) or not all(map(is_written, answers)):
        faults.append(empty)
    yield from faults
    if not faults and not any(answer.strip() for answer in answers):
        yield LeftOut(EMPTY, fault=empty)


def _record(row: Row, task: Row, name: str, category: str, domain: str | None) -> Record:
    number = row.get("id")
    return Record(
        task=name,
        category=category,
        domain=domain,
        prompt=superni_prompt(
            row["prompt"],
            task["definition"],
            task["positive_examples"],
            shown=EXAMPLES if task["examples"] is None else task["examples"],
        ),
        references=tuple(dict.fromkeys(a for a in row["answers"] if a.strip())),
        id=number if isinstance(number, str) else None,
    )


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        yield from place_rows(path)
    except (ValueError, OSError) as error:
        yield str(path), Fault("instructions", str(path), str(error))


def _task_faults(task: Any, path: Path) -> Iterator[Fault]:
    if not isinstance(task, dict):
        yield Fault("instructions", str(path), "is no task of Super-NaturalInstructions; remove it")
        return
    definition = task.get("Definition")
    if isinstance(definition, list) and definition:
        definition = definition[0]
    if not is_text(definition):
        remedy = "must be text, or a list of texts, not empty; get the file again"
        yield Fault(f"{path}, Definition", task.get("Definition"), remedy)
    if not _is_examples(task.get("Positive Examples")):
        yield Fault(f"{path}, Positive Examples", "not a list of {input, output}", "mend it")
    instances = task.get("Instances")
    if not isinstance(instances, list) or not all(isinstance(row, dict) for row in instances):
        yield Fault(f"{path}, Instances", "not a list of {input, output}", "mend it")
    categories = task.get("Categories") or []
    if not isinstance(categories, list) or not all(map(is_text, categories)):
        yield Fault(f"{path}, Categories", categories, "must be a list of texts; mend it")


def _definition_faults(row: Row, place: str) -> Iterator[Fault]:
    for name in ("id", "definition"):
        if not is_text(row.get(name)):
            yield Fault(f"{place}, {name}", row.get(name), "give text that is not empty")
    if not _is_examples(row.get("positive_examples")):
        value = row.get("positive_examples")
        yield Fault(f"{place}, positive_examples", value, "give a list of {input, output}")


def _is_examples(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and all(is_written(one.get(name)) for name in ("input", "output"))
        for one in value
    )
