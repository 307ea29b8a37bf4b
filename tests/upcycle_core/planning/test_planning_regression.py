"""Planned memory of what is regressed on calibration text, against what torch counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_planning_rehearsal import peak
from torch.utils.flop_counter import FlopCounterMode

from tests.pico import save_pico
from upcycle_core.activations.moments import Moments
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.attention import merge_attention
from upcycle_core.dume.collect import Layout
from upcycle_core.dume.config import RouterConfig, StatisticsConfig
from upcycle_core.dume.repair import repair_expert
from upcycle_core.dume.routed import repair_routed
from upcycle_core.dume.router import solve_routers
from upcycle_core.dume.shared_head import final_moments
from upcycle_core.dume.statistics import Statistics, save_statistics
from upcycle_core.planning import estimate, memory, work
from upcycle_core.planning.shape import Shape

DOMAINS, DOCUMENTS, LENGTH = 3, 160, 64
CONFIG = StatisticsConfig(sequence_length=LENGTH, batch_size=20, precision="fp32")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Experts, their backbone, and a text of each."""
    root = tmp_path_factory.mktemp("parts")
    names = [f"d{n}" for n in range(DOMAINS)]
    experts = {name: save_pico(root / name, seed=n, **SIZES) for n, name in enumerate(names)}
    readers = [CheckpointReader(path) for path in experts.values()]
    write_backbone(readers, root / "backbone", max_shard_bytes=10**9)
    draw = np.random.default_rng(0)
    for name in names:
        texts = [(draw.integers(2, 96, LENGTH), LENGTH) for _ in range(DOCUMENTS)]
        write_split(root / f"{name}.text", texts, eos_id=0, vocabulary_size=96)
    return root / "backbone", experts, {name: root / f"{name}.text" for name in names}


@pytest.fixture(autouse=True)
def rehearsed(monkeypatch):
    monkeypatch.setattr(estimate, "SMALL", 0)


@pytest.mark.parametrize("way", ["regmean", pytest.param("distilled", marks=pytest.mark.faults)])
def test_merged_attention_needs_what_was_planned(parts, tmp_path, way):
    backbone, experts, corpora = parts
    settings = {"way": way, "config": CONFIG, "max_shard_bytes": 10**9}
    call = (list(experts.values()), backbone, list(corpora.values()), tmp_path / "out")
    held = peak(lambda: merge_attention(*call, **settings))
    shape, tokens = Shape.of(experts["d0"]), DOCUMENTS * LENGTH
    of = {"experts": DOMAINS, "distils": way == "distilled"}
    planned = memory.merged_attention_bytes(shape, CONFIG, tokens, **of)
    assert planned == pytest.approx(held, rel=0.2)


@pytest.mark.parametrize("head", [False, True])
def test_a_repair_needs_what_was_planned(parts, tmp_path, head):
    backbone, experts, corpora = parts
    settings = {"config": CONFIG, "max_shard_bytes": 10**9}
    call = (backbone, experts["d0"], corpora["d0"], tmp_path / "out")
    repair = "down+head_target" if head else "down"
    held = peak(lambda: repair_expert(*call, repair=repair, **settings))
    shape, tokens = Shape.of(experts["d0"]), DOCUMENTS * LENGTH
    planned = memory.repair_bytes(shape, CONFIG, tokens, head=head)
    assert planned == pytest.approx(held, rel=0.2)


def test_a_fitted_head_and_the_states_before_it_need_what_was_planned(parts, tmp_path):
    _, experts, corpora = parts
    shape, tokens = Shape.of(experts["d0"]), DOCUMENTS * LENGTH
    call = (experts["d0"], corpora["d0"])
    held = peak(lambda: final_moments(*call, config=CONFIG))
    planned = memory.final_states_bytes(shape, CONFIG, tokens)
    assert planned == pytest.approx(held, rel=0.2)
    longer = replace(CONFIG, batch_size=80)  # what a batch holds on its way through a layer
    held = peak(lambda: final_moments(*call, config=longer))
    assert memory.final_states_bytes(shape, longer, tokens) == pytest.approx(held, rel=0.2)


def test_a_repair_s_operations_are_those_that_torch_counts(parts, tmp_path):
    """Passes and sums; what factorises and solves, torch does not count."""
    backbone, experts, corpora = parts
    call = (backbone, experts["d0"], corpora["d0"], tmp_path / "out")
    with FlopCounterMode(display=False) as counted:
        repair_expert(*call, repair="down", config=CONFIG, max_shard_bytes=10**9)
    shape, tokens = Shape.of(experts["d0"]), DOCUMENTS * LENGTH
    planned = work.repair_flops(shape, tokens, LENGTH)
    factors = shape.layers * 2 * 5 * (shape.inner**3 // 3 + 2 * shape.inner**2 * shape.hidden)
    assert planned - factors == pytest.approx(counted.get_total_flops(), rel=0.15)


@pytest.mark.parametrize(("domains", "folds"), [(2, 1), (6, 1), (3, 4)])
def test_solving_needs_what_was_planned(tmp_path, domains, folds):
    config = RouterConfig(ridge_lambda="cross-validate" if folds > 1 else 0.1)
    draw, files = torch.Generator().manual_seed(0), {}
    for number in range(domains):
        sums = Moments(SIZES["hidden_size"], cells=folds)
        for fold in range(folds):
            sums.update(torch.randn(400, SIZES["hidden_size"], generator=draw), cell=fold)
        layout = Layout(SIZES["hidden_size"], (0,), folds)
        save_statistics(tmp_path / str(number), layout, {0: sums})
        files[str(number)] = Statistics.load(tmp_path / str(number))
    held = peak(lambda: solve_routers(files, config=config))
    shape = Shape.of(save_pico(tmp_path / "model", **SIZES))
    planned = memory.solving_bytes(shape, StatisticsConfig(folds=folds), cross_validates=folds > 1)
    assert planned == pytest.approx(held, rel=0.2)


@pytest.mark.faults
def test_the_second_repair_needs_what_was_planned(parts, tmp_path):
    backbone, experts, corpora = parts
    settings = {"config": CONFIG, "max_shard_bytes": 10**9}
    once = {name: tmp_path / f"once-{name}" for name in experts}
    for name, out in once.items():
        repair_expert(backbone, experts[name], corpora[name], out, repair="down", **settings)
    draw = torch.Generator().manual_seed(0)
    hidden = SIZES["hidden_size"]
    routers = {n: torch.randn(hidden, DOMAINS, generator=draw) for n in range(2)}
    call = (backbone, experts, once, corpora, routers, tmp_path / "twice")
    held = peak(lambda: repair_routed(*call, **settings))
    shape, tokens = Shape.of(experts["d0"]), DOCUMENTS * LENGTH
    planned = memory.routed_repair_bytes(shape, CONFIG, tokens, experts=DOMAINS, head=False)
    assert planned == pytest.approx(held, rel=0.2)
