"""Instructions read from files and datasets, in one form, with what is wrong in them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from upcycle_core.corpora.conversations import (
    EXTRAS,
    Message,
    Unanswered,
    is_learnt,
    messages_of,
    place_rows,
)
from upcycle_core.corpora.readers import is_text, is_written
from upcycle_core.corpora.shapes import renamed
from upcycle_core.corpora.tuning.config import InstructionSource
from upcycle_core.errors import Fault, InputError


class Record(NamedTuple):
    """One instruction.

    Args:
        task: What belongs together in counts; the category where a record names none.
        category: The kind of task, held out or trained on as a whole.
        domain: Label of the expert that would learn it; None without one.
        prompt: What is asked.
        references: Right answers, the first of which is trained on.
        id: Its name where it has one.
        messages: The whole conversation, where it is more than a prompt and a response.
    """

    task: str
    category: str
    domain: str | None
    prompt: str
    references: tuple[str, ...]
    id: str | None = None
    messages: tuple[Message, ...] = ()

    @property
    def asked(self) -> tuple[Message, ...]:
        """What stands before the first response; nothing where that is what one user says."""
        before = self.messages[: first_response(self.messages)] if self.messages else ()
        roles = [message["role"] for message in before]
        return () if roles == ["user"] and not set(EXTRAS) & before[0].keys() else before


def first_response(messages: Sequence[Message]) -> int:
    """Place of the first response that is learnt, and that models are judged by."""
    return next(i for i, message in enumerate(messages) if is_learnt(message))


class LeftOut(NamedTuple):
    """Records that are not used, without being wrong.

    Args:
        reason: As the manifest counts them.
        records: How many.
        fault: What is wrong where there are too many.
    """

    reason: str
    records: int = 1
    fault: Fault | None = None


EMPTY, OVER = "an empty answer", "over max_per_task"
Found = Record | Fault | LeftOut
"""A record, one that is not used, or what is wrong with one: file, line, field and remedy."""


def file_records(name: str, source: InstructionSource, paths: Iterable[Path]) -> Iterator[Found]:
    """Records of .jsonl, .json and .parquet files; see ``conversations`` for their forms.

    Args:
        name: The source's.
        source: Its constants and field.
        paths: In order.
    """
    for path in paths:
        try:
            for place, row in place_rows(path):
                yield from checked(row, place, name, source)
        except (ValueError, OSError) as error:
            yield Fault(f"instructions.sources.{name}.files", str(path), str(error))


def checked(
    row: Mapping[str, Any], place: str, name: str, source: InstructionSource
) -> Iterator[Found]:
    """The record that ``row`` is, or everything that is wrong with it."""
    try:
        yield _record(row, place, name, source)
    except Unanswered as error:
        yield LeftOut(EMPTY, fault=error.faults[0])
    except InputError as error:
        yield from error.faults


def _record(row: Mapping[str, Any], place: str, name: str, source: InstructionSource) -> Record:
    row = renamed(dict(row), place)
    # Several right answers of which the first is trained on, as task sets have them.
    answers = _texts(row, "references", place) or _texts(row, "answers", place)
    if isinstance(row.get("answer"), list):
        answers = answers or _texts(row, "answer", place)
        row["answer"] = answers[0] if answers else None
    messages = messages_of(row, place)
    first = first_response(messages)
    if "messages" not in row and first + 1 < len(messages):
        answers = ()  # to the prompt, and the first turn is what models are judged by
    response = messages[first]["content"]
    if not response:
        remedy = "the first response calls a function and says nothing, and answers are compared "
        remedy += "by what they say; give it text or remove the record"
        raise InputError(Fault(f"{place}, messages[{first}], content", response, remedy))
    category = _label(row, source.category_field, place) or source.category or name
    is_plain = [message["role"] for message in messages] == ["user", "assistant"]
    is_plain = is_plain and not any(set(EXTRAS) & message.keys() for message in messages)
    number, domain = row.get("id"), row.get("domain")
    return Record(
        task=_label(row, "task", place) or category,
        category=category,
        domain=domain if is_text(domain) else source.domain,
        prompt="\n\n".join(message["content"] for message in messages[:first]),
        references=(response, *(answer for answer in answers if answer != response)),
        id=str(number) if isinstance(number, str | int) else None,
        messages=() if is_plain else tuple(messages),
    )


def _label(row: Mapping[str, Any], field: str, place: str) -> str | None:
    value = row.get(field)
    if value is not None and not is_text(value):
        remedy = "must be text that is not empty; mend or remove it"
        raise InputError(Fault(f"{place}, {field}", value, remedy))
    return value


def _texts(row: Mapping[str, Any], field: str, place: str) -> Sequence[str]:
    values = row.get(field)
    if values is None:
        return ()
    if not isinstance(values, list) or not all(map(is_written, values)):
        remedy = "must be a list of texts; mend or remove it"
        raise InputError(Fault(f"{place}, {field}", values, remedy))
    return [value for value in values if value.strip()]
