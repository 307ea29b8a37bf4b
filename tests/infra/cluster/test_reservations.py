"""What pieces reserve beside CPUs, on a real Ray that has it."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import ray

from infra.cluster.compute import check_room, cluster, run_pieces
from infra.cluster.pieces import Piece
from infra.recipe.resources import ComputeConfig, Resources, WorkerResources
from infra.settings import read
from upcycle_core.errors import InputError
from upcycle_core.progress import Progress

ROOT = Path(__file__).resolve().parents[3]
MEMORY = 10**9
# A GPU that is only counted: these pieces do not look for it.
HAS = {"GPU": 1, "accelerator_type:H100": 1, "memory": MEMORY, "ssd": 3}


@pytest.fixture(scope="module", autouse=True)
def ray_with_more():
    """Two CPUs and more, and workers that can import this file's pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps(HAS))
        with cluster(read(os.environ), 2, ROOT):
            yield


def reserved_piece(*, out: Path, progress: Progress) -> dict:
    context = ray.get_runtime_context()
    group = ray.util.get_current_placement_group()
    table = ray.util.placement_group_table(group) if group else {}
    return {
        "assigned": context.get_assigned_resources(),
        "bundles": list(table.get("bundles", {}).values()),
        "strategy": table.get("strategy"),
    }


def reserved(tmp_path, resources, **piece):
    asked = Piece(name="a", function=reserved_piece, **piece)
    return run_pieces([asked], directory=tmp_path, resources=resources, label="test")["a"].result


def test_a_piece_has_what_its_recipe_asks_for(tmp_path):
    asked = Resources(
        cpus=2, gpus=0.5, memory=MEMORY // 2, accelerator="H100", resources={"ssd": 2.0}
    )
    assert reserved(tmp_path, asked)["assigned"] == {
        "CPU": 2.0,
        "GPU": 0.5,
        "memory": MEMORY // 2,
        "accelerator_type:H100": 0.001,
        "ssd": 2.0,
    }


def pid_piece(*, out: Path, progress: Progress) -> int:
    return os.getpid()


@pytest.mark.faults
@pytest.mark.parametrize(("gpus", "processes"), [(1, 2), (0, 1)])
def test_a_process_that_has_had_a_gpu_does_one_piece(tmp_path, gpus, processes):
    """What it keeps of that GPU, and which it is, would be the next one's."""
    found = [
        run_pieces(
            [Piece(name=name, function=pid_piece)],
            directory=tmp_path,
            resources=Resources(cpus=2, gpus=gpus),
            label="test",
        )[name].result
        for name in "ab"
    ]
    assert len(set(found)) == processes


def test_a_piece_that_asks_for_no_more_has_no_more(tmp_path):
    assert reserved(tmp_path, Resources())["assigned"] == {"CPU": 1.0}


@pytest.mark.faults
@pytest.mark.parametrize("placement", ["spread", "pack"])
def test_each_worker_has_it_and_they_are_placed_as_asked(tmp_path, placement):
    asked = WorkerResources(memory=MEMORY // 2, resources={"ssd": 1.0})
    found = reserved(tmp_path, asked, workers=2, placement=placement)
    assert found["bundles"] == [{"CPU": 1.0, "memory": MEMORY // 2, "ssd": 1.0}] * 2
    assert found["strategy"] == placement.upper()


def test_every_request_that_no_machine_meets_is_named_before_the_first_piece(tmp_path):
    compute = ComputeConfig(
        seed=WorkerResources(workers=2, memory=MEMORY // 2 + 1, placement="spread"),
        experts=WorkerResources(gpus=1, accelerator="A100"),
        assembly=Resources(resources={"disk": 1.0}),
        evaluation=Resources(gpus=1, accelerator="H100", memory=MEMORY, resources={"ssd": 3.0}),
    )
    with pytest.raises(InputError) as raised:
        check_room(compute)
    faults = {fault.field: fault for fault in raised.value.faults}
    assert set(faults) == {
        "compute.seed.memory",
        "compute.experts.accelerator",
        "compute.assembly.resources.disk",
    }
    assert "Ray has 1_000_000_000 in all" in faults["compute.seed.memory"].remedy
    assert "they have ['H100']" in faults["compute.experts.accelerator"].remedy
    assert "they have ['ssd']" in faults["compute.assembly.resources.disk"].remedy
    with pytest.raises(InputError, match=r"compute resources.disk = 1: no machine .* has it"):
        reserved(tmp_path, compute.assembly)
    assert not list(tmp_path.glob("a.*"))


def test_what_leaves_out_gpus_leaves_out_their_kind():
    asked = WorkerResources(cpus=2, gpus=1, accelerator="H100", memory=5, workers=2)
    assert asked.without_gpus() == dataclasses.replace(asked, gpus=0.0, accelerator=None)
