"""Functions that chats call: which there are, and with what they are called."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from upcycle_core.corpora.conversations import Message
from upcycle_core.corpora.readers import encodable


def tools_of(messages: Sequence[Message]) -> list[Any] | None:
    """The functions that there are, as the record says."""
    return messages[0].get("tools") if messages else None


def function_name(call: Mapping[str, Any]) -> str:
    """Of a call, or of a function that there is; empty where it has none, or white space in it."""
    name = _inner(call).get("name")
    return name if isinstance(name, str) and not re.search(r"\s", name) else ""


def with_objects(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """Let calls have objects as arguments where these are JSON text of one, as OpenAI's are.

    Args:
        messages: Of one chat; they stay as they are.

    Returns:
        The messages, and the texts that became objects.
    """
    texts: list[str] = []
    found = [
        message | {"tool_calls": [_with_object(call, texts) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
    return found, texts


def _with_object(call: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    inner = _inner(call)
    if inner is not call:
        return call | {"function": _with_object(inner, texts)}
    text = call.get("arguments")
    try:
        found = json.loads(text) if isinstance(text, str) else None
        encodable(json.dumps(found, ensure_ascii=False), "it")
    except ValueError:
        return call
    if not isinstance(found, dict):
        return call
    texts.append(text)
    return call | {"arguments": found}


def _inner(call: Any) -> Any:
    """What says which function and how it is called: OpenAI has that one level deeper."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call
