import json
from types import SimpleNamespace

import pytest

from infra.cluster.progress import FileProgress
from tasks.engine.reporting import Bar, PieceWatch


class Recorder:
    def __init__(self):
        self.points = []

    def log_metrics(self, values, step=0):
        self.points.append((step, values))


@pytest.fixture
def lines():
    return []


@pytest.fixture
def clock(monkeypatch):
    """What time it is for who watches."""
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)
    monkeypatch.setattr("tasks.engine.reporting.time", clock)
    return clock


def watch(path, lines, recorder=None):
    return PieceWatch(
        {"whole": path}, label="experts", item="law", log=lines.append, recorder=recorder
    )


def test_line_says_what_is_done_and_how_long_is_left():
    bar = Bar()
    bar.take({"start": "training", "total": 100, "unit": "steps", "time": 1000.0})
    shown = {"loss": 2.5, "tokens_per_second": 1234.5}
    bar.take({"done": 25, "shown": shown, "time": 1030.0})
    assert bar.line() == "training: 25 of 100 steps, loss 2.500, 1,234 tokens/s, 1:30 left"


def test_a_stall_is_soon_forgotten_in_the_time_left():
    bar = Bar()
    bar.take({"start": "training", "total": 100, "unit": "steps", "time": 0.0})
    for time, done in ((10.0, 10), (3600.0, 11), (3630.0, 41), (3661.0, 71)):
        bar.take({"done": done, "shown": {}, "time": time})
    assert bar.line() == "training: 71 of 100 steps, 0:29 left"


def test_steps_of_more_than_a_minute_have_a_pace_too():
    bar = Bar()
    bar.take({"start": "training", "total": 4, "unit": "steps", "time": 0.0})
    bar.take({"done": 1, "shown": {}, "time": 100.0})
    bar.take({"done": 2, "shown": {}, "time": 200.0})
    assert bar.line() == "training: 2 of 4 steps, 3:20 left"


def test_large_counts_and_hours_can_be_read():
    bar = Bar()
    bar.take({"start": "statistics", "total": 120_000, "unit": "tokens", "time": 0.0})
    bar.take({"done": 1000, "shown": {}, "time": 60.0})
    assert bar.line() == "statistics: 1,000 of 120,000 tokens, 1:59:00 left"


def test_a_step_that_came_before_its_line_was_due_is_said_when_it_is(tmp_path, lines, clock):
    """Steps of a large model are rare: hardly one falls into the last look before a line."""
    looks, progress = watch(tmp_path / "p", lines), FileProgress(tmp_path / "p")
    progress.start("training", 10)
    for clock.seconds, expected in ((2.0, 0), (6.0, 1), (30.0, 1)):
        looks()
        assert len(lines) == expected
    progress.finish()  # a step
    looks()
    assert len(lines) == 2  # nothing was said since 6.0: it is due at once


def test_lines_of_long_work_come_once_a_minute(tmp_path, lines, clock):
    looks, progress = watch(tmp_path / "p", lines), FileProgress(tmp_path / "p")
    progress.start("training", 10**6)
    for second in range(0, 2 * 3600, 4):
        clock.seconds = float(second)
        progress.finish()
        looks()
        if second == 120:
            assert 14 <= len(lines) <= 24
    assert 120 <= len(lines) <= 180


def test_finished_piece_shows_its_end(tmp_path, lines):
    progress = FileProgress(tmp_path / "p")
    progress.start("training", 3)
    for _ in range(3):
        progress.advance(loss=1.0)
    progress.finish()
    watch(tmp_path / "p", lines)(final=True)
    assert lines == ["experts law | training: 3 of 3 steps, loss 1.000"]


def test_a_piece_that_counts_nothing_has_no_line(tmp_path, lines):
    FileProgress(tmp_path / "p").finish()
    watch(tmp_path / "p", lines)(final=True)
    assert lines == []


def test_points_that_a_killed_piece_repeats_are_recorded_once(tmp_path, lines):
    recorder = Recorder()
    follow = watch(tmp_path / "p", lines, recorder)
    first = FileProgress(tmp_path / "p")
    first.metrics({"loss": 3.0}, 1)
    first.metrics({"loss": 2.0}, 2)
    follow()
    again = FileProgress(tmp_path / "p")
    again.metrics({"loss": 2.0}, 2)
    again.metrics({"loss": 1.0}, 3)
    follow()
    assert recorder.points == [(1, {"loss": 3.0}), (2, {"loss": 2.0}), (3, {"loss": 1.0})]


def test_line_that_is_still_being_written_waits(tmp_path, lines):
    recorder = Recorder()
    follow = watch(tmp_path / "p", lines, recorder)
    event = json.dumps({"metrics": {"loss": 3.0}, "step": 1, "time": 0.0})
    (tmp_path / "p").write_text(event[:10])
    follow()
    assert recorder.points == []
    with (tmp_path / "p").open("a") as file:
        file.write(event[10:] + "\n")
    follow()
    assert recorder.points == [(1, {"loss": 3.0})]


def test_a_bar_fills_while_pieces_run_and_is_full_at_the_end(tmp_path, lines, monkeypatch):
    monkeypatch.setattr("tasks.engine.reporting.LINE_SECONDS", 0.0)
    shown, files = [], {name: tmp_path / name for name in ("a", "b")}
    looks = PieceWatch(
        files,
        label="experts",
        item="law",
        log=lines.append,
        recorder=None,
        show=lambda *state: shown.append(state),
    )
    looks()
    assert shown == []  # nothing has begun
    progress = FileProgress(files["a"])
    progress.start("training", 4)
    for _ in range(2):
        progress.advance()
    progress.finish()
    looks()
    looks(final=True)
    assert [state[:2] for state in shown] == [("experts law", 25.0), ("experts law", 100.0)]
    assert "2 of 4" in shown[0][2]
