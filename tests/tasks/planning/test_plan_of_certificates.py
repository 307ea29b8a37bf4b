"""What asking readers for a new version needs, by hand: of five models of Llama-3.1-8B's shape."""

import pytest

from tasks.planning import certified
from tasks.planning.machine import Machine
from tasks.planning.made import Aim
from tasks.planning.plan import plan
from tasks.recipes import validate
from upcycle_core.planning.rates import Rates

DOMAINS = ("law", "code", "history", "music", "art")
WHOLE, FFNS, LAYERS, HIDDEN = 8_030_261_248, 32 * 3 * 4096 * 14336, 32, 4096
MIXTURE = WHOLE + 4 * FFNS + LAYERS * 5 * HIDDEN
ROOMY = Machine(memory=10**12, cpus=8, disk=10**13)
RATES = Rates(fp32=4e9, bf16=8e9, fp32_one=1e9, bf16_one=2e9, memory=1e10, read=1e9, write=1e9)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Readers that are installed."""
    names = ["transformers"]
    monkeypatch.setattr(certified, "at_hand", lambda: names)
    return names


def made(tmp_path, llama, machine=ROOMY, rates=None, aim=None, **registry):
    domains = {n: {"train": {"files": [f"{n}.txt"]}, "expert": str(llama)} for n in DOMAINS}
    texts = {"statistics": {"tokens": 8192}, "evaluation": {"tokens": 4096}}
    recipe = validate({"name": "large", "domains": domains, "registry": registry} | texts)
    more = {} if aim is None else {"aim": aim}
    return plan(recipe, tmp_path, machine, base=500_000_000, rates=rates, **more)


def test_two_altered_copies_lie_there_while_a_reader_is_asked(tmp_path, llama):
    [row] = made(tmp_path, llama).certificates
    assert (row.stage, row.pieces, row.kept) == ("certificate", 1, 0)
    assert row.passing == row.writes == 2 * 2 * MIXTURE
    assert row.memory == 1.5 * 4 * MIXTURE


def test_llama_cpp_has_one_file_more_at_a_time(tmp_path, llama, installed):
    installed.append("llama.cpp")
    [row] = made(tmp_path, llama).certificates
    assert row.pieces == 4  # and F32, F16, Q8_0
    assert row.passing == (2 * 2 + 4) * MIXTURE
    assert row.writes == (2 * 2 + 3 * (4 + 2)) * MIXTURE + 3 * int(34 / 32 * MIXTURE)


def test_memory_without_room_for_fp32_has_the_model_asked_in_bf16(tmp_path, llama, installed):
    installed.append("llama.cpp")
    less = Machine(memory=4 * MIXTURE, cpus=8, disk=10**13)
    [row] = made(tmp_path, llama, machine=less).certificates
    assert row.memory == 1.5 * 2 * MIXTURE
    assert row.pieces == 3  # F32 is left out
    least = Machine(memory=2 * MIXTURE, cpus=8, disk=10**13)
    assert list(made(tmp_path, llama, machine=least).certificates) == []


def test_every_token_reads_the_weights_that_it_meets(tmp_path, llama):
    [row] = made(tmp_path, llama, rates=RATES).certificates
    # Of five prompts 24 tokens written; 16 of ours, of three variants and of texts; 16 of theirs.
    tokens = 5 * (24 + (3 + 1) * 16 + 3 * 16)
    assert row.decoded == tokens * 4 * WHOLE
    seconds = row.read / 1e9 + row.writes / 1e9 + row.decoded / 1e10
    assert row.seconds(ROOMY, RATES) == pytest.approx(seconds)


def test_a_certificate_takes_time_and_refuses_nothing(tmp_path, llama):
    asked, none = (
        made(tmp_path, llama, rates=RATES, certificate=how) for how in ("at-hand", "none")
    )
    assert list(none.certificates) == []
    [row] = asked.certificates
    took = row.seconds(ROOMY, RATES)
    assert took
    assert asked.seconds == pytest.approx(none.seconds + took)
    assert (asked.disk_to_come, asked.memory) == (none.disk_to_come, none.memory)
    assert "| certificate |" in asked.table()
    assert "certificate" not in none.table()


def test_readers_that_a_recipe_does_not_name_are_not_asked(tmp_path, llama, installed):
    installed += ["mlflow", "vllm"]
    [row] = made(tmp_path, llama, readers=["vllm", "llama.cpp"]).certificates
    assert row.pieces == 1


def test_a_flow_that_registers_nothing_asks_nobody(tmp_path, llama):
    assert not made(tmp_path, llama, aim=Aim(registers=())).certificates


def test_deltas_are_asked_as_they_are_and_expanded(tmp_path, llama, installed):
    installed += ["mlflow", "vllm", "llama.cpp"]
    domains = {n: {"train": {"files": [f"{n}.txt"]}, "expert": str(llama)} for n in DOMAINS}
    codecs = {"pruned": {"codec": "sparse", "drop_rate": 0.9}}
    values = {
        "name": "large",
        "domains": domains,
        "compression": {"base": "mean", "codecs": codecs},
    }
    found = plan(validate(values), tmp_path, ROOMY, base=500_000_000)
    pieces = {row.stage: (row.pieces, row.passing) for row in found.certificates}
    copies = 2 * 2 * MIXTURE
    assert pieces == {
        "certificate": (6, copies + 4 * MIXTURE),
        "certificate: compression": (3, 0),  # which llama.cpp has no class for
        "certificate: compression (expanded)": (5, copies + 4 * MIXTURE),
    }
