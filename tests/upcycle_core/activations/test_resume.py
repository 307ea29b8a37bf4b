"""Layers that are done, and the text behind them, outlive a kill."""

import pytest
import torch

from upcycle_core.activations import resume
from upcycle_core.activations.resume import LayersDone
from upcycle_core.activations.stream import Passing


class Way:
    """Three numbers that each layer doubles."""

    def __init__(self, folder, clock, mark="a"):
        self.done = LayersDone(folder, {"mark": mark})
        self.text, self.clock = Passing(torch.ones(1, 3, 1)), clock
        self.done.go_on({"text": self.text})

    def through(self, layers, seconds):
        for _ in range(layers):
            self.clock[0] += seconds
            self.text.hidden_BSH = 2 * self.text.hidden_BSH
            made = {"made": self.text.hidden_BSH.flatten()}
            self.done.keep(made, {"text": self.text}, len(self.done.facts))


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(resume.time, "monotonic", lambda: now[0])
    return now


def test_what_took_a_minute_is_kept(tmp_path, clock):
    Way(tmp_path / "way", clock).through(3, seconds=20)  # the third makes it a minute
    again = Way(tmp_path / "way", clock)
    assert again.done.facts == [0, 1, 2]
    assert again.text.hidden_BSH.flatten().tolist() == [8, 8, 8]
    assert [again.done.made(layer, "made")[0] for layer in range(3)] == [2, 4, 8]
    again.through(2, seconds=20)
    assert Way(tmp_path / "way", clock).done.facts == [0, 1, 2]
    again.through(1, seconds=20)
    assert Way(tmp_path / "way", clock).text.hidden_BSH[0, 0] == 64
    assert len(list((tmp_path / "way").glob("*.states"))) == 1


def test_a_text_that_is_long_to_write_is_written_seldom(tmp_path, clock, monkeypatch):
    written = resume.stream_atomically

    def slow(path, *arguments, kind, **options):
        clock[0] += 30 if kind == resume.STATES else 0
        written(path, *arguments, kind=kind, **options)

    monkeypatch.setattr(resume, "stream_atomically", slow)
    Way(tmp_path / "way", clock).through(5, seconds=60)
    assert Way(tmp_path / "way", clock).done.facts == [0]
    Way(tmp_path / "other", clock).through(6, seconds=60)
    assert Way(tmp_path / "other", clock).done.facts == [0, 1, 2, 3, 4, 5]


def test_what_a_kill_left_half_written_takes_no_room(tmp_path, clock):
    Way(tmp_path / "way", clock).through(1, seconds=60)
    half = tmp_path / "way" / f"3.{resume.STATES}.partial"
    half.write_bytes(b"half")
    assert Way(tmp_path / "way", clock).done.facts == [0]
    assert not half.exists()


def test_the_last_layer_is_kept_at_once(tmp_path, clock):
    way = Way(tmp_path / "way", clock)
    way.done.keep({}, {}, "the last")
    assert LayersDone(tmp_path / "way", {"mark": "a"}).facts == ["the last"]


def test_of_another_computation_nothing_is_known(tmp_path, clock):
    Way(tmp_path / "way", clock).through(1, seconds=60)
    other = Way(tmp_path / "way", clock, mark="b")
    assert other.done.facts == []
    assert other.text.hidden_BSH.flatten().tolist() == [1, 1, 1]
    other.done.remove()
    assert not (tmp_path / "way").exists()
