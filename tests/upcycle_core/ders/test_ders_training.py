"""Whole trainings of pico DeRS models with the project's trainer."""

import pytest
import torch

import upcycle_core.ders.model  # noqa: F401  (transformers learns of the architecture)
from tests.pico import VOCABULARY, save_pico
from tests.upcycle_core.training.runs import RandomRows, run, settings
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.upcycle import write_ders_upcycling
from upcycle_core.training.config import MoEObjective
from upcycle_core.training.groups import parts_of

CODECS = {
    "sparse": DersUpcyclingConfig(codec="sparse", drop_rate=0.9, universal="delta"),
    "low-rank": DersUpcyclingConfig(codec="low_rank", rank=4, layers="every-other"),
}
BALANCED = MoEObjective(balance_coefficient=0.01, watch_steps=3)


@pytest.fixture(scope="module", params=list(CODECS))
def upcycled(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_ders_upcycling(
        save_pico(folder / "dense"),
        folder / "model",
        config=CODECS[request.param],
        experts=3,
        top_k=2,
        seed=5,
        max_shard_bytes=10**9,
    )
    return folder / "model"


def tensors(directory):
    reader = CheckpointReader(directory, integers=True)
    return {name: reader.tensor(name) for name in reader.tensors}


class Killed(RandomRows):
    """Rows that cannot be read from row ``until`` on."""

    def __init__(self, count, until):
        super().__init__(count)
        self.until = until

    def __getitem__(self, index):
        if index >= self.until:
            raise ConnectionError("the power went out")
        return super().__getitem__(index)


def test_a_killed_training_ends_with_the_same_bytes(tmp_path, upcycled):
    config = settings(steps=4, checkpoint_steps=2)
    whole = run(tmp_path, upcycled, "whole", config=config, objective=BALANCED)
    with pytest.raises(ConnectionError):
        run(tmp_path, upcycled, config=config, rows=Killed(8, 6), objective=BALANCED)
    assert not (tmp_path / "out").exists()
    again = run(tmp_path, upcycled, config=config, objective=BALANCED)
    for name in ("model.safetensors", "config.json", "checksums.json"):
        expected = (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "out" / name).read_bytes() == expected
    for found, expected in zip(again.curves, whole.curves, strict=True):
        # What rounding leaves: a resumed balance loss is a sum that began elsewhere.
        assert found == pytest.approx(expected, rel=1e-5)
    assert whole.curves[0]["loss/balance"] >= 0.9
    assert "load/layer_0/expert_2" in whole.curves[-1]


def test_a_trained_model_loads_and_has_moved_everywhere(tmp_path, upcycled):
    config = settings(steps=3, learning_rate=1e-2)
    result = run(tmp_path, upcycled, config=config, objective=BALANCED)
    before, after = tensors(upcycled), tensors(tmp_path / "out")
    assert set(before) == set(after)
    for name, old in before.items():
        if name.endswith("indices"):
            assert torch.equal(after[name], old)
            assert after[name].dtype == old.dtype
        else:
            assert not torch.equal(after[name], old), name
    model = load_causal_lm(tmp_path / "out")
    assert result.total_parameters == sum(p.numel() for p in model.parameters())
    assert result.trained_parameters == result.total_parameters
    assert torch.isfinite(model(input_ids=torch.arange(VOCABULARY)[None]).logits).all()


def test_what_is_frozen_stays_bit_for_bit(tmp_path, upcycled):
    """The shared base alone, and the paper's ablation: all but the shared base."""
    parts = parts_of(load_causal_lm(upcycled))
    before = tensors(upcycled)
    for index, trained in enumerate(({"shared_base"}, {"router", "experts", "backbone"})):
        objective = MoEObjective(trainable=tuple(sorted(trained)), balance_coefficient=0.01)
        config = settings(steps=3, learning_rate=1e-2, weight_decay=0.5)
        run(tmp_path, upcycled, str(index), config=config, objective=objective)
        after = tensors(tmp_path / str(index))
        for name, old in before.items():
            part = {"base": "shared_base"}.get(parts.get(name), parts.get(name))
            moves = part in trained
            assert torch.equal(after[name], old) == (not moves), name


def test_gradients_of_sparse_deltas_flow_to_their_values_alone(tmp_path):
    """The same as through a dense delta per expert, picked at the places that have a value."""
    write_ders_upcycling(
        save_pico(tmp_path / "dense"),
        tmp_path / "model",
        config=DersUpcyclingConfig(codec="sparse", drop_rate=0.8),
        experts=3,
        top_k=2,
        seed=5,
        max_shard_bytes=10**9,
    )
    model = load_causal_lm(tmp_path / "model", training=True)
    block = model.model.decoder.layers[0].mlp
    seen = {}
    block.register_forward_hook(lambda _m, args, y: seen.update(x=args[0], y=y))
    ids = torch.arange(40).view(2, 20)
    model(input_ids=ids, labels=ids)
    x = seen["x"].detach().reshape(-1, 32)
    direction = torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (block(x[None])[0] * direction).sum().backward()

    dense = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(block.base, name).weight.detach()
        dense[name] = weight.expand(3, -1, -1).clone().requires_grad_()
    probabilities = (x @ block.gate.weight.detach().T).softmax(-1)
    outputs = []
    for token, row in enumerate(x):
        largest = probabilities[token].topk(2)
        weights = largest.values / largest.values.sum()
        outputs.append(
            sum(
                w * (dense["down_proj"][e] @ (silu(dense["gate_proj"][e] @ row)
                                              * (dense["up_proj"][e] @ row)))
                for w, e in zip(weights, largest.indices.tolist(), strict=True)
            )
        )  # fmt: skip
    (torch.stack(outputs) * direction).sum().backward()
    for name, delta in block.experts.items():
        assert {n for n, _ in delta.named_parameters()} == {"values"}
        places = delta.indices.long()
        expected = dense[name].grad.flatten(1).gather(1, places)
        torch.testing.assert_close(delta.values.grad, expected, atol=1e-5, rtol=1e-4)
        base = getattr(block.base, name).weight
        torch.testing.assert_close(base.grad, dense[name].grad.sum(0), atol=1e-5, rtol=1e-4)


def silu(x):
    return x * torch.sigmoid(x)
