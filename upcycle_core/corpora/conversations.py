"""Instruction data as it lies in files, brought to one form: conversations.

A record is one of::

    {"prompt": "...", "response": "..."}
    {"instruction": "...", "input": "...", "output": "..."}
    {"instruction": "...", "context": "...", "response": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Messages may hold what chat templates read beside these (``EXTRAS``), and a record ``tools`` and a
system message (``system``). One of a prompt may hold earlier turns (``history``, a list of
[question, answer]). A response of ``weight`` 0 is there to be read and not learnt, as OpenAI has
it. OpenAI's older form, ``functions`` beside messages that hold ``function_call``
and are of the role ``function``, is brought to the newer. Names that others have for these are in
``shapes``.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from upcycle_core.corpora.readers import encodable, file_rows
from upcycle_core.corpora.shapes import OTHER_NAMES, one_text, renamed
from upcycle_core.errors import Fault, InputError

PROMPT_FIELDS = ("prompt", "instruction")
RESPONSE_FIELDS = ("response", "output", "completion", "answer")
MATERIAL_FIELDS = ("input", "context")
"""What a prompt is about, which stands behind it."""
BEFORE_FIELDS = ("system", "history")
"""What stands before a prompt."""
PARTS = (*BEFORE_FIELDS, *PROMPT_FIELDS, *MATERIAL_FIELDS, *RESPONSE_FIELDS)
FUNCTIONS, CALL = "functions", "function_call"
"""OpenAI's older names, of a record for ``tools``, and of a message for its one call."""
FIELDS = ("messages", "tools", FUNCTIONS, *PARTS, *OTHER_NAMES)
THOUGHTS = ("reasoning_content", "thinking")
"""Of a message: what its writer thought, by the two names that templates have for it."""
OPENING, THOUGHT = "<think>", "</think>"
"""Before what a response thinks, and behind it, before what it says."""
LISTS = ("tool_calls", "tools")
"""Of a message: which functions it calls; of the first, which there are. Lists of objects, or JSON
of such, as columns of one type hold them."""
EXTRAS = (*THOUGHTS, *LISTS, "tool_call_id", "name")
"""What of a message is kept beside who says what."""
WEIGHT = "weight"
"""OpenAI's, of a response: 0 where it is not learnt, else 1."""
FORM = '{"prompt": ..., "response": ...} or {"messages": [...]}'
FAULTS_SHOWN = 5
"""A file of the wrong form is wrong in every line."""

Message = dict[str, Any]


class Unanswered(InputError):
    """A record whose response is missing or empty."""


class Conversation(NamedTuple):
    """What was said, up to the last response.

    Args:
        messages: Each with ``role`` and ``content``, and those of ``EXTRAS`` that it has; the
            first is no response, the last is one (``role`` is ``assistant``). The record's
            ``tools`` are the first one's.
        place: File and line, for errors.
        task: The record's field ``task``, where it is text.
    """

    messages: list[Message]
    place: str
    task: str | None = None


def read_conversations(files: Sequence[Path]) -> list[Conversation]:
    """Read .jsonl, .json and .parquet files of instructions, in order.

    A prompt and what stands in ``input`` or ``context`` are one message, an empty line between
    them. What follows the last response of a conversation is left out.

    Raises:
        InputError: A file cannot be read, holds no record, or a record has no prompt or response;
            says file, line, field and what to do, for the first few records.
    """
    found: list[Conversation] = []
    faults: list[Fault] = []
    for file in files:
        records = 0
        try:
            for place, row in place_rows(file):
                records += 1
                try:
                    task = row.get("task")
                    named = task if isinstance(task, str) else None
                    found.append(Conversation(messages_of(row, place), place, named))
                except InputError as error:
                    faults += error.faults
        except (ValueError, OSError) as error:
            faults.append(Fault("instructions", str(file), str(error)))
        else:
            if not records:
                faults.append(Fault("instructions", str(file), "it holds no record; fill it"))
    if not files:
        faults.append(Fault("instructions", [], "name a .jsonl, .json or .parquet file"))
    if faults:
        more = len(faults) - FAULTS_SHOWN
        rest = [Fault("instructions", f"{more} more", "they are faulty too")] if more > 0 else []
        raise InputError(*faults[:FAULTS_SHOWN], *rest)
    return found


def place_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place (file and line) and fields of each record of a .jsonl, .json or .parquet file.

    Raises:
        ValueError: The file is of another kind, or a line is no record.
        OSError: The file cannot be read.
    """
    for place, row in file_rows(file, FORM):
        yield f"{file}, {place}", present(row)


def present(row: dict[str, Any]) -> dict[str, Any]:
    """Fields that hold something: a Parquet file has all columns in every row."""
    return {name: value for name, value in row.items() if value is not None}


def is_learnt(message: Message) -> bool:
    """Whether it is a response, and one that is to be learnt."""
    return message["role"] == "assistant" and message.get(WEIGHT) != 0


def joined(messages: Sequence[Message]) -> str:
    """What was said, without who said it: an empty line between messages."""
    return "\n\n".join(message["content"] for message in messages if message["content"])


def thoughts_of(message: Message) -> Iterator[str]:
    """What a response thinks, as a field or before the mark that ends thoughts."""
    yield from (message[name] for name in THOUGHTS if message.get(name))
    thought, mark, _ = message["content"].rpartition(THOUGHT)
    if mark and thought.removeprefix(OPENING).strip():
        yield thought.removeprefix(OPENING)


def without_thoughts(text: str) -> str:
    """What a response says behind what it thinks."""
    return text.rpartition(THOUGHT)[2].strip()


def whole_text(messages: Sequence[Message]) -> str:
    """What was said, thought and called, without who did: an empty line between."""
    return "\n\n".join(part for message in messages for part in _parts(message))


def complete_text(messages: Sequence[Message]) -> str:
    """``whole_text``, and the functions that there are: all that tells chats apart."""
    tools = [json.dumps(m["tools"], ensure_ascii=False) for m in messages if m.get("tools")]
    return "\n\n".join(filter(None, [whole_text(messages), *tools]))


def _parts(message: Message) -> Iterator[str]:
    yield from (message[name] for name in THOUGHTS if message.get(name))
    if message["content"]:
        yield message["content"]
    if message.get("tool_calls"):
        yield json.dumps(message["tool_calls"], ensure_ascii=False)


def messages_of(row: dict[str, Any], place: str) -> list[Message]:
    """The conversation that a record is; ``place`` is named in errors.

    A system message that says nothing is none, nor is an ``input`` or a ``context`` of blanks.

    Raises:
        Unanswered: A response is empty.
        InputError: It has no prompt or response, or not as text; an ``input`` and a ``context``;
            two system messages; or tools or calls that are none, or by both names.
    """
    row = renamed(row, place)
    if "messages" in row:
        said = _with_system(row, _conversation(row["messages"], place), place)
    else:
        said = _asked_and_answered(row, place)
    tools = _tools(row, place)
    return [said[0] | {"tools": tools}, *said[1:]] if tools else said


def _tools(row: dict[str, Any], place: str) -> list[Any]:
    """The functions that a record holds, in the newer form."""
    tools = _objects(row, "tools", place)
    older = _objects(row, FUNCTIONS, place) if "messages" in row else []
    if tools and older:
        remedy = "stands beside tools, the newer name of the same; keep one of them"
        raise InputError(Fault(f"{place}, {FUNCTIONS}", _start(older), remedy))
    return tools or [_as_function(function) for function in older]


def _asked_and_answered(row: dict[str, Any], place: str) -> list[Message]:
    """The conversation of a record that has a prompt and a response."""
    prompt = _text(row, _only(row, PROMPT_FIELDS, place), place)
    try:
        response = _text(row, _only(row, RESPONSE_FIELDS, place), place)
    except InputError as error:
        is_empty = all(_is_blank(row.get(name)) for name in RESPONSE_FIELDS)
        raise (Unanswered(*error.faults) if is_empty else error) from None
    if material := [name for name in MATERIAL_FIELDS if _holds(row, name)]:
        prompt = f"{prompt}\n\n{_text(row, _only(row, material, place), place)}"
    asked = {"role": "user", "content": prompt}
    return [*_before(row, place), asked, {"role": "assistant", "content": response}]


def _before(row: dict[str, Any], place: str) -> Iterator[Message]:
    """The system message and the earlier turns that a record holds beside its prompt."""
    if _holds(row, "system"):
        yield {"role": "system", "content": _text(row, "system", place)}
    turns = row["history"] if _holds(row, "history") else []
    if not isinstance(turns, list) or not all(isinstance(t, list) and len(t) == 2 for t in turns):
        remedy = "must be a list of [question, answer]; mend it or take it out"
        raise InputError(Fault(f"{place}, history", _start(turns), remedy))
    for i, turn in enumerate(turns):
        for role, said in zip(("user", "assistant"), turn, strict=True):
            yield _message({"role": role, "content": said}, f"{place}, history[{i}]")


def _with_system(row: dict[str, Any], said: list[Message], place: str) -> list[Message]:
    """The messages behind the system message that a record holds beside them."""
    if not _holds(row, "system"):
        return said
    system = {"role": "system", "content": _text(row, "system", place)}
    own = [message["content"] for message in said if message["role"] == "system"]
    if not own:
        return [system, *said]
    if own[0].strip() != system["content"].strip():
        remedy = "stands beside messages that have another system message; keep one of them"
        raise InputError(Fault(f"{place}, system", _start(row["system"]), remedy))
    return said


def _conversation(messages: Any, place: str) -> list[Message]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        remedy = 'must be a list of {"role": ..., "content": ...}; mend or remove the record'
        raise InputError(Fault(f"{place}, messages", _start(messages), remedy))
    said = [
        _message(present(message), f"{place}, messages[{i}]")
        for i, message in enumerate(messages)
        if not _is_empty_system(message)
    ]
    if any(_holds(message, CALL) for message in messages):  # what is returned is of that form too
        said = [m | {"role": "tool"} if m["role"] == "function" else m for m in said]
    roles = [message["role"] for message in said]
    if "assistant" not in roles or roles[0] == "assistant":
        remedy = "a response (role assistant) must follow some prompt; mend or remove the record"
        raise InputError(Fault(f"{place}, messages", roles, remedy))
    learnt = [i for i, message in enumerate(said) if is_learnt(message)]
    if not learnt:
        remedy = "every response has weight 0, which leaves nothing to learn; remove the record"
        raise InputError(Fault(f"{place}, messages", roles, remedy))
    return said[: learnt[-1] + 1]


def _message(message: dict[str, Any], place: str) -> Message:
    """One message; one that calls functions need not say anything, nor what a function returns."""
    message = message | {"content": one_text(message.get("content"), place)}
    extras = {name: _extra(message, name, place) for name in EXTRAS if _holds(message, name)}
    if call := _older_call(message, extras.get("tool_calls"), place):
        extras["tool_calls"] = [call]
    extras = {name: value for name, value in extras.items() if value}
    role, is_silent = _text(message, "role", place), _is_blank(message.get("content"))
    if role == "assistant" and message.get(WEIGHT, 1) != 1:
        extras[WEIGHT] = _no_weight(message[WEIGHT], place)
    may_be_silent = role in ("tool", "function") or extras.get("tool_calls")
    try:
        text = "" if may_be_silent and is_silent else _text(message, "content", place)
    except InputError as error:
        raise (Unanswered(*error.faults) if is_silent and role == "assistant" else error) from None
    return {"role": role, "content": text} | extras


def _no_weight(value: Any, place: str) -> int:
    """The weight of a response that is not learnt."""
    if value != 0:
        remedy = "must be 0, where the response is not to be learnt, or 1; mend or remove it"
        raise InputError(Fault(f"{place}, {WEIGHT}", value, remedy))
    return 0


def _older_call(message: dict[str, Any], calls: Any, place: str) -> dict[str, Any] | None:
    """The call that a message's ``function_call`` is, in the newer form; None without one."""
    value = message[CALL] if _holds(message, CALL) else None
    if not value:
        return None
    if calls:
        remedy = "stands beside tool_calls, the newer name of the same; keep one of them"
        raise InputError(Fault(f"{place}, {CALL}", _start(value), remedy))
    try:
        found = _objects({CALL: f"[{value}]" if isinstance(value, str) else [value]}, CALL, place)
    except InputError:
        found = []
    if found == [{}]:  # a Parquet file has all keys in every object
        return None
    if len(found) != 1 or not isinstance(found[0].get("name"), str):
        remedy = "must be an object with name and arguments, or JSON of one; mend or remove it"
        raise InputError(Fault(f"{place}, {CALL}", _start(value), remedy))
    return _as_function(found[0])


def _as_function(value: dict[str, Any]) -> dict[str, Any]:
    """A function or a call of OpenAI's older form in the newer."""
    return {"type": "function", "function": value}


def _is_empty_system(message: dict[str, Any]) -> bool:
    """Whether a system message says nothing and holds nothing else."""
    holds = any(_holds(message, name) for name in EXTRAS)
    return message.get("role") == "system" and _is_blank(message.get("content")) and not holds


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _holds(row: dict[str, Any], name: str) -> bool:
    """Whether a field holds something: columns of text have blanks where there is nothing."""
    return not _is_blank(row.get(name))


def _extra(message: dict[str, Any], name: str, place: str) -> Any:
    return _objects(message, name, place) if name in LISTS else _text(message, name, place)


def _objects(row: dict[str, Any], name: str, place: str) -> list[Any]:
    """A list of objects, or what is written as JSON; empty where there is none."""
    value = row[name] if _holds(row, name) else None
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if found is not None and not (
            isinstance(found, list) and all(isinstance(one, dict) for one in found)
        ):
            raise ValueError("it holds something else")
        encodable(json.dumps(found, ensure_ascii=False), "it")
    except (ValueError, TypeError) as error:
        remedy = f"must be a list of objects, or JSON of one ({error}); mend or remove it"
        raise InputError(Fault(f"{place}, {name}", _start(value), remedy)) from None
    return _filled(found or [])


def _filled(value: Any) -> Any:
    """``value`` without keys that hold nothing: a Parquet file has all keys in every object."""
    if isinstance(value, dict):
        return {key: _filled(own) for key, own in value.items() if own is not None}
    return [_filled(own) for own in value] if isinstance(value, list) else value


def _only(row: dict[str, Any], fields: Sequence[str], place: str) -> str:
    """The one of ``fields`` that the record has."""
    present = [name for name in fields if name in row]
    if len(present) != 1:
        wrong = f"has both {' and '.join(present)}" if present else f"has none of {list(fields)}"
        remedy = f"the record {wrong}; write it as {FORM}"
        raise InputError(Fault(f"{place}, {fields[0]}", list(row), remedy))
    return present[0]


def _text(row: dict[str, Any], name: str, place: str) -> str:
    text = row.get(name)
    if not isinstance(text, str) or not text.strip():
        remedy = "must be text that is not empty; fill it or remove the record"
        raise InputError(Fault(f"{place}, {name}", _start(text), remedy))
    try:
        return encodable(text, "it")
    except ValueError as error:
        raise InputError(Fault(f"{place}, {name}", ascii(_start(text)), str(error))) from None


def _start(value: Any) -> Any:
    """Enough of it to be recognised."""
    return value[:40] if isinstance(value, str | list) else value
