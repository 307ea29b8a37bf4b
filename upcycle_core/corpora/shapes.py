"""Shapes in which instruction data are published, by the names that ``conversations`` reads.

ShareGPT's ``{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}``, prompts
that are called ``question`` or ``query``, system messages that are called ``system_prompt``, and
content that is a list of parts, as OpenAI has it.
"""

from typing import Any

from upcycle_core.errors import Fault, InputError

TURNS, SPEAKER, WORDS = "conversations", "from", "value"
"""ShareGPT's, of a record, and of what was said in it."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
QUESTIONS = ("question", "query")
"""A prompt where no field of its own name is there."""
SYSTEM, SYSTEM_PROMPT = "system", "system_prompt"
OTHER_NAMES = (TURNS, *QUESTIONS, SYSTEM_PROMPT)
WHOLE = ("messages", "prompt", "instruction")
"""Where one of these is there, the record is of no shape of others."""


def renamed(row: dict[str, Any], place: str) -> dict[str, Any]:
    """A record, with the names of ``conversations`` for those that others have.

    Args:
        row: Fields that hold something; what has the names already stays as it is.
        place: File and line, for errors.

    Raises:
        InputError: Somebody speaks in it who is not known.
    """
    if row.get(SYSTEM_PROMPT) and not row.get(SYSTEM):
        row = row | {SYSTEM: row[SYSTEM_PROMPT]}
    if any(name in row for name in WHOLE):
        return row
    if TURNS in row:
        return row | {"messages": _messages(row[TURNS], place)}
    questions = [name for name in QUESTIONS if name in row]
    return row | {"prompt": row[questions[0]]} if len(questions) == 1 else row


def _messages(turns: Any, place: str) -> list[Any]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        remedy = (
            f'must be a list of {{"{SPEAKER}": ..., "{WORDS}": ...}}; mend or remove the record'
        )
        shown = turns[:40] if isinstance(turns, str | list) else turns
        raise InputError(Fault(f"{place}, {TURNS}", shown, remedy))
    return [_message(turn, f"{place}, {TURNS}[{i}]") for i, turn in enumerate(turns)]


def _message(turn: dict[str, Any], place: str) -> dict[str, Any]:
    """What was said; by the names of ``messages`` it may be already."""
    if turn.get(SPEAKER) is None:
        return turn
    if turn[SPEAKER] not in ROLES:
        remedy = f"must be one of {', '.join(ROLES)}; write it so, or as a role of messages"
        raise InputError(Fault(f"{place}, {SPEAKER}", turn[SPEAKER], remedy))
    rest = {name: value for name, value in turn.items() if name not in (SPEAKER, WORDS)}
    return {"role": ROLES[turn[SPEAKER]], "content": turn.get(WORDS)} | rest


def one_text(content: Any, place: str) -> Any:
    """The text of content that is one part of text; what is no list of parts stays.

    Raises:
        InputError: There are other parts, or several.
    """
    if not isinstance(content, list):
        return content
    match content:
        case [{"type": "text", "text": str(text)}]:
            return text
    remedy = "must be text, or one part of text; join the parts, or remove the record"
    raise InputError(Fault(f"{place}, content", content[:1], remedy))
