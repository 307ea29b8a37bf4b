"""Costs: core time adds up, memory does not, and what is unknown stays unknown."""

from dataclasses import replace
from pathlib import Path

import pytest
from texts import pico_recipe

from infra.cluster.pieces import Done
from infra.recipe.schema import Lineage
from tasks.baselines.comparison import expert_tokens, row_costs
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


ROWS = {
    "btx": {"method": "btx", "training": TRAINING},
    "plus": {"method": "dume", "training": TRAINING},
    "full": {"method": "full-finetune", "training": TRAINING},
    "ensemble": {"method": "branch-train-merge"},
}
STAGES = ("experts@a", "experts@b", "backbone", "statistics@a", "statistics@b", "router", "model")
STAGES += ("baselines-btx", "baselines-plus", "repaired@a", "repaired@b", "routed")
"""Each costs a power of two, in this order."""
REPORTED = ("seed", "model_averaging", "random_routing", "dume", "oracle")


@pytest.fixture
def values(tmp_path):
    return {**pico_recipe(tmp_path, domains=("a", "b")), "baselines": ROWS}


@pytest.fixture
def workspace(tmp_path):
    workspace = Workspace(tmp_path / "w")
    workspace.root.mkdir()
    for power, label in enumerate(STAGES):
        write_cost(workspace, label, Cost(float(2**power), 2**power))
    return workspace


def seconds(values, workspace, rows=(*REPORTED, *ROWS)):
    found = row_costs(validate(values), workspace, rows)
    return {name: cost.core_seconds for name, cost in found.items()}


def test_rows_cost_the_stages_behind_them(values, workspace):
    assert seconds(values, workspace) == {
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


def test_rows_that_were_not_scored_cost_nothing(values, workspace):
    assert seconds(values, workspace, ["dume", "btx", "full"]) == {"dume": 127, "btx": 3 + 128}


def test_what_given_experts_have_cost_is_unknown(values, workspace):
    assert expert_tokens(validate(values)) == 2 * 15 * 4 * 32
    values["domains"]["b"]["expert"] = "somewhere"
    assert expert_tokens(validate(values)) is None
    write_cost(workspace, "baselines-full", Cost(512.0, 512))
    assert seconds(values, workspace) == {"seed": 0, "full": 512}


def test_what_continued_experts_have_cost_is_unknown(values, workspace):
    """The last night's training is recorded, and not what it went on from."""
    recipe = validate(values)
    taught = replace(recipe, lineage=Lineage(parents={"b": "of its parent"}))
    assert expert_tokens(taught) is None
    found = row_costs(taught, workspace, ["seed", "dume", "btx"])
    assert set(found) == {"seed"}


def test_whatever_is_made_of_repaired_experts_costs_their_repair(values, workspace):
    repair = 512 + 1024
    values["experts"] |= {"repair": "down"}
    found = seconds(values, workspace)
    assert found["dume"] == 127 + repair
    assert found["plus"] == 127 + repair + 256
    assert found["oracle"] == found["random_routing"] == 3 + 4 + repair + 64
    assert found["btx"] == 3 + 128  # of the experts as they were trained
    values["experts"] |= {"repair_tokens": "routed"}
    found = seconds(values, workspace)
    # The solved routers are behind the experts that every one of them joins.
    assert {found[row] for row in ("dume", "oracle", "random_routing")} == {127 + repair + 2048}
