"""What the programs that ask readers share: the request, and answers that outlive a crash."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy


def answer(version: str, ask: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """Ask ``ask`` about each model of the request that the command line names.

    The answers are written after each model, so that a reader that dies has said what it had.

    Args:
        version: Of the reader.
        ask: From the path of a model and the request to ``first`` [P, V], the logarithms of the
            probabilities of what follows each prompt; ``greedy``, the ids that do; ``ids``, what
            its tokenizer makes of each text; and, where the reader lets us look, ``places`` and
            ``unknown``.
    """
    request = json.loads(Path(sys.argv[1]).read_text())
    answers: dict[str, Any] = {"version": version, "models": {}}
    out = Path(request["out"])
    for name, path in request["models"].items():
        said = ask(path, request)
        numpy.save(out.with_name(f"{out.stem}-{name}.npy"), said.pop("first"))
        answers["models"][name] = said
        out.write_text(json.dumps(answers))


def look_at(parameters: Any, request: dict[str, Any]) -> dict[str, Any]:
    """``places`` and ``unknown`` of what was loaded, if the request names what to look for."""
    from arrived import places

    if not request.get("wanted"):
        return {}
    sought = json.loads(Path(request["wanted"]).read_text())
    found, unknown = places(parameters, sought)
    return {"places": found, "unknown": unknown}


def ids_of(tokenizer: Any, request: dict[str, Any]) -> list[list[int]]:
    """What a tokenizer of transformers makes of the texts to be read, without special tokens."""
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in request["read"]]
