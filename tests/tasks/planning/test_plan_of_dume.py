"""What DUME's stages need where a recipe asks for more than the paper does."""

from dataclasses import replace

import pytest
from test_plan import DOMAINS, FFNS, HIDDEN, LAYERS, WHOLE, made, rows

from tasks.planning.machine import Machine
from upcycle_core.planning import work
from upcycle_core.planning.rates import Rates
from upcycle_core.planning.shape import Shape

MODEL = 2 * (WHOLE + 4 * FFNS + LAYERS * 5 * HIDDEN)
TOKENS = 200_000
STATISTICS = {"precision": "bf16", "batch_size": 4, "tokens": TOKENS, "shards": 2}
SCORED = {"tokens": 4096, "sequence_length": 1024, "random_routing_seeds": [0]}
RATES = ("fp32", "bf16", "fp32_one", "bf16_one", "memory", "read", "write")
SMALL = Machine(memory=16 * 10**9, cpus=8, disk=10**13)


def from_elsewhere(llama, count):
    """Ready experts, of which the first have a second text."""
    ready = {"expert": str(llama)}
    texts = [{"train": {"files": [f"{name}.txt"]}, **ready} for name in DOMAINS]
    for text in texts[:count]:
        text["elsewhere"] = {"files": ["else.txt"]}
    return {"domains": dict(zip(DOMAINS, texts, strict=True)), "statistics": STATISTICS}


def refused(found):
    """{stage and pieces at once: what would help}"""
    return {str(fault.value).partition(" x")[0]: fault.remedy for fault in found.faults()}


def test_a_text_from_elsewhere_has_statistics_routers_and_a_row_of_its_own(tmp_path, llama):
    plain, two = (
        rows(made(tmp_path, llama, evaluation=SCORED, **from_elsewhere(llama, count)))
        for count in (0, 2)
    )
    for part in ("pieces", "kept", "read", "flops"):
        of = [getattr(found["statistics"], part) for found in (plain, two)]
        assert of[1] * 5 == of[0] * (5 + 2), part
        assert getattr(two["router"], part) == 2 * getattr(plain["router"], part), part
    assert two["statistics"].each == 2 * plain["statistics"].each
    forward = work.forward_flops(Shape.of(llama), 5 * 4096, 1024)
    assert two["report"].flops - plain["report"].flops == forward


@pytest.mark.parametrize("count", [0, 2])
def test_every_point_of_a_sweep_is_a_row_of_each_router(tmp_path, llama, count):
    sweeps = {"sweep_top_k": [2, 3], "sweep_ridge_lambda": [0.1, 1.0], "sweep_window": [4]}
    texts = from_elsewhere(llama, count)
    texts["statistics"] = {**STATISTICS, "position_buckets": [4]}
    plain, swept = (
        rows(made(tmp_path, llama, evaluation={**SCORED, **own}, **texts))["report"].flops
        for own in ({}, sweeps)
    )
    one, two, three = (
        work.forward_flops(Shape.of(llama), 5 * 4096, 1024, top_k=k) for k in (1, 2, 3)
    )
    assert swept - plain == (2 if count else 1) * (3 * one + two + three)


def test_a_small_moe_is_loaded_for_each_kind_of_routers(tmp_path, llama, monkeypatch):
    asked = {**SCORED, "sweep_top_k": [1, 2], "sweep_ridge_lambda": [0.1, 1.0, 10.0]}
    found = []
    for limit in (MODEL - 1, MODEL):
        monkeypatch.setattr("tasks.dume.variants.LOADED_AGAIN_BYTES", limit)
        texts = from_elsewhere(llama, 0)
        found.append(rows(made(tmp_path, llama, evaluation=asked, **texts))["report"])
    once, each = found
    assert each.pieces - once.pieces == 3  # random routers and two sweeps
    assert each.read - once.read == 3 * MODEL
    assert each.flops == once.flops


def test_experts_that_are_repaired_twice_are_kept_twice(tmp_path, llama):
    repair = {"repair": "down", "repair_tokens": "routed"}
    found = made(tmp_path, llama, experts=repair, statistics=STATISTICS)
    routed = rows(found)["routed"]
    assert routed.kept == rows(found)["repaired"].kept == 5 * 2 * WHOLE
    states = 2 * 5 * 2 * TOKENS * HIDDEN
    halves = 5 * 2 * 8 * 14336 * (14336 + HIDDEN)
    assert states + halves < routed.memory < 1.5 * (states + halves)
    one = {"statistics": {"cpus": 8}}
    small = made(tmp_path, llama, experts=repair, statistics=STATISTICS, machine=SMALL, compute=one)
    assert "experts.repair_tokens = own" in refused(small)["routed: 1"]


def test_states_before_a_fitted_head_are_a_piece_a_domain(tmp_path, llama):
    """On the device of statistics, as many at once as it takes; the head itself is fitted alone."""
    repair = {"repair": "down+head_target"}
    merged = {"backbone": {"merge": {"embeddings": "counts", "head": "fitted"}}, "experts": repair}
    merged["statistics"] = STATISTICS
    found = made(tmp_path, llama, **merged)
    backbone = rows(found)["backbone"]
    assert (backbone.pieces, backbone.at_once(found.machine)) == (5, 5)
    assert backbone.memory > 2 * TOKENS * HIDDEN
    passes = 5 * work.forward_flops(Shape.of(llama), TOKENS, 1024, head=False)
    assert backbone.flops == passes
    assert backbone.alone_flops == work.fitted_head_flops(Shape.of(llama), experts=5)
    rates = Rates(**dict.fromkeys(RATES, 1e12), gpu_fp32=1e14, gpu_bf16=1e15)
    on_a_gpu = replace(backbone, resources=replace(backbone.resources, gpus=1.0))
    for row in (backbone, on_a_gpu):  # on however fast a GPU
        assert row.seconds(found.machine, rates) > backbone.alone_flops / 1e12
    small = made(tmp_path, llama, machine=SMALL, **merged)
    assert "fewer statistics.tokens" in refused(small)["backbone: 5"]
    gpu = Machine(memory=24 * 10**9, cpus=8, disk=10**13, gpus=1, gpu_memory=2 * 10**9)
    asked = {**merged, "compute": {"statistics": {"gpus": 1}}}
    assert "backbone: 1" in refused(made(tmp_path, llama, machine=gpu, **asked))
    tiny = Machine(memory=10**9, cpus=1, disk=10**13)
    alone = made(tmp_path, llama, machine=tiny, **merged).faults()
    assert "use a larger machine" in [fault.remedy for fault in alone]
    assert rows(found)["repaired"].flops > 2 * passes  # and products and systems


@pytest.mark.parametrize("way", ["regmean", "distilled"])
def test_attention_by_regression_holds_all_domains_text(tmp_path, llama, way):
    merged = {"backbone": {"merge": {"attention": way}}, "statistics": STATISTICS}
    backbone = rows(made(tmp_path, llama, **merged))["backbone"]
    states = {"regmean": 1, "distilled": 2}[way] * 5 * 2 * TOKENS * HIDDEN
    assert states < backbone.memory < 2 * states
    passes = {"regmean": 3, "distilled": 6}[way]
    forward = work.forward_flops(Shape.of(llama), TOKENS, 1024, head=False)
    assert backbone.flops == passes * 5 * forward
    small = made(tmp_path, llama, machine=replace(SMALL, memory=states), **merged)
    assert "backbone.merge.attention = average" in refused(small)["backbone: 1"]
    gpu = Machine(memory=24 * 10**9, cpus=8, disk=10**13, gpus=1, gpu_memory=80 * 10**9)
    asked = {**merged, "compute": {"statistics": {"gpus": 1}}}
    assert "backbone: 1" not in refused(made(tmp_path, llama, machine=gpu, **asked))


def test_routers_layer_by_layer_load_a_whole_mixture_piece_by_piece(tmp_path, llama):
    sections = {"router": {"solve": "sequential"}, "statistics": STATISTICS}
    found = made(tmp_path, llama, **sections)
    router = rows(found)["router"]
    assert router.pieces == LAYERS * 5 * 2
    assert router.at_once(found.machine) == 8
    wide = Machine(memory=10**12, cpus=64, disk=10**13)
    assert router.at_once(wide) == 5 * 2  # a layer waits for the one before
    assert router.read > router.pieces * MODEL
    assert MODEL < router.passing < 1.6 * MODEL
    assert 2 * 5 * FFNS < router.memory < 2 * (WHOLE + 4 * FFNS)
    small = made(tmp_path, llama, machine=SMALL, **sections)
    assert "router.solve = joint" in refused(small)["router: 8"]


def test_lambda_by_cross_validation_is_a_solution_of_each_and_each_fold(tmp_path, llama):
    folds = {"statistics": {**STATISTICS, "folds": 4}}
    asked = {"ridge_lambda": "cross-validate", "lambda_grid": [0.01, 1.0, 100.0]}
    plain, crossed = (
        rows(made(tmp_path, llama, router=router, **folds))["router"] for router in ({}, asked)
    )
    assert plain.flops == LAYERS * HIDDEN**3
    assert crossed.flops == (1 + 4 * 3) * plain.flops
    assert crossed.read == (1 + 4) * plain.read
    assert crossed.kept == plain.kept


def test_routers_are_solved_with_what_assembly_reserves(tmp_path, llama):
    machine = Machine(memory=10**12, cpus=8, disk=10**13)
    rates = Rates(**{**dict.fromkeys(RATES, 1e12), "fp32_one": 1e10})
    one, all_of_them = (
        rows(made(tmp_path, llama, compute={"assembly": {"cpus": cpus}}))["router"]
        for cpus in (1, 8)
    )
    assert one.seconds(machine, rates) > 10 * all_of_them.seconds(machine, rates)


@pytest.mark.parametrize(("tokens", "is_named"), [(TOKENS, True), (28_672, False)])
def test_less_text_than_a_repair_needs_is_no_remedy(tmp_path, llama, tokens, is_named):
    text = {**STATISTICS, "tokens": tokens}
    gpu = Machine(memory=24 * 10**9, cpus=8, disk=10**13, gpus=1, gpu_memory=2 * 10**9)
    asked = {"experts": {"repair": "down"}, "statistics": text}
    asked["compute"] = {"statistics": {"gpus": 1}}
    remedy = refused(made(tmp_path, llama, machine=gpu, **asked))["repaired: 1"]
    assert ("fewer statistics.tokens (at least 28,672)" in remedy) == is_named
