"""Experts of a MoE and dense models compared on text, against each of them run by hand."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, silu

from tests.pico import save_pico
from tests.upcycle_core.activations.test_activations_pairs import same_tokens
from tests.upcycle_core.evaluation.similarity import naive_cka
from tests.upcycle_core.moe.joined import WIDTH, join
from upcycle_core.activations.pairs import PairedBatch
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.errors import InputError
from upcycle_core.evaluation.similarity import measure
from upcycle_core.evaluation.similarity.measure import (
    PairSimilarity,
    SimilarityConfig,
    dense_similarity,
    moe_similarity,
    split_batches,
)

LENGTHS = ((9, 31, 12), (17, 24))
CONFIG = SimilarityConfig(sequence_length=16, batch_size=3)
NAMES = ("law", "medicine", "code")
CLOSE = 2e-5  # fp32 forward passes and products; the oracle multiplies in fp64
Features = dict[tuple[int, str], list[torch.Tensor]]


def texts() -> list[list[np.ndarray]]:
    generator = np.random.default_rng(0)
    return [[generator.integers(2, 96, length) for length in lengths] for lengths in LENGTHS]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("text") / "split" for _ in LENGTHS]
    for folder, documents in zip(folders, texts(), strict=True):
        stored = [(document.tolist(), len(document)) for document in documents]
        write_split(folder, stored, eos_id=0, vocabulary_size=96)
    return folders


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def moe(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, join(folder, request.param, top_k=2).model


def pieces() -> list[torch.Tensor]:
    """Every paragraph of the text [1, S], cut by hand; what is shorter than 8 is left out."""
    cut = [d[s : s + 16] for documents in texts() for d in documents for s in range(0, len(d), 16)]
    return [torch.tensor(piece)[None] for piece in cut if len(piece) >= 8]


@torch.no_grad()
def by_hand(family: str, path: Path) -> Features:
    """Every expert's features from its tensors on disk, a paragraph at a time, unpadded."""
    model: Any = load_causal_lm(path).base_model
    reader, target = CheckpointReader(path), FAMILIES[family].target
    read: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for index, layer in enumerate(model.layers):
        keep = read[index].append
        layer.mlp.gate.register_forward_pre_hook(lambda _m, x, keep=keep: keep(x[0]))
    for piece in pieces():
        model(input_ids=piece, use_cache=False)
    found: Features = {}
    for layer, parts in read.items():
        x_TH = torch.cat(parts)
        for expert in range(3):
            gate, up, down = (reader.tensor(name) for name in target.expert_ffn(layer, expert))
            neurons = silu(linear(x_TH, gate)) * linear(x_TH, up)
            found.setdefault((layer, "neurons"), []).append(neurons)
            found.setdefault((layer, "outputs"), []).append(linear(neurons, down))
    return found


def check(pairs: Sequence[PairSimilarity], features: Features, names: Sequence[str]) -> None:
    """Every pair of every layer and representation is there and is what the features give."""
    found = {(p.layer, p.representation, p.first, p.second): p for p in pairs}
    assert len(found) == len(pairs) == len(features) * len(names) * (len(names) - 1) // 2
    for (layer, representation), streams in features.items():
        for first, second in combinations(range(len(names)), 2):
            pair = found[layer, representation, names[first], names[second]]
            x, y = streams[first], streams[second]
            assert (pair.rows, pair.features) == x.shape
            assert pair.cka == pytest.approx(naive_cka.cka(x, y), abs=CLOSE)
            assert pair.matched == pytest.approx(naive_cka.matched(x, y), abs=CLOSE)
            assert pair.best is not None
            assert pair.best >= pair.matched


def test_every_expert_is_applied_to_the_input_of_its_layer(moe, corpora):
    family, path = moe
    found = moe_similarity(path, corpora, NAMES, config=CONFIG)
    check(found, by_hand(family, path), NAMES)
    assert {pair.rows for pair in found} == {sum(piece.numel() for piece in pieces())}
    assert all(0.01 < pair.cka < 0.99 for pair in found)


def test_other_batches_give_the_same(moe, corpora):
    _, path = moe
    whole = moe_similarity(path, corpora, NAMES, config=CONFIG)
    single = SimilarityConfig(sequence_length=16, batch_size=1)
    alone = moe_similarity(path, corpora, NAMES, config=single)
    for pair, other in zip(whole, alone, strict=True):
        assert (pair.layer, pair.first, pair.second) == (other.layer, other.first, other.second)
        assert pair.cka == pytest.approx(other.cka, abs=CLOSE)


def test_permuted_experts_have_the_same_cka_before_and_after_the_same_training(tmp_path, corpora):
    """What the page says of Figure 3: nothing but rounding tells the two models apart."""
    models = [load_causal_lm(join(tmp_path, top_k=2).model).double() for _ in range(2)]
    permute_experts(models[1])
    found = {}
    for stage in ("before", "after"):
        for index, model in enumerate(models):
            model.save_pretrained(tmp_path / stage / str(index))
            found[stage, index] = moe_similarity(
                tmp_path / stage / str(index), corpora, NAMES, config=CONFIG
            )
            train(model)
        for pair, other in zip(found[stage, 0], found[stage, 1], strict=True):
            assert pair.cka == pytest.approx(other.cka, abs=CLOSE)
            assert pair.best == pytest.approx(other.best, abs=CLOSE)
            if pair.representation == "outputs":
                assert pair.matched == pytest.approx(other.matched, abs=CLOSE)
        both = zip(found[stage, 0], found[stage, 1], strict=True)
        assert max(abs(pair.matched - other.matched) for pair, other in both) > 0.01
    assert found["after", 0][0].cka != pytest.approx(found["before", 0][0].cka, abs=0.01)


@torch.no_grad()
def permute_experts(model: Any) -> None:
    """Put the neurons of the second and third expert of every layer in random orders."""
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for expert in (1, 2):
            order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(expert))
            gate_and_up = torch.cat([order, order + WIDTH])
            experts.gate_up_proj[expert] = experts.gate_up_proj[expert][gate_and_up]
            experts.down_proj[expert] = experts.down_proj[expert][:, order]


def train(model: Any) -> None:
    """A few steps with everything trainable, the balance loss and a clipped gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for piece in pieces()[:4]:
        loss = model(input_ids=piece, labels=piece, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def mlp_features(path: Path, inputs: list[torch.Tensor], skip: int) -> Features:
    """A dense model's features on unpadded texts, without the first ``skip`` positions of each."""
    model: Any = load_causal_lm(path).base_model
    read: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for index, layer in enumerate(model.layers):
        keep = read[index].append
        layer.mlp.register_forward_pre_hook(lambda _m, x, keep=keep: keep(x[0][0, skip:]))
    found: Features = {}
    with torch.no_grad():
        for ids in inputs:
            model(input_ids=ids, use_cache=False)
        for index, layer in enumerate(model.layers):
            x_TH, mlp = torch.cat(read[index]), layer.mlp
            neurons = silu(mlp.gate_proj(x_TH)) * mlp.up_proj(x_TH)
            found[index, "neurons"], found[index, "outputs"] = [neurons], [mlp.down_proj(neurons)]
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dense_models_read_their_own_ids_and_states(family, tmp_path):
    """The second model has two tokens more in front of every text: its rows are others."""
    paths = {f"m{i}": save_pico(tmp_path / f"{i}", family, seed=i) for i in range(2)}
    short = [piece[:, :8] for piece in pieces()[:2]] + [piece[:, :5] for piece in pieces()[2:4]]
    long = [torch.cat([torch.tensor([[7, 8]]), 95 - ids], 1) for ids in short]
    given, rows = [], []
    for ids, skip in ((short, 0), (long, 2)):
        size = max(piece.shape[1] for piece in ids)
        padded = [torch.nn.functional.pad(piece, (0, size - piece.shape[1])) for piece in ids]
        mask = torch.cat([(torch.arange(size) < piece.shape[1])[None] for piece in ids]).long()
        given.append((torch.cat(padded), mask))
        kept = mask.clone()
        kept[:, :skip] = 0
        rows.append(kept.flatten().nonzero()[:, 0])
    (first_ids, first_mask), (second_ids, second_mask) = given
    batch = PairedBatch(
        first_ids=first_ids,
        first_mask=first_mask,
        second_ids=second_ids,
        second_mask=second_mask,
        first_rows=rows[0],
        second_rows=rows[1],
    )
    found = dense_similarity(paths, [batch], config=CONFIG)
    first, second = mlp_features(paths["m0"], short, 0), mlp_features(paths["m1"], long, 2)
    check(found, {key: first[key] + second[key] for key in first}, list(paths))


def test_dense_models_of_one_vocabulary_read_a_split(tmp_path, corpora):
    paths = {f"m{i}": save_pico(tmp_path / f"{i}", seed=i) for i in range(2)}
    batches = [
        same_tokens(batch.input_ids, batch.attention_mask)
        for batch in split_batches(corpora, CONFIG)
    ]
    assert any(not batch.first_mask.all() for batch in batches)
    found = dense_similarity(paths, batches, config=CONFIG)
    alone = [mlp_features(path, pieces(), 0) for path in paths.values()]
    check(found, {key: [f[key][0] for f in alone] for key in alone[0]}, list(paths))


def test_what_cannot_be_compared_is_refused(moe, corpora, tmp_path):
    _, path = moe
    dense = save_pico(tmp_path / "dense")
    wide = save_pico(tmp_path / "wide", intermediate_size=64)
    with pytest.raises(InputError, match="no layer of fused experts"):
        moe_similarity(dense, corpora, NAMES, config=CONFIG)
    with pytest.raises(InputError, match=r"names .* 3 experts"):
        moe_similarity(path, corpora, NAMES[:2], config=CONFIG)
    with pytest.raises(InputError, match=r"b\.intermediate_size = 64"):
        dense_similarity({"a": dense, "b": wide}, [], config=CONFIG)
    with pytest.raises(InputError, match="no position"):
        dense_similarity({"a": dense, "b": dense}, [], config=CONFIG)
    write_split(tmp_path / "empty", [([5] * 3, 3)], eos_id=0, vocabulary_size=96)
    with pytest.raises(InputError, match="no paragraph"):
        moe_similarity(path, [*corpora, tmp_path / "empty"], NAMES, config=CONFIG)


def test_features_that_are_not_finite_name_layer_and_expert(moe, corpora, monkeypatch):
    _, path = moe
    model = load_causal_lm(path)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 0, 0] = torch.nan
    monkeypatch.setattr(measure, "load_causal_lm", lambda *_args, **_options: model)
    with pytest.raises(InputError, match=r"^features.1.outputs = 'code': not finite[^\n]*$"):
        moe_similarity(path, corpora, NAMES, config=CONFIG)
