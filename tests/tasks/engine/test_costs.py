"""Costs: core time adds up, memory does not, and what is unknown stays unknown."""

from pathlib import Path

from texts import pico_recipe

from infra.cluster.pieces import Done
from tasks.baselines.comparison import row_costs
from tasks.engine.costs import Cost, cost_of, read_cost, write_cost
from tasks.engine.workspace import Workspace
from tasks.recipes import validate

TRAINING = {"warmup_steps": 2, "sequence_length": 32}


def done(result, started, ended):
    return Done(Path("x"), result, started, ended, peak_memory_bytes=7)


def test_a_piece_costs_its_time_on_all_of_its_cores():
    assert cost_of(done(None, 10.0, 12.5), cpus=4) == Cost(10.0, 7)


def test_a_training_that_was_killed_counts_what_it_did_before():
    assert cost_of(done({"seconds": 60.0}, 10.0, 12.5), cpus=2).core_seconds == 120.0


def test_together_times_add_up_and_memory_is_the_largest():
    assert Cost.together([Cost(1.0, 5), Cost(2.0, 9), Cost(0.5, 3)]) == Cost(3.5, 9)
    assert Cost.together([]) == Cost(0.0, 0)


def test_rows_cost_the_stages_behind_them(tmp_path):
    rows = {
        "btx": {"method": "btx", "training": TRAINING},
        "plus": {"method": "dume", "training": TRAINING},
        "full": {"method": "full-finetune", "training": TRAINING},
        "ensemble": {"method": "branch-train-merge"},
    }
    recipe = validate({**pico_recipe(tmp_path, domains=("a", "b")), "baselines": rows})
    workspace = Workspace(tmp_path / "w")
    workspace.root.mkdir()
    costs = {"experts@a": 1, "experts@b": 2, "backbone": 4, "statistics@a": 8, "statistics@b": 16}
    costs |= {"router": 32, "model": 64, "baselines-btx": 128, "baselines-plus": 256}
    for label, seconds in costs.items():
        write_cost(workspace, label, Cost(float(seconds), seconds))
    found = row_costs(recipe, workspace)
    assert {name: cost.core_seconds for name, cost in found.items()} == {
        "seed": 0,
        "model_averaging": 3,
        "random_routing": 3 + 4 + 64,
        "dume": 127,
        "oracle": 3 + 4 + 64,
        "btx": 3 + 128,
        "plus": 127 + 256,
        "ensemble": 3,
    }
    assert read_cost(workspace, "baselines-full") is None
