"""Repair in closed form, against whole passes and least squares on stacked activations."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.killed import killed_at
from tests.pico import save_pico
from upcycle_core.activations.regression import LAMBDAS
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.repair import REPORT, judged_rows, repair_expert
from upcycle_core.errors import InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers

BEFORE_FFNS = [name for name, family in FAMILIES.items() if family.norms_first]
EXACT = StatisticsConfig(sequence_length=16, batch_size=3, precision="fp64")


def write_corpus(directory: Path, documents: int = 24, size: int = 96) -> Path:
    return write_texts(directory, [16 * (1 + n % 2) for n in range(documents)], size)


def write_texts(directory: Path, lengths: list[int], size: int = 96) -> Path:
    generator = np.random.default_rng(0)
    texts = [(generator.zipf(1.3, length) % (size - 2) + 2, length) for length in lengths]
    write_split(directory, texts, eos_id=0, vocabulary_size=size)
    return directory


def related(root: Path, family: str = "llama", *, count: int = 2, **shape) -> list[Path]:
    """Experts of one seed: small changes of it, in every weight, as doubles."""
    seed = load_causal_lm(save_pico(root / "seed", family, **shape), dtype=torch.float64)
    weights = {name: value.clone() for name, value in seed.state_dict().items()}
    made = []
    for number in range(count):
        torch.manual_seed(number + 1)
        with torch.no_grad():
            for name, value in seed.state_dict().items():
                value.copy_(weights[name] + 0.02 * torch.randn_like(value))
        made.append(save_pico(root / f"expert{number}", family, **shape))
        seed.save_pretrained(made[-1])
    return made


def merged(experts: list[Path], out: Path) -> Path:
    write_backbone([CheckpointReader(e) for e in experts], out, max_shard_bytes=10**9)
    return out


def repaired(backbone: Path, expert: Path, corpus: Path, out: Path, **settings) -> Path:
    fields = {"repair": "down", "config": EXACT, "max_shard_bytes": 10**9, **settings}
    repair_expert(backbone, expert, corpus, out, **fields)
    return out


def paragraphs_of(corpus: Path) -> list[Tensor]:
    """Every paragraph alone; the half of the documents that each belongs to goes with it."""
    text = TokenCorpus(corpus)
    return [
        (document % 2, torch.tensor(text.document(document)[start : start + 16].astype(np.int64)))
        for document in range(len(text))
        for start in range(0, len(text.document(document)), 16)
    ]


def in_type(checkpoint: Path, dtype: torch.dtype, out: Path) -> Path:
    """The same model in another type."""
    load_causal_lm(checkpoint, dtype=dtype).save_pretrained(out)
    copy_tokenizer(checkpoint, out)
    return out


def test_an_expert_in_bf16_is_repaired_in_the_backbone_s_fp32(tmp_path):
    whole = [in_type(e, torch.float32, tmp_path / f"fp32-{e.name}") for e in related(tmp_path)]
    backbone = merged(whole, tmp_path / "backbone")
    narrow = in_type(whole[0], torch.bfloat16, tmp_path / "narrow")
    wide = in_type(narrow, torch.float32, tmp_path / "wide")
    corpus = write_corpus(tmp_path / "corpus")
    found, expected = (
        CheckpointReader(repaired(backbone, e, corpus, tmp_path / f"out-{e.name}"))
        for e in (narrow, wide)
    )
    for name in expected.tensors:
        assert found.tensor(name).dtype == torch.float32, name
        assert torch.equal(found.tensor(name), expected.tensor(name)), name


def test_an_expert_that_the_backbone_s_type_cannot_hold_is_refused_before_anything(tmp_path):
    whole = related(tmp_path)
    narrow = [in_type(e, torch.bfloat16, tmp_path / f"bf16-{e.name}") for e in whole]
    backbone, corpus = merged(narrow, tmp_path / "backbone"), write_corpus(tmp_path / "corpus")
    with pytest.raises(InputError, match=r"float64, the backbone's torch\.bfloat16"):
        repaired(backbone, whole[0], corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_long_document_is_judged_by_its_paragraphs(tmp_path):
    experts = related(tmp_path)
    backbone = merged(experts, tmp_path / "backbone")
    found = {}
    texts = {"one": [1200], "even": [600, 4, 600], "a note": [1200, 32], "first": [32, 1200]}
    for name, lengths in texts.items():
        text = write_texts(tmp_path / f"text-{name}", lengths)
        out = repaired(backbone, experts[0], text, tmp_path / name)
        found[name] = json.loads((out / "repair.json").read_text())
        assert all(layer["drift"] < 1 and layer["lambda"] for layer in found[name]), found[name]
    short = write_texts(tmp_path / "short", [600])
    whole = replace(EXACT, sequence_length=600)
    with pytest.raises(InputError, match="stands in one paragraph"):
        repaired(backbone, experts[0], short, tmp_path / "none", config=whole)
    assert not (tmp_path / "none").exists()


def layer_features(model: nn.Module, layer: int, texts) -> tuple[list[Tensor], list[Tensor]]:
    """What a layer's down projection reads, and what the layer leaves, by paragraph."""
    inner, left = [], []
    block = model.model.layers[layer]
    hooks = [
        block.mlp.down_proj.register_forward_pre_hook(lambda m, given: inner.append(given[0][0])),
        block.register_forward_hook(lambda m, given, out: left.append(out[0])),
    ]
    with torch.no_grad():
        for _, ids in texts:
            model.model(ids[None])
    for hook in hooks:
        hook.remove()
    return inner, left


def slow_head_target(expert: nn.Module, model: nn.Module, hidden_TH: Tensor, corpus: Path):
    """Token by token the state whose centred logits come nearest to the expert's, weighed."""
    counts = np.bincount(TokenCorpus(corpus).tokens, minlength=96)
    weights = torch.tensor(counts / counts.sum() + 1e-6)
    wanted = (
        expert.lm_head.weight.double()
        @ (
            hidden_TH / hidden_TH.square().mean(-1, keepdim=True).sqrt() * expert.model.norm.weight
        ).T.double()
    )  # [V, T]
    head = model.lm_head.weight.double()
    head = head - (weights[:, None] * head).sum(0) / weights.sum()
    wanted = wanted - (weights[:, None] * wanted).sum(0) / weights.sum()
    root = weights.sqrt()[:, None]
    normed = torch.linalg.lstsq(root * head, root * wanted).solution.T
    return normed / model.model.norm.weight * hidden_TH.square().mean(-1, keepdim=True).sqrt()


def slow_ridge(a: Tensor, r: Tensor, factor: float) -> Tensor:
    mean = a.square().sum() / a.shape[1]
    ridge = (factor * mean).sqrt() * torch.eye(a.shape[1], dtype=torch.float64)
    zeros = torch.zeros(a.shape[1], r.shape[1], dtype=torch.float64)
    return torch.linalg.lstsq(torch.cat([a, ridge]), torch.cat([r, zeros])).solution


def slow_solution(a: Tensor, r: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """The solution of all text, and for each token what the other half's adds to its state."""

    def unseen(factor: float) -> Tensor:
        added = torch.empty_like(r)
        for h in (0, 1):
            added[half != h] = a[half != h] @ slow_ridge(a[half == h], r[half == h], factor)
        return added

    errors = {factor: float((r - unseen(factor)).square().sum()) for factor in LAMBDAS}
    best = min(errors, key=errors.get)
    if errors[best] >= r.square().sum():
        return torch.zeros(a.shape[1], r.shape[1], dtype=torch.float64), torch.zeros_like(r)
    return slow_ridge(a, r, best), unseen(best)


@torch.no_grad()
def slow_repair(backbone: Path, expert: Path, corpus: Path, *, head: bool) -> nn.Module:
    """Whole passes for every layer, least squares on stacked activations, no sums."""
    texts = paragraphs_of(corpus)
    model = load_stitched(backbone, expert, dtype=torch.float64)
    own = load_causal_lm(expert, dtype=torch.float64)
    half = torch.tensor([h for h, ids in texts for _ in ids])
    layers = model.config.num_hidden_layers
    for layer in range(layers):
        inner, left = map(torch.cat, layer_features(model, layer, texts))
        wanted = torch.cat(layer_features(own, layer, texts)[1])
        targets = [wanted]
        if head and layer == layers - 1:
            targets.append(slow_head_target(own, model, wanted, corpus))
        found = [slow_solution(inner, target - left, half) for target in targets]

        def apart(added: Tensor, left=left, wanted=wanted) -> float:
            """KL divergence of the logits from the expert's."""
            goal = own.lm_head(own.model.norm(wanted)).log_softmax(-1)
            made = model.lm_head(model.model.norm(left + added)).log_softmax(-1)
            return float((goal.exp() * (goal - made)).sum())

        solution, _ = min(found, key=lambda each: apart(each[1]))
        model.model.layers[layer].mlp.down_proj.weight += solution.T
    return model


@pytest.mark.parametrize("family", BEFORE_FFNS)
@pytest.mark.parametrize("head", [False, True])
def test_repair_is_least_squares_on_whole_passes(family, head, tmp_path):
    experts = related(tmp_path, family)
    backbone, corpus = merged(experts, tmp_path / "backbone"), write_corpus(tmp_path / "text")
    way = "down+head_target" if head else "down"
    made = load_causal_lm(
        repaired(backbone, experts[1], corpus, tmp_path / "made", repair=way), dtype=torch.float64
    )
    expected = slow_repair(backbone, experts[1], corpus, head=head)
    before = load_stitched(backbone, experts[1], dtype=torch.float64).state_dict()
    changed = 0
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(made.state_dict()[name], weight, atol=1e-5, rtol=1e-5)
        changed += not torch.allclose(weight, before[name], atol=1e-4)
    assert changed >= 1


@torch.no_grad()
def test_the_drift_that_is_left_is_not_that_of_first_tokens(tmp_path):
    experts = related(tmp_path)
    backbone, corpus = merged(experts, tmp_path / "backbone"), write_corpus(tmp_path / "text")
    out = repaired(backbone, experts[1], corpus, tmp_path / "made")
    texts = paragraphs_of(corpus)
    model = load_stitched(backbone, experts[1], dtype=torch.float64)
    inner, left = map(torch.cat, layer_features(model, 0, texts))
    wanted = torch.cat(layer_features(load_causal_lm(experts[1], dtype=torch.float64), 0, texts)[1])
    half = torch.tensor([h for h, ids in texts for _ in ids])
    is_first = torch.tensor([place == 0 for _, ids in texts for place in range(len(ids))])
    drift = wanted - left
    _, added = slow_solution(inner, drift, half)
    squares = (drift - added).square().sum(1), drift.square().sum(1)
    rest, all_of_it = (
        float(squares[0][of].sum() / squares[1][of].sum()) for of in (~is_first, slice(None))
    )
    found = json.loads((out / REPORT).read_text())[0]["drift"]
    assert found == pytest.approx(rest, rel=1e-6)
    assert abs(rest - all_of_it) > 1e-3


def distances(root: Path, experts: list[Path]) -> dict[str, float]:
    """KL divergence from the first expert, on other text, of what each way leaves."""
    backbone, corpus = merged(experts, root / "backbone"), write_corpus(root / "text", 200)
    batch = torch.stack([ids for _, ids in paragraphs_of(write_corpus(root / "other", 7))])
    found = {"none": load_stitched(backbone, experts[0])}
    for way in ("down", "down+head_target"):
        found[way] = load_causal_lm(repaired(backbone, experts[0], corpus, root / way, repair=way))
    with torch.no_grad():
        own = load_causal_lm(experts[0])(batch).logits.log_softmax(-1)
        gaps = {way: own - model(batch).logits.log_softmax(-1) for way, model in found.items()}
    return {way: float((own.exp() * gap).sum(-1).mean()) for way, gap in gaps.items()}


def test_repair_brings_the_logits_nearer(tmp_path):
    left = distances(tmp_path, related(tmp_path, count=3))
    assert left["down"] < 0.9 * left["none"]


def test_a_head_that_moved_is_answered_in_the_last_layer(tmp_path):
    experts = related(tmp_path, count=3)
    models = [load_causal_lm(expert, dtype=torch.float64) for expert in experts]
    for expert, model in zip(experts[1:], models[1:], strict=True):  # their heads alone differ
        own = model.lm_head.weight
        model.load_state_dict({**models[0].state_dict(), "lm_head.weight": own})
        model.save_pretrained(expert)
    left = distances(tmp_path, experts)
    assert left["down"] == pytest.approx(left["none"], rel=1e-4)
    assert left["down+head_target"] < 0.995 * left["down"]
    assert last_target(tmp_path / "down+head_target") == "head"


@pytest.mark.parametrize("family", BEFORE_FFNS)
def test_an_unmerged_expert_stays_as_it_is(family, tmp_path):
    (expert,) = related(tmp_path, family, count=1)
    backbone, corpus = merged([expert], tmp_path / "backbone"), write_corpus(tmp_path / "text")
    out = repaired(backbone, expert, corpus, tmp_path / "made", repair="down+head_target")
    made, before = load_causal_lm(out).state_dict(), load_causal_lm(expert).state_dict()
    for name, weight in before.items():
        torch.testing.assert_close(made[name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", BEFORE_FFNS)
def test_a_repaired_moe_of_identical_experts_is_the_dense_model(family, tmp_path):
    (expert,) = related(tmp_path, family, count=1)
    backbone, corpus = merged([expert, expert], tmp_path / "bb"), write_corpus(tmp_path / "text")
    domains = {name: repaired(backbone, expert, corpus, tmp_path / name) for name in ("a", "b")}
    routers = random_routers(2, 32, 2, seed=0)
    assemble(domains, backbone, routers, tmp_path / "moe", top_k=2, max_shard_bytes=10**9)
    batch = torch.randint(2, 96, (2, 9))
    with torch.no_grad():
        dense, moe = (load_causal_lm(p)(batch).logits for p in (expert, tmp_path / "moe"))
    torch.testing.assert_close(moe, dense, atol=1e-4, rtol=1e-4)


def test_text_of_few_words_does_not_decide_the_head(tmp_path):
    """Fitted to the logits of twenty tokens, the last layer would spoil all others'."""
    experts = related(tmp_path)
    backbone, corpus = merged(experts, tmp_path / "backbone"), tmp_path / "text"
    draw = np.random.default_rng(0)
    write_split(
        corpus, [(draw.integers(2, 22, 32), 32) for _ in range(24)], eos_id=0, vocabulary_size=96
    )
    made = [
        load_causal_lm(repaired(backbone, experts[0], corpus, tmp_path / way, repair=way))
        for way in ("down", "down+head_target")
    ]
    for name, weight in made[0].state_dict().items():
        assert torch.equal(made[1].state_dict()[name], weight)
    assert last_target(tmp_path / "down+head_target") == "stream"


def last_target(directory: Path) -> str:
    """What the last layer's repair was towards."""
    return json.loads((directory / REPORT).read_text())[-1]["target"]


def test_what_chance_explains_is_not_repaired(tmp_path):
    """Six short documents do not tell the drift from chance."""
    experts = related(tmp_path)
    backbone, corpus = merged(experts, tmp_path / "backbone"), write_corpus(tmp_path / "text", 6)
    config = StatisticsConfig(sequence_length=16, batch_size=3, precision="fp64")
    out = repaired(backbone, experts[0], corpus, tmp_path / "made", config=config)
    report = json.loads((out / REPORT).read_text())
    assert [layer["layer"] for layer in report] == [0, 1]
    assert [(layer["lambda"], layer["drift"]) for layer in report] == [(None, 1)] * 2
    tokens = len(TokenCorpus(corpus).tokens)
    neurons = CheckpointReader(experts[0]).config["intermediate_size"]
    counted = [(layer["tokens"], layer["tokens_a_neuron"]) for layer in report]
    assert counted == [(tokens, tokens / neurons)] * 2
    found, expected = CheckpointReader(out), CheckpointReader(experts[0])
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        assert found.tensor(name).equal(expected.tensor(name))


def test_half_precision_weights_keep_their_type(tmp_path):
    experts = related(tmp_path)
    for expert in experts:
        load_causal_lm(expert, dtype=torch.bfloat16).save_pretrained(expert)
    backbone, corpus = merged(experts, tmp_path / "backbone"), write_corpus(tmp_path / "text")
    config = StatisticsConfig(sequence_length=16, batch_size=3, precision="bf16")
    out = repaired(backbone, experts[0], corpus, tmp_path / "made", config=config)
    assert {info.dtype for info in CheckpointReader(out).tensors.values()} == {torch.bfloat16}
    before = CheckpointReader(experts[0]).tensor("model.layers.0.mlp.down_proj.weight")
    after = CheckpointReader(out).tensor("model.layers.0.mlp.down_proj.weight")
    assert 0 < (after.float() - before.float()).abs().max() < 0.1


def test_too_few_tokens_are_refused_with_the_number_that_is_enough(tmp_path):
    experts = related(tmp_path)
    backbone, corpus = merged(experts, tmp_path / "backbone"), write_corpus(tmp_path / "text", 3)
    with pytest.raises(InputError, match=r"tokens = 64: .*at least 96 calibration tokens"):
        repaired(backbone, experts[0], corpus, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_norms_behind_the_ffn_are_refused(tmp_path):
    experts = related(tmp_path, "olmo2")
    backbone, corpus = merged(experts, tmp_path / "backbone"), write_corpus(tmp_path / "text")
    with pytest.raises(InputError, match="norms behind its FFNs"):
        repaired(backbone, experts[0], corpus, tmp_path / "made")


def test_activations_that_are_not_finite_are_named(tmp_path):
    experts = related(tmp_path)
    model = load_causal_lm(experts[0])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    model.save_pretrained(experts[0])
    backbone, corpus = merged(experts, tmp_path / "backbone"), write_corpus(tmp_path / "text")
    with pytest.raises(InputError, match="layer 1's activations"):
        repaired(backbone, experts[0], corpus, tmp_path / "made")


@pytest.mark.parametrize("repair", ["down", "down+head_target"])
def test_a_token_that_a_pinned_backbone_does_not_know_hinders_no_repair(tmp_path, repair):
    experts = related(tmp_path)
    backbone, corpus = merged(experts, tmp_path / "backbone"), write_corpus(tmp_path / "text")
    narrow = repaired(backbone, experts[0], corpus, tmp_path / "narrow", repair=repair)
    wider = load_causal_lm(experts[0], dtype=torch.float64)
    wider.resize_token_embeddings(wider.config.vocab_size + 3)
    wider.save_pretrained(experts[0])
    out = repaired(backbone, experts[0], corpus, tmp_path / "made", repair=repair)
    # No token of the text is among the three: all is as without them.
    assert (out / REPORT).read_text() == (narrow / REPORT).read_text()
    found, expected = CheckpointReader(out), CheckpointReader(narrow)
    assert found.config == expected.config
    for name in expected.tensors:
        assert torch.equal(found.tensor(name), expected.tensor(name)), name


def test_targets_are_judged_at_every_position_of_a_paragraph():
    """Two of a batch of 16 paragraphs of 32 tokens, as where there are 256 batches."""
    rows = [judged_rows(torch.arange(16 * 32), 2, number) for number in range(256)]
    assert torch.equal(rows[3], judged_rows(torch.arange(16 * 32), 2, 3))
    places = torch.stack(rows).flatten() % 32
    assert places.bincount(minlength=32).min() > 4
    assert len({tuple(own.tolist()) for own in rows}) > 200
    assert judged_rows(torch.tensor([7, 9]), 5, 0).tolist() == [7, 9]


@pytest.mark.parametrize("repair", ["down", "down+head_target"])
def test_a_killed_repair_goes_on_at_its_layer(repair, tmp_path, monkeypatch):
    experts = related(tmp_path, num_hidden_layers=3)
    backbone, corpus = merged(experts, tmp_path / "backbone"), write_corpus(tmp_path / "corpus")
    passed, whole, found = killed_at(
        monkeypatch,
        2,
        lambda out: repaired(backbone, experts[0], corpus, out, repair=repair),
        tmp_path / "out",
    )
    assert passed == [2]
    assert found == whole


def test_another_repair_begins_anew(tmp_path, monkeypatch):
    experts = related(tmp_path)
    backbone, corpus = merged(experts, tmp_path / "backbone"), write_corpus(tmp_path / "corpus")
    calls = iter([{"repair": "down"}, {"repair": "down"}, {"repair": "down+head_target"}])
    passed, *_ = killed_at(
        monkeypatch,
        1,
        lambda o: repaired(backbone, experts[0], corpus, o, **next(calls)),
        tmp_path / "out",
    )
    assert passed == [0, 1]
