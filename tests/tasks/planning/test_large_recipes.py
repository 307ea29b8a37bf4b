"""The recipes of large models: planned from config.json alone on the machine that each names."""

from pathlib import Path

import pytest

from tasks.planning.machine import Machine
from tasks.planning.plan import plan
from tasks.recipes import load_recipe

ROOT = Path(__file__).resolve().parents[3]
GB = 10**9
MACHINES = {
    "dume-llama-8b": Machine(memory=128 * GB, cpus=8, disk=1000 * GB),
    "dume-qwen3-8b": Machine(memory=128 * GB, cpus=8, disk=1000 * GB),
    "symphony-qwen2.5-1.5b": Machine(memory=64 * GB, cpus=8, disk=500 * GB),
    "ders-mixtral-8x7b": Machine(memory=192 * GB, cpus=8, disk=1000 * GB),
}
QWEN, QWEN_FFNS = 1_543_714_304, 28 * 3 * 1536 * 8960
MISTRAL, MISTRAL_FFNS = 7_241_732_096, 32 * 3 * 4096 * 14336


@pytest.fixture
def planned(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # where their models lie

    def of(name, *changes, machine=None):
        path = ROOT / "recipes" / "large" / f"{name}.yaml"
        recipe = load_recipe(path, (f"folder={tmp_path}", *changes))
        return plan(recipe, tmp_path, machine or MACHINES[name], base=500_000_000)

    return of


def rows(found):
    return {row.stage: row for row in found.rows}


def test_every_large_recipe_has_a_machine():
    assert set(MACHINES) == {path.stem for path in (ROOT / "recipes" / "large").glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_a_large_recipe_fits_the_machine_that_it_names(planned, name):
    assert list(planned(name).faults()) == []


def test_strangers_are_compared_group_by_group_and_trained_in_fp32(planned):
    found = rows(planned("symphony-qwen2.5-1.5b"))
    assert found["pairs"].pieces == 3 * 28 / 4
    squares = 8 * (28 * (8960**2 + 1536**2) + 7 * 1536**2)
    assert found["pairs"].kept == pytest.approx(3 * squares, rel=0.01)
    assert found["united"].kept == 4 * 2 * QWEN
    mixture = QWEN + 3 * QWEN_FFNS + 28 * 4 * 1536
    assert found["starts"].kept == 2 * mixture
    assert found["model"].kept == found["model"].registered == 4 * mixture
    assert 4 * mixture < found["model"].memory < 6 * mixture  # only routers have moments


def test_what_trains_all_of_a_mixture_has_moments_of_all_experts(planned):
    whole = planned("symphony-qwen2.5-1.5b", "post_training.objective.trainable=[all]")
    mixture = QWEN + 3 * QWEN_FFNS
    assert 16 * mixture < rows(whole)["model"].memory < 18 * mixture
    [fault] = whole.faults()
    assert fault.field == "compute.post_training"
    assert "post_training.objective.trainable = [router] (then 22" in fault.remedy


def test_neurons_of_all_layers_do_not_fit_and_outputs_do(planned):
    asked = "similarity.representations=[neurons, outputs]"
    [fault] = planned("symphony-qwen2.5-1.5b", asked).faults()
    assert "similarity: 1 x" in str(fault.value)
    assert "similarity.representations = [outputs]" in fault.remedy
    neurons = rows(planned("symphony-qwen2.5-1.5b", asked))["similarity"].memory
    assert neurons > 28 * 8 * 8 * 8960**2  # of four streams sixteen halves of a square, in fp64


def test_fewer_layers_at_a_time_are_named_with_what_they_need(planned):
    small = Machine(memory=4 * GB, cpus=2, disk=1000 * GB)
    asked = ("symphony.calibration.layers=8", "compute.alignment.cpus=2")
    found = planned("symphony-qwen2.5-1.5b", *asked, machine=small).faults()
    said = {str(fault.value).partition(":")[0]: fault.remedy for fault in found}
    assert "symphony.calibration.layers = 1 (then 1." in said["pairs"]
    fits = planned(
        "symphony-qwen2.5-1.5b", asked[1], "symphony.calibration.layers=1", machine=small
    )
    assert "pairs" not in {str(fault.value).partition(":")[0] for fault in fits.faults()}


def test_statistics_of_strangers_are_planned_where_routers_are_solved(planned):
    name, sums = "symphony-qwen2.5-1.5b", 8 * 28 * (1536 * 1537 // 2 + 1536)
    [without] = rows(planned(name))["starts"].kinds
    solved = planned(name, "symphony.router=ridge", "statistics.tokens=100000")
    starts, statistics = rows(solved)["starts"].kinds
    assert statistics.pieces == 2 * 4  # shards, of each one's text
    assert statistics.writes == pytest.approx(4 * 3 * sums, rel=0.01)  # and their sum
    assert starts.passing - without.passing == statistics.writes
    assert solved.disk == planned(name).disk  # routers are a part of the model
    passes = 4 * 2 * (QWEN - 151_936 * 1536) * 100_000
    assert passes < statistics.flops < 1.2 * passes
    assert statistics in solved.coming
    assert "| starts: statistics | 8 |" in solved.table()


def test_statistics_of_strangers_run_on_what_is_reserved_for_statistics(planned):
    asked = ("symphony.router=ridge", "statistics.precision=fp32", "compute.statistics.cpus=1")
    [fault] = planned("symphony-qwen2.5-1.5b", *asked, "compute.statistics.streamed=never").faults()
    assert fault.field == "compute.statistics"
    assert "starts: statistics: 8 x" in str(fault.value)
    gpu = Machine(memory=64 * GB, cpus=8, disk=500 * GB, gpus=1, gpu_memory=4 * GB)
    asked = ("symphony.router=ridge", "compute.statistics.gpus=1", "statistics.batch_size=512")
    [fault] = planned(
        "symphony-qwen2.5-1.5b", *asked, "compute.statistics.streamed=never", machine=gpu
    ).faults()
    assert fault.field == "compute.statistics"
    assert "of GPU memory" in str(fault.value)


def test_deltas_are_stored_in_every_way_and_the_largest_counts(planned):
    found = rows(planned("ders-mixtral-8x7b"))
    assert found["sweeps"].pieces == 1 + 4
    outside = MISTRAL - MISTRAL_FFNS + 32 * 8 * 4096
    sparse = 2 * (outside + MISTRAL_FFNS) + 8 * 0.1 * MISTRAL_FFNS * (2 + 4)
    assert found["compression"].kept == pytest.approx(sparse, rel=0.01)
    assert found["model"].kept == 2 * (outside + 8 * MISTRAL_FFNS)
    assert found["compression"].memory > 8 * 4 * 4096 * 14336  # deltas of one matrix, in fp32


def test_a_gpu_of_80_gb_does_not_hold_eight_times_seven(planned):
    machine = Machine(memory=192 * GB, cpus=8, disk=1000 * GB, gpus=1, gpu_memory=80 * GB)
    found = planned("ders-mixtral-8x7b", "compute.evaluation.gpus=1", machine=machine).faults()
    # The report goes layer by layer; models of deltas do not.
    assert {str(fault.value).partition(":")[0] for fault in found} == {"sweeps"}


def test_a_pass_that_must_not_be_streamed_is_told_what_streaming_leaves(planned):
    asked = ("evaluation.precision=fp32", "compute.evaluation={cpus: 1, streamed: never}")
    small = Machine(memory=16 * GB, cpus=16, disk=9000 * GB)

    def said(*more):
        faults = planned("dume-llama-8b", *asked, *more, machine=small).faults()
        return {fault.field: fault.remedy for fault in faults}["compute.evaluation"]

    assert "streamed = auto (then 8 x" in said("evaluation.batch_size=64")
    assert "still too much)" in said("evaluation.batch_size=64")
    alone = ("compute.evaluation.cpus=16", "evaluation.batch_size=1")
    assert "compute.evaluation.streamed = auto" in said(*alone)
    assert "still too much" not in said(*alone)


def test_what_is_left_out_for_memory_is_named_with_what_asks_for_it(planned):
    asked = ["experts.repair=down+head_target", "backbone.merge={head: fitted}"]
    small = Machine(memory=12 * GB, cpus=16, disk=9000 * GB)

    def said(*more):
        faults = planned("dume-llama-8b", *asked, *more, machine=small).faults()
        return {str(fault.value).partition(":")[0]: fault.remedy for fault in faults}

    assert "experts.repair = none and backbone.merge.head = average" in said()["repaired"]
    without = ["experts.repair=none", "backbone.merge={head: average}"]
    assert not list(planned("dume-llama-8b", *without, machine=small).faults())
    distilled = "backbone.merge={head: fitted, attention: distilled}"
    assert said(distilled)["backbone"] == "backbone.merge.attention = average"
    assert "backbone" not in said()


def test_what_lies_behind_the_window_is_not_computed(planned):
    def statistics(*asked):
        return rows(planned("dume-llama-8b", "statistics.tokens=200000", *asked))["statistics"]

    whole, near = statistics(), statistics("statistics.window=128")
    assert near.flops == pytest.approx(whole.flops / 8, rel=0.1)
    assert near.memory == statistics("statistics.sequence_length=128").memory < whole.memory
    longer = statistics("statistics.window=4096")
    assert (longer.flops, longer.memory) == (whole.flops, whole.memory)
