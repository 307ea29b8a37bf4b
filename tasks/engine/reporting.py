"""What people see while pieces run: a line and a bar, every few seconds at first, and curves."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from infra.cluster.progress import ProgressReader

LINE_SECONDS, LONGEST_SECONDS = 5.0, 60.0
"""Between two lines, at first and in long work: a day of it is no log of 17,000 lines."""
LINES = 30
"""In between, one comes after this part of the time that the stage has run."""
Show = Callable[[str, float, str], None]
"""Takes a label, how far it is in percent, and a line about it."""
PACE_SECONDS = 60.0
"""How far back the pace reaches that the time left is reckoned by: a stall is soon forgotten."""


class Recorder(Protocol):
    """Where a stage's curves go: an MLflow run."""

    def log_metrics(self, values: Mapping[str, float], step: int = 0) -> None: ...

    def log_params(self, values: Mapping[str, Any]) -> None: ...

    def log_artifacts(self, directory: Path, path: str | None = None) -> None: ...


@dataclass
class Bar:
    """How far one piece is."""

    what: str = ""
    unit: str = "steps"
    total: int = 0
    done: int = 0
    marks: list[tuple[float, int]] = field(default_factory=list)
    shown: dict[str, float] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Learn from one event of ``infra.cluster.compute.FileProgress``."""
        if "start" in event:
            self.what, self.total, self.unit = event["start"], event["total"], event["unit"]
            self.done, self.marks, self.shown = 0, [], {}
        elif "done" in event:
            self.done = event["done"]
            self.shown = event["shown"]
        if "start" in event or "done" in event:
            now = event["time"]
            recent = [mark for mark in self.marks if mark[0] >= now - PACE_SECONDS]
            self.marks = [*(recent or self.marks[-1:]), (now, self.done)]

    @property
    def share(self) -> float:
        """How far it is, from 0 to 1; 0 before it has begun."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    def line(self) -> str:
        """``training python: 120 of 200 steps, loss 2.41, 10,400 tokens/s, 0:12 left``."""
        parts = [f"{self.what}: {self.done:,} of {self.total:,} {self.unit}"]
        parts += [_shown(key, value) for key, value in self.shown.items()]
        if self.marks and self.marks[0][1] < self.done < self.total:
            (start, before), (now, done) = self.marks[0], self.marks[-1]
            left = (now - start) / (done - before) * (self.total - done)
            parts.append(f"{_clock(int(left))} left")
        return ", ".join(parts)


class PieceWatch:
    """Follows the pieces of one stage.

    Args:
        files: Where each piece reports.
        label: The stage.
        item: Its domain or baseline.
        log: Takes a line for people.
        recorder: Takes points of curves; None drops them.
        show: Takes how far the stage is, while it takes longer than a few seconds.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        *,
        label: str,
        item: str,
        log: Callable[[str], None],
        recorder: Recorder | None,
        show: Show = lambda label, share, line: None,
    ) -> None:
        self.readers = {name: ProgressReader(path) for name, path in files.items()}
        self.bars = {name: Bar() for name in files}
        self.label = f"{label} {item}".strip()
        self.log = log
        self.recorder = recorder
        self.show, self.is_shown = show, False
        self.recorded: set[tuple[str, int]] = set()
        self.moved: dict[str, None] = {}
        self.began = self.printed = time.monotonic()

    def __call__(self, final: bool = False) -> None:
        """Look at what is new; print a line for each piece that moved since the last one, now and
        then.

        A stage of one piece also says where it ended.
        """
        self.moved |= dict.fromkeys(name for name in self.readers if self._read(name))
        now = time.monotonic()
        if final:
            if self.is_shown:
                self.show(self.label, 100.0, "done")
            moved = list(self.bars) if len(self.bars) == 1 else []
        elif not self.moved or now - self.printed < _pause(now - self.began):
            return
        else:
            moved = list(self.moved)
        self.printed, self.moved = now, {}
        moved = [name for name in moved if self.bars[name].what]  # nothing else is counted
        for name in moved:
            prefix = self.label if len(self.readers) == 1 else f"{self.label} {name}"
            self.log(f"{prefix} | {self.bars[name].line()}")
        if moved and not final:
            share = sum(bar.share for bar in self.bars.values()) / len(self.bars)
            self.show(self.label, round(100 * share, 1), self.bars[moved[-1]].line())
            self.is_shown = True

    def _read(self, name: str) -> bool:
        moved = False
        for event in self.readers[name].events():
            moved = True
            self.bars[name].take(event)
            if "metrics" in event and self.recorder is not None:
                self._record(name, event, self.recorder)
        return moved

    def _record(self, name: str, event: Mapping[str, Any], recorder: Recorder) -> None:
        """A piece that was killed repeats points; each is recorded once."""
        prefix = "" if len(self.readers) == 1 else f"{name}/"
        values = {
            f"{prefix}{key}": value
            for key, value in event["metrics"].items()
            if (f"{name}/{key}", event["step"]) not in self.recorded
        }
        self.recorded |= {(f"{name}/{key}", event["step"]) for key in event["metrics"]}
        if values:
            recorder.log_metrics(values, step=event["step"])


def _pause(seconds: float) -> float:
    """Until the next line of what has run for ``seconds``."""
    return min(LONGEST_SECONDS, max(LINE_SECONDS, seconds / LINES))


def _clock(seconds: int) -> str:
    """``0:12``, ``59:59``, ``26:03:59``."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _shown(key: str, value: float) -> str:
    if key.endswith("per_second"):
        return f"{value:,.0f} {key.removesuffix('_per_second')}/s"
    return f"{key} {value:.3f}"
