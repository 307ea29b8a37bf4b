"""Rates of a machine: measured once, kept with what they hold for, or given; and what they make."""

import json

import pytest

from infra.recipe.resources import Resources
from tasks.planning import speed
from tasks.planning.machine import Machine
from tasks.planning.row import Planned, duration
from tasks.planning.speed import given_rates, known_rates, measured_rates
from upcycle_core.errors import InputError
from upcycle_core.planning import rates as measuring
from upcycle_core.planning.rates import Rates

HERE = Machine(memory=10**10, cpus=4, disk=10**12)
RATES = Rates(fp32=4e9, bf16=8e9, fp32_one=2e9, bf16_one=4e9, memory=1e10, read=1e9, write=5e8)


@pytest.fixture
def counted(monkeypatch):
    """How often the machine was measured; a few numbers are enough."""
    calls = []
    real = measuring.measure

    def measure(folder):
        calls.append(folder)
        return real(folder)

    monkeypatch.setattr(speed, "measure", measure)
    for name, value in {"SECONDS": 0.001, "BYTES": 1 << 20, "ROWS": 8}.items():
        monkeypatch.setattr(measuring, name, value)
    return calls


def test_a_machine_is_measured_once_and_again_when_asked(tmp_path, counted):
    assert known_rates(tmp_path) is None
    first = measured_rates(tmp_path)
    assert all(getattr(first, n) > 0 for n in ("fp32", "bf16", "memory", "read", "write"))
    assert measured_rates(tmp_path) == first == known_rates(tmp_path)
    assert len(counted) == 1
    measured_rates(tmp_path, again=True)
    assert len(counted) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["rates.json"]


def test_another_torch_or_processor_is_measured_anew(tmp_path, counted, monkeypatch):
    measured_rates(tmp_path)
    here = measuring.identity()
    monkeypatch.setattr(speed, "identity", lambda: {**here, "torch": "0.0"})
    assert known_rates(tmp_path) is None
    measured_rates(tmp_path)
    assert len(counted) == 2


def test_rates_that_somebody_changed_are_not_taken(tmp_path, counted):
    measured_rates(tmp_path)
    file = tmp_path / "rates.json"
    values = json.loads(file.read_text())
    values["rates"]["fp32"] *= 1000
    file.write_text(json.dumps(values))
    assert known_rates(tmp_path) is None


def test_rates_of_another_machine_are_said_in_words():
    found = given_rates(["bf16=2T", "read=2GB", "write=1 GB"], cores=8)
    assert (found.bf16, found.bf16_one, found.read, found.write) == (2e12, 2.5e11, 2e9, 1e9)
    with pytest.raises(InputError, match="speed=3") as refusal:
        given_rates(["speed=3", "bf16=fast"], cores=8)
    assert "bf16=fast" in str(refusal.value)


@pytest.mark.parametrize(("rate", "example"), [("fp32=900", "fp32=900G"), ("read=2", "read=2GB")])
def test_a_rate_without_a_unit_is_refused(rate, example):
    with pytest.raises(InputError, match=f"{rate}.*give a unit, as {example}"):
        given_rates(["bf16=2T", rate], cores=8)


def test_a_rate_beyond_all_machines_is_refused():
    with pytest.raises(InputError, match=r"fp32=9+.*is more than any machine does"):
        given_rates([f"fp32={'9' * 400}"], cores=8)


def test_time_is_products_by_the_cores_at_work_and_bytes_by_the_disk():
    row = Planned("x", 4, 4, kept=10**9, read=2 * 10**9, flops=8 * 10**9)
    assert row.seconds(HERE, RATES) == pytest.approx(8 / 4 + 2 / 1 + 1 / 0.5)
    alone = Planned("x", 1, 1, flops=8 * 10**9)
    assert alone.seconds(HERE, RATES) == pytest.approx(8 / 2)
    half = Planned("x", 1, 1, flops=8 * 10**9, precision="fp64")
    assert half.seconds(HERE, RATES) == pytest.approx(8)


def test_time_that_is_not_known_is_not_made_up():
    unknown = Planned("x", 1, 1, flops=None)
    assert unknown.seconds(HERE, RATES) is None
    assert Planned("x", 1, 1, flops=1).seconds(HERE, None) is None
    on_gpu = Planned("x", 1, 1, flops=1, resources=Resources(gpus=1))
    assert on_gpu.seconds(HERE, RATES) is None  # its rate was not measured


def test_durations_are_for_people():
    assert [duration(s) for s in (0.2, 45, 600, 7200)] == ["< 1 s", "45 s", "10 min", "2.0 h"]
