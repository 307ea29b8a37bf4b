"""Settings of baselines that do not fit each other."""

from dataclasses import replace

import pytest

from upcycle_core.baselines.checks import baseline_faults
from upcycle_core.baselines.config import Baseline
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.symphony.config import SymphonyConfig
from upcycle_core.training.config import LoraSettings, MoEObjective

DOMAINS = ("law", "medicine", "physics")


def fields(**settings):
    return [fault.field for fault in baseline_faults(Baseline(**settings), DOMAINS, "row")]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "btx", "seed_expert": True, "top_k": 4},
        {"method": "bam"},
        {"method": "sparse-upcycling", "copies": 8, "top_k": 8},
        {"method": "drop-upcycling", "start": "experts"},
        {"method": "full-finetune", "top_k": 1},
        {"method": "branch-train-merge"},
        {"method": "btx", "top_k": 1, "objective": MoEObjective(trainable=("experts",))},
        {"method": "btx", "objective": MoEObjective(domain_weights={"law": 0.0, "physics": 3})},
    ],
)
def test_what_fits_has_no_fault(settings):
    assert fields(**settings) == []


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"method": "btx", "top_k": 4}, "row.top_k"),
        ({"method": "sparse-upcycling", "copies": 2, "top_k": 3}, "row.top_k"),
        (
            {"method": "dume", "top_k": 1, "objective": MoEObjective(trainable=("router",))},
            "row.top_k",
        ),
        ({"method": "btx", "top_k": 1}, "row.top_k"),
        ({"method": "dume", "seed_expert": True}, "row.seed_expert"),
        ({"method": "btx", "copies": 4}, "row.copies"),
        ({"method": "drop-upcycling", "start": "experts", "copies": 4}, "row.copies"),
        ({"method": "full-finetune", "copies": 4}, "row.copies"),
        ({"method": "btx", "symphony": SymphonyConfig(models=DOMAINS[:2])}, "row.symphony"),
        ({"method": "sparse-upcycling", "simoe": SimoeUpcyclingConfig()}, "row.simoe"),
        ({"method": "btx", "tuned": "layers"}, "row.tuned"),
        ({"method": "full-finetune", "tuned": "layers", "lora": LoraSettings()}, "row.lora"),
        ({"method": "sparse-upcycling", "start": "experts"}, "row.start"),
        (
            {"method": "full-finetune", "objective": MoEObjective(trainable=("router",))},
            "row.objective.trainable",
        ),
        ({"method": "btx", "objective": MoEObjective(trainable=())}, "row.objective.trainable"),
        (
            {"method": "full-finetune", "objective": MoEObjective(balance_coefficient=0.01)},
            "row.objective.balance_coefficient",
        ),
        (
            {"method": "branch-train-merge", "objective": MoEObjective(z_coefficient=0.001)},
            "row.objective.z_coefficient",
        ),
        (
            {"method": "btx", "objective": MoEObjective(domain_weights={"lore": 1.0})},
            "row.objective.domain_weights",
        ),
        (
            {"method": "btx", "objective": MoEObjective(domain_weights={"law": -1.0})},
            "row.objective.domain_weights",
        ),
        (
            {
                "method": "btx",
                "objective": MoEObjective(domain_weights=dict.fromkeys(DOMAINS, 0.0)),
            },
            "row.objective.domain_weights",
        ),
    ],
)
def test_each_fault_is_named(settings, field):
    assert fields(**settings) == [field]


def test_k_of_one_says_why_its_router_cannot_learn():
    (fault,) = baseline_faults(Baseline(method="btx", top_k=1), DOMAINS, "row")
    assert "no gradient" in fault.remedy


def test_one_expert_of_dume_s_trains_its_router_where_weights_do_not_sum_to_one():
    row = Baseline(method="dume", top_k=1, objective=MoEObjective(trainable=("router",)))
    assert [fault.field for fault in baseline_faults(row, DOMAINS, "row")] == ["row.top_k"]
    assert not list(baseline_faults(row, DOMAINS, "row", normalise=False))
    rival = replace(row, method="btx")
    assert list(baseline_faults(rival, DOMAINS, "row", normalise=False))
