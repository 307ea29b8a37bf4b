"""Cross-moments to an aligned checkpoint: what it computes, what it says of itself, the file."""

import json
import sys
from importlib.machinery import ModuleSpec
from itertools import permutations
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.upcycle_core.backbone.rewritten import (
    VARIANTS,
    difference,
    logits,
    pico_reader,
    random_move,
    random_order,
    random_orthogonal,
    rewritten,
)
from tests.upcycle_core.symphony.test_symphony_brought_together import (
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    NEURONS,
    SIZE,
    counted,
    disguised,
    folded,
)
from upcycle_core.activations.cross import CrossMoments, Similarity
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.average import write_average
from upcycle_core.backbone.residual import ResidualMap, residual_map, rotate_residual
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError
from upcycle_core.symphony.align import (
    Alignment,
    LayerAlignment,
    align_layer,
    alignment_facts,
    embedding_rotation,
    load_alignment,
    save_alignment,
    write_aligned,
    write_folded,
)
from upcycle_core.symphony.assignment import Assignment, assign
from upcycle_core.symphony.config import AlignmentConfig

SHARD = 20_000
ALL = AlignmentConfig(heads="match")


def decide(neurons, heads, config=ALL) -> LayerAlignment:
    return align_layer(neurons, heads, config=config, heads_count=HEADS, groups=GROUPS)


def random_alignment(reader: CheckpointReader, *, residual: bool) -> Alignment:
    """Any change that a model survives, made without anything that finds one."""
    size = family_of(reader.config).resolve(reader.config)["head_dim"]
    layers = {}
    for layer in LAYERS:
        order = random_order(NEURONS, layer)
        neurons = Assignment(order=order, aligned=0, before=0.0, after=0.0, dead_anchor=0, dead=0)
        heads = random_move(HEADS, GROUPS, size, layer) if residual else None
        layers[layer] = LayerAlignment(neurons=neurons, heads=heads)
    rotation = random_orthogonal(HIDDEN)
    turned = ResidualMap(rotation=rotation, before=0.0, after=0.0, rank=HIDDEN)
    return Alignment(layers=layers, residual=turned if residual else None)


def counts(x: torch.Tensor, y: torch.Tensor) -> CrossMoments:
    moments = CrossMoments(x.shape[1])
    moments.update(x, y)
    return moments


def test_a_layer_is_found_again_in_its_shuffled_and_turned_copy():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 20, generator=generator)
    shuffle = torch.randperm(20, generator=generator)
    neurons = counts(x, (x + 0.1 * torch.randn(400, 20, generator=generator))[:, shuffle])
    said = torch.randn(400, HEADS, SIZE, generator=generator, dtype=torch.float64)
    move = random_move(HEADS, GROUPS, SIZE, seed=1)
    spread = move.rotations.repeat_interleave(HEADS // GROUPS, 0)
    other = torch.einsum("thn,hnm->thm", said[:, move.queries], spread)
    heads = counts(said.flatten(1), other.flatten(1))
    found = decide(neurons, heads)
    assert torch.equal(found.neurons.order, shuffle.argsort())
    assert torch.equal(move.queries[found.heads.queries], torch.arange(HEADS))
    assert torch.equal(move.groups[found.heads.groups], torch.arange(GROUPS))
    back = move.rotations[found.heads.groups] @ found.heads.rotations
    assert torch.allclose(back, torch.eye(SIZE, dtype=torch.float64), atol=1e-10)
    left = decide(neurons, heads, AlignmentConfig(neurons="none"))
    assert left == LayerAlignment(neurons=None, heads=None)
    half = decide(neurons, None, AlignmentConfig(fraction=0.5))
    assert (half.neurons.aligned, half.heads) == (10, None)


def test_the_measure_is_the_one_that_was_chosen():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(60, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    corresponding = np.corrcoef(x.numpy(), y.numpy(), rowvar=False)[:8, 8:]
    expected = {
        "correlation": corresponding.trace() / 8,
        "cosine": float(torch.nn.functional.cosine_similarity(x, y, dim=0).mean()),
        "l2": -float((x - y).square().mean(0).mean()),
    }
    for kind, before in expected.items():
        found = decide(counts(x, y), None, AlignmentConfig(neurons=kind))
        assert found.neurons.before == pytest.approx(before, abs=1e-9)


def test_moments_that_are_asked_for_and_not_there_or_not_finite_are_refused():
    moments = counts(torch.randn(9, HEADS * SIZE), torch.full((9, HEADS * SIZE), torch.nan))
    with pytest.raises(ValueError, match="'correlation' asks for"):
        decide(None, None)
    with pytest.raises(ValueError, match="'match' asks for"):
        decide(None, None, AlignmentConfig(neurons="none", heads="match"))
    with pytest.raises(ValueError, match=r"9 rows, finite: \[True, False\]"):
        decide(None, moments, AlignmentConfig(neurons="none", heads="match"))


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_neurons_alone_change_no_value_and_no_configuration(tmp_path, family, overrides):
    reader = pico_reader(tmp_path / "model", family, tie_word_embeddings=True, **overrides)
    alignment = random_alignment(reader, residual=False)
    write_aligned(reader.directory, alignment, tmp_path / "out", max_shard_bytes=SHARD)
    out = CheckpointReader(tmp_path / "out")
    assert difference(reader, out) <= 1e-5
    assert out.config == reader.config
    assert list(out.tensors) == list(reader.tensors)
    for name in reader.tensors:
        ours, theirs = (r.tensor(name).flatten().sort().values for r in (reader, out))
        assert torch.equal(ours, theirs)
        assert torch.equal(reader.tensor(name), out.tensor(name)) == (".mlp." not in name)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_a_model_in_another_basis_computes_what_it_computed(tmp_path, family, overrides):
    reader = pico_reader(tmp_path / "model", family, tie_word_embeddings=True, **overrides)
    alignment = random_alignment(reader, residual=True)
    write_aligned(reader.directory, alignment, tmp_path / "out", max_shard_bytes=SHARD)
    write_folded(reader.directory, tmp_path / "folded", max_shard_bytes=SHARD)
    for out in (CheckpointReader(tmp_path / "out"), CheckpointReader(tmp_path / "folded")):
        assert difference(reader, out) <= 1e-4
        assert out.config["tie_word_embeddings"] is False
        scales = [n for n in out.tensors if n.endswith(("layernorm.weight", "model.norm.weight"))]
        assert len(scales) == 2 * len(LAYERS) + 1
        assert all(bool((out.tensor(name) == 1).all()) for name in scales)
        assert {info.dtype for info in out.tensors.values()} == {torch.float32}
    turned = CheckpointReader(tmp_path / "out").tensor("model.embed_tokens.weight")
    expected = reader.tensor("model.embed_tokens.weight").double() @ alignment.residual.rotation
    assert torch.allclose(turned.double(), expected, atol=1e-6)


@pytest.mark.parametrize("by_embeddings", [False, True])
def test_the_average_of_a_model_and_its_aligned_copy_is_the_model(tmp_path, by_embeddings):
    """The anchor is not folded beforehand; the alignment goes through its file."""
    model = pico_reader(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    anchor = folded(model, tmp_path / "anchor")
    stranger = disguised(anchor, tmp_path / "stranger")
    data, every = counted(model, stranger), torch.arange(96)
    residual = residual_map(data.residual)
    if by_embeddings:
        residual = embedding_rotation(model.directory, stranger.directory, (every, every))
    layers = {layer: decide(data.neurons[layer], data.heads[layer]) for layer in LAYERS}
    save_alignment(tmp_path / "found", Alignment(layers=layers, residual=residual))
    found = load_alignment(tmp_path / "found")
    write_aligned(stranger.directory, found, tmp_path / "out", max_shard_bytes=SHARD)
    write_folded(model.directory, tmp_path / "folded", max_shard_bytes=SHARD)
    both = [CheckpointReader(tmp_path / name) for name in ("folded", "out")]
    write_average(both, tmp_path / "average", max_shard_bytes=SHARD)
    average = CheckpointReader(tmp_path / "average")
    assert (logits(average) - logits(model)).abs().max() <= 1e-3
    assert found.residual.after > 0.999 > 0.5 > found.residual.before


def test_tokens_of_two_vocabularies_tell_the_rotation_without_data(tmp_path):
    model = pico_reader(tmp_path / "model", "llama", tie_word_embeddings=True)
    anchor, truth = folded(model, tmp_path / "anchor"), random_orthogonal(HIDDEN, 3)
    turn = rotate_residual(family_of(model.config), truth)
    ids = random_order(96)

    def renumber(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[ids] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor

    stranger = rewritten(anchor, tmp_path / "stranger", [turn, renumber])
    theirs = torch.arange(96)[10:80]
    found = embedding_rotation(model.directory, stranger.directory, (ids[theirs], theirs))
    assert torch.allclose(found.rotation, truth.T, atol=1e-6)
    assert found.rank == HIDDEN
    with pytest.raises(InputError, match=r"symphony.alignment.residual = 'embeddings'.*no token"):
        embedding_rotation(model.directory, stranger.directory, (ids[:0], theirs[:0]))


def test_facts_say_what_became_of_each_layer():
    order = torch.tensor([1, 0, 2, 3])
    numbers = {"aligned": 3, "before": 0.25, "after": 0.5, "dead_anchor": 1, "dead": 2}
    heads = random_move(4, 2, 2, seed=1)  # every head moves
    some = LayerAlignment(neurons=Assignment(order=order, **numbers), heads=None)
    other = LayerAlignment(neurons=None, heads=heads)
    residual = ResidualMap(rotation=random_orthogonal(4), before=0.0, after=0.75, rank=4)
    facts = alignment_facts(Alignment(layers={7: other, 2: some}, residual=residual))
    assert json.loads(json.dumps(facts)) == facts
    moved = {"before": 0.0, "after": 0.0, "moved": 4}
    assert facts == {
        "layers": [
            {"layer": 2, "neurons": {**numbers, "moved": 2}, "heads": None},
            {"layer": 7, "neurons": None, "heads": moved},
        ],
        "residual": {"before": 0.0, "after": 0.75, "rank": 4},
    }
    nothing = Alignment(layers={0: LayerAlignment(neurons=None, heads=None)}, residual=None)
    layers = [{"layer": 0, "neurons": None, "heads": None}]
    assert alignment_facts(nothing) == {"layers": layers, "residual": None}


def test_an_alignment_comes_back_from_its_file(tmp_path):
    reader = pico_reader(tmp_path / "model", "llama")
    alignment = random_alignment(reader, residual=True)
    layers = {
        12: alignment.layers[0],
        1: alignment.layers[1],
        2: LayerAlignment(neurons=None, heads=None),
    }
    whole = Alignment(layers=layers, residual=alignment.residual)
    for name in ("one", "two"):
        save_alignment(tmp_path / name, whole)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    back = load_alignment(tmp_path / "one")
    assert list(back.layers) == [1, 2, 12]
    assert alignment_facts(back) == alignment_facts(whole)
    assert torch.equal(back.residual.rotation, whole.residual.rotation)
    for layer in (1, 12):
        ours, theirs = whole.layers[layer], back.layers[layer]
        assert torch.equal(ours.neurons.order, theirs.neurons.order)
        for part in ("groups", "queries", "rotations"):
            assert torch.equal(getattr(ours.heads, part), getattr(theirs.heads, part))
    save_alignment(tmp_path / "empty", Alignment(layers={}, residual=None))
    assert load_alignment(tmp_path / "empty") == Alignment(layers={}, residual=None)


def test_a_file_of_another_kind_is_refused(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "other", metadata={"statistics": "{}"})
    (tmp_path / "broken").write_bytes(b"...")
    for name, word in (("other", "holds"), ("broken", "make it again"), ("none", "make it again")):
        with pytest.raises(InputError, match=word):
            load_alignment(tmp_path / name)
    assert list(load_file(tmp_path / "other")) == ["x"]


def brute(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    """What lapjv's function promises: the columns, row by row, of a square problem's minimum."""
    assert cost.ndim == 2
    assert cost.shape[0] == cost.shape[1] > 0
    every = range(len(cost))
    best = min(permutations(every), key=lambda p: sum(cost[row, p[row]] for row in every))
    columns = np.array(best, dtype=np.int32)
    return columns, columns.argsort(), None


def alike(seed: int, dead_first: tuple[int, ...], dead_second: tuple[int, ...]) -> Similarity:
    generator = torch.Generator().manual_seed(seed)
    matrix = 2 * torch.rand(6, 6, generator=generator, dtype=torch.float64) - 1.5
    dead = torch.zeros(2, 6, dtype=torch.bool)
    dead[0, list(dead_first)], dead[1, list(dead_second)] = True, True
    return Similarity(matrix=matrix, dead_first=dead[0], dead_second=dead[1])


DEAD = [((), ()), ((2,), (0, 5)), ((0, 3, 4), (1,)), (range(6), (1,)), (range(6), range(6))]


@pytest.mark.parametrize(("ours", "theirs"), DEAD)
def test_the_other_solver_reaches_the_same_total(monkeypatch, ours, theirs):
    package = ModuleType("lapjv")
    package.__spec__, package.lapjv = ModuleSpec("lapjv", None), brute
    monkeypatch.setitem(sys.modules, "lapjv", package)
    for seed in range(3):
        similarity = alike(seed, tuple(ours), tuple(theirs))
        for fraction in (1.0, 0.5):
            first, second = (
                assign(similarity, fraction=fraction, solver=s) for s in ("scipy", "lapjv")
            )
            assert second.order.dtype == torch.int64
            assert torch.equal(first.order, second.order)  # no ties among random numbers
            assert second.after == pytest.approx(first.after, abs=1e-12)


def test_a_solver_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lapjv", None)
    moments = counts(torch.randn(9, 4), torch.randn(9, 4))
    with pytest.raises(InputError, match=r"symphony.alignment.solver = 'lapjv'.*pip install lapjv"):
        decide(moments, None, AlignmentConfig(solver="lapjv"))
