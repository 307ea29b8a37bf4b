"""What joins models, called on a device: its figures."""

from dataclasses import replace

import pytest

from tests.upcycle_core.dume.test_dume_repair import EXACT, merged, related, write_corpus
from upcycle_core.dume.attention import merge_attention
from upcycle_core.dume.repair import repair_expert
from upcycle_core.dume.routed import repair_routed
from upcycle_core.dume.shared_head import final_moments
from upcycle_core.dume.statistics import Statistics, domain_statistics
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import Variant, evaluate_checkpoint, evaluate_moe
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers

TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
"""By precision."""
SIZE = 10**9


def made(root):
    """Two experts and their text by name, and a MoE of them under ``root``."""
    experts = related(root)
    corpora = {f"d{n}": write_corpus(root / f"text{n}", 6 + 2 * n) for n in range(2)}
    backbone, routers = merged(experts, root / "backbone"), random_routers(2, 32, 2, seed=0)
    named = dict(zip(corpora, experts, strict=True))
    assemble(named, backbone, routers, root / "moe", top_k=1, max_shard_bytes=SIZE)
    return named, corpora


def calls(root, out, named, corpora, precision, *, device):
    """Every call's figures."""
    out.mkdir()
    config = replace(EXACT, precision=precision, position_buckets=(2, 8), shards=1, batch_size=16)
    backbone, routers = root / "backbone", random_routers(2, 32, 2, seed=0)
    common = {"config": config, "device": device}
    sized = {**common, "max_shard_bytes": SIZE}
    figures = {}
    once = {}
    for name, expert in named.items():
        once[name] = out / f"repaired-{name}"
        where = (backbone, expert, corpora[name], once[name])
        said = repair_expert(*where, repair="down+head_target", **sized)
        figures[f"repair {name}"] = [layer["drift"] for layer in said]
    twice = repair_routed(backbone, named, once, corpora, routers, out / "routed", **sized)
    figures["routed"] = [layer["drift"] for layers in twice.values() for layer in layers]
    for way in ("regmean", "distilled"):
        texts = list(corpora.values())
        merge_attention(list(named.values()), backbone, texts, out / way, way=way, **sized)
    moments = final_moments(named["d0"], corpora["d0"], **common)
    figures["moments"] = [moments.trace().item()]
    for place in (None, out / "layers"):
        file = out / f"statistics-{place is None}"
        where = (backbone, named["d0"], corpora["d0"], file)
        domain_statistics(*where, shard=0, streamed=place, **common)
        sums = Statistics.load(file).moments(1)
        figures[f"statistics {place is None}"] = [sums.gram().trace().item()]
        scoring = EvaluationConfig(sequence_length=16, batch_size=16, precision=precision)
        how = {"config": scoring, "device": device, "streamed": place}
        dense = evaluate_checkpoint(named["d0"], corpora, **how)
        figures[f"dense {place is None}"] = [score["nll"] for score in dense.values()]
        variants = {"own": Variant(), "other": Variant(routers={0: -routers[0].double()}, top_k=2)}
        for name, row in evaluate_moe(root / "moe", variants, corpora, **how).items():
            scores = [score["nll"] for score in row["scores"].values()]
            figures[f"{name} {place is None}"] = scores
    return figures


def assert_alike(there, here, precision):
    """Of two devices, that figures are the same."""
    assert there.keys() == here.keys()
    for name, figures in there.items():
        assert figures == pytest.approx(here[name], rel=TOLERANCE[precision]), name
        if name.endswith("True"):  # held or streamed is the same on either
            assert figures == pytest.approx(there[name.replace("True", "False")], rel=1e-6), name
