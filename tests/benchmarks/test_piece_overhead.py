"""The benchmark of what a piece costs, on a queue of few."""

import json
import os
import sys

import pytest

from benchmarks import piece_overhead
from benchmarks.piece_overhead import CPUS, check, measured, report


@pytest.mark.faults
def test_both_run_the_same_queue_and_are_set_beside_each_other(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    seen = []
    monkeypatch.setattr(piece_overhead, "check", lambda *found: seen.append(found))
    seconds = measured(20, 2)
    assert {name: len(rounds) for name, rounds in seconds.items()} == {"pieces": 2, "bare": 2}
    assert all(second > 0 for rounds in seconds.values() for second in rounds)
    assert [found for found in seen if found[1] == 20] == [([*range(20)], 20)] * 4
    report(seconds, 20)
    table, line = capsys.readouterr().out.rstrip().rsplit("\n", maxsplit=1)
    result = json.loads(line)
    assert f"20 calls on {CPUS} CPUs" in table
    first, second = (a / b for a, b in zip(seconds["pieces"], seconds["bare"], strict=True))
    assert result["ratio"] == pytest.approx((first + second) / 2)
    assert result["figures"]["ms_each"]["bare"] == pytest.approx(sum(seconds["bare"]) * 1000 / 40)


def test_a_call_that_was_lost_is_no_measurement():
    check([0, 1, 2], 3)
    with pytest.raises(ValueError, match="3 calls came to"):
        check([0, 1], 3)
