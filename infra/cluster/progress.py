"""Progress that leaves a worker through a file, one JSON object a line."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

REPORT_SECONDS = 0.5
EVENTS = (
    {"start", "total", "unit", "time"},
    {"done", "shown", "time"},
    {"metrics", "step", "time"},
)
"""What a line may hold."""


class FileProgress:
    """Progress that leaves a worker through a file."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")
        if self.file.tell():  # what was killed may have left a part of a line
            self.file.write("\n")
        self.what = ""
        self.done = 0
        self.shown: dict[str, float] = {}
        self.written = 0.0

    def start(self, what: str, total: int, unit: str = "steps") -> None:
        self.what, self.done = what, 0
        self._write({"start": what, "total": total, "unit": unit, "time": time.time()})

    def advance(self, amount: int = 1, **shown: float) -> None:
        self.done += amount
        self.shown.update(shown)
        if time.monotonic() - self.written > REPORT_SECONDS:
            self._write({"done": self.done, "shown": self.shown, "time": time.time()})

    def finish(self) -> None:
        """Say how far it came: the last step may have been too soon after the one before."""
        self._write({"done": self.done, "shown": self.shown, "time": time.time()})

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._write({"metrics": dict(values), "step": step, "time": time.time()})

    def _write(self, event: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()
        self.written = time.monotonic()


class ProgressReader:
    """Reads what a piece has reported since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """New events, oldest first; a line that is still being written waits.

        One that a disk has damaged is left out.
        """
        if not self.path.exists():
            return
        with self.path.open(errors="replace") as file:
            file.seek(self.offset)
            while (line := file.readline()).endswith("\n"):
                self.offset = file.tell()
                if (event := _event(line)) is not None:
                    yield event


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and event.keys() in EVENTS else None


def progress_file(directory: Path, name: str) -> Path:
    """Where piece ``name`` reports."""
    return directory / f"{name}.progress"
