"""What a call leaves in the process that made it."""

import gc

import pytest
import torch

from infra.cluster.memory import LEFT_BYTES, give_back, held_bytes, set_libraries_aside
from infra.cluster.worker import perform

PIECES, SIZE = 4000, 100_000  # 400 MB, each too small to be mapped by itself


def fill(*, progress, fails=False):
    """Fill memory in a cycle, as a trainer and its callbacks hold each other."""
    cycle: list = [torch.ones(SIZE, dtype=torch.uint8) for _ in range(PIECES)]
    cycle.append(cycle)
    held = held_bytes()
    if fails:
        raise ValueError("fails")
    return held


def failing(*, progress):
    fill(progress=progress, fails=True)


@pytest.fixture(autouse=True)
def nothing_kept():
    """Earlier tests have left memory that this process would fill first."""
    give_back()


def test_memory_goes_back_to_the_machine_after_a_call():
    before = held_bytes()
    done = perform(fill, report=None, threads=1)
    assert done.result - before > 0.9 * PIECES * SIZE
    assert held_bytes() - before < LEFT_BYTES
    assert done.peak_memory_bytes > done.result - 2**20  # a page may come between two looks


def test_a_call_that_fails_leaves_nothing_either():
    before = held_bytes()
    with pytest.raises(ValueError, match="fails"):
        perform(failing, report=None, threads=1)
    perform(lambda *, progress: None, report=None, threads=1)  # a traceback holds what failed
    assert held_bytes() - before < LEFT_BYTES


def test_memory_that_was_alive_once_is_not_left_to_later_calls():
    before = held_bytes()
    alive = [torch.ones(PIECES * SIZE, dtype=torch.uint8)]
    give_back()
    alive.clear()
    perform(lambda *, progress: None, report=None, threads=1)
    perform(fill, report=None, threads=1)
    assert held_bytes() - before < LEFT_BYTES


def test_what_a_failed_call_still_holds_is_not_left_to_the_next_one():
    def large(*, progress):
        held = torch.ones(PIECES * SIZE, dtype=torch.uint8)
        raise ValueError(held.shape)

    before, failures = held_bytes(), []
    try:
        perform(large, report=None, threads=1)
    except ValueError as error:
        failures.append(error)

    def forgetful(*, progress):
        failures.clear()
        return fill(progress=progress)

    perform(forgetful, report=None, threads=1)
    assert held_bytes() - before < LEFT_BYTES


def test_what_torch_brings_is_not_looked_through_before_every_call(monkeypatch):
    kept = []
    monkeypatch.setattr(gc, "freeze", lambda: kept.append(gc.get_count()))
    set_libraries_aside.cache_clear()
    for _ in range(2):
        perform(lambda *, progress: None, report=None, threads=1)
    assert len(kept) == 1


def test_calls_that_leave_little_are_not_followed_by_a_collection():
    calls = [lambda *, progress: None] * 5
    perform(calls[0], report=None, threads=1)
    before = gc.get_stats()[2]["collections"]
    for call in calls:
        perform(call, report=None, threads=1)
    assert gc.get_stats()[2]["collections"] == before
