import pytest
import torch

from upcycle_core import precision
from upcycle_core.precision import arithmetic, chosen, matrix_units, weights_type

FLAGS = "processor\t: 0\nmodel name\t: a bf16 cpu\n{}\t\t: fpu avx2 {}\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def of(text: str) -> None:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(precision, "CPUINFO", tmp_path / "cpuinfo")
        for known in (precision.bf16_units, precision.matrix_units):
            known.cache_clear()

    yield of
    for known in (precision.bf16_units, precision.matrix_units):
        known.cache_clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FLAGS.format("flags", "avx512_bf16 sse"), "bf16"),
        (FLAGS.format("flags", "amx_bf16"), "bf16"),
        (FLAGS.format("Features", "asimd bf16"), "bf16"),
        (FLAGS.format("flags", "avx512f avx512_vnni"), "fp32"),
        (FLAGS.format("flags", "not_bf16_at_all"), "fp32"),
        ("", "fp32"),
    ],
)
def test_a_cpu_computes_in_bf16_if_it_has_units_for_it(machine, text, expected):
    machine(text)
    assert arithmetic("auto", "cpu") == expected


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("avx512_bf16 amx_bf16 amx_tile", True),
        ("avx512_bf16 amx_int8", False),
        ("amx_bf16_not", False),
    ],
)
def test_tiles_are_more_than_units(machine, units, expected):
    machine(FLAGS.format("flags", units))
    assert matrix_units() is expected


def test_where_nothing_says_so_it_is_fp32(machine, tmp_path, monkeypatch):
    machine("")
    monkeypatch.setattr(precision, "CPUINFO", tmp_path / "nowhere")
    assert arithmetic("auto", "cpu") == "fp32"
    assert not matrix_units()


@pytest.mark.parametrize("able", [True, False])
def test_a_gpu_is_asked_itself_and_emulation_does_not_count(monkeypatch, able):
    asked = {}

    def supported(**how):
        asked.update(how)
        return able

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert arithmetic("auto", "cuda:0") == ("bf16" if able else "fp32")
    assert asked == {"including_emulation": False}


def test_a_gpu_of_another_machine_is_planned_in_bf16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert arithmetic("auto", "cuda") == "bf16"


def test_what_is_said_stays(machine):
    machine(FLAGS.format("flags", "amx_bf16"))
    assert arithmetic("fp32", "cpu") == "fp32"
    assert weights_type("fp32", "cpu") == torch.float32
    assert weights_type("fp64", "cpu") == torch.float64
    assert weights_type("auto", "cpu") == torch.bfloat16


def test_what_auto_has_chosen_is_said(machine):
    machine(FLAGS.format("flags", "amx_bf16"))
    assert chosen("auto", "cpu") == " in bf16"
    assert chosen("fp32", "cpu") == chosen("fp64", "cpu") == ""
