"""What a checkpoint was made from, kept beside it, where it was not given as it is."""

import json
from pathlib import Path

from upcycle_core.checkpoints.writer import write_json

GIVEN_AS = "given_as.json"


def write_given_as(directory: Path, said: str) -> None:
    """Say it in words, without a path or a time."""
    write_json(directory / GIVEN_AS, {"given_as": said})


def given_as(directory: Path) -> str | None:
    """What was said; None of a checkpoint that was given as it is."""
    path = directory / GIVEN_AS
    return json.loads(path.read_text(encoding="utf-8"))["given_as"] if path.is_file() else None
