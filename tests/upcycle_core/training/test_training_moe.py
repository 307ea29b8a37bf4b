"""Whole trainings of pico Mixtures-of-Experts, against plain loops."""

import json
import math
import shutil

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import join
from tests.upcycle_core.training.runs import (
    LENGTH,
    AnswerRows,
    RandomRows,
    Recorder,
    run,
    settings,
    weights,
)
from upcycle_core.errors import InputError
from upcycle_core.training.causal_trainer import CausalTrainer
from upcycle_core.training.config import MoEObjective


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return join(tmp_path_factory.mktemp("mixtral"), top_k=2, tie_word_embeddings=True).model


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return join(tmp_path_factory.mktemp("qwen"), "qwen2", top_k=2).model


def slow_terms(model, inputs, mask):
    """Balance and z-loss of a forward pass of the router weights on their inputs, in loops."""
    balances, zs = [], []
    for layer, states in zip(model.model.layers, inputs, strict=True):
        logits = functional.linear(states.reshape(-1, states.shape[-1]), layer.mlp.gate.weight)
        logits = logits[mask.reshape(-1).bool()]
        chosen = logits.topk(2).indices
        share = torch.stack([(chosen == e).sum() / chosen.numel() for e in range(3)])
        balances.append(
            3 * sum(share[e] * torch.softmax(logits, -1)[:, e].mean() for e in (0, 1, 2))
        )
        zs.append((logits.exp().sum(-1).log() ** 2).mean())
    return sum(balances) / len(balances), sum(zs) / len(zs)


def plain_loop(source, rows, config, objective):
    """The same training with torch alone; every step's (text, balance, z) losses."""
    model = AutoModelForCausalLM.from_pretrained(source, experts_implementation="eager").train()
    inputs = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim != 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), foreach=False)
    losses = []
    for step in range(config.steps):
        batches = []
        for micro in range(config.gradient_accumulation):
            first = (step * config.gradient_accumulation + micro) * config.batch_size
            batches.append([as_dict(rows[first + i]) for i in range(config.batch_size)])
        count = sum((row["labels"][1:] != -100).sum() for batch in batches for row in batch)
        sums = torch.zeros(3)
        for batch in batches:
            ids, labels, mask = (
                torch.stack([row[key] for row in batch])
                for key in ("input_ids", "labels", "attention_mask")
            )
            inputs.clear()
            logits = model(input_ids=ids, attention_mask=mask).logits
            text = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            terms = [term / len(batches) for term in slow_terms(model, inputs, mask)]
            loss = text / count + objective.balance_coefficient * terms[0]
            (loss + objective.z_coefficient * terms[1]).backward()
            sums += torch.stack([text / count, *terms]).detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sums.tolist())
    return model, losses


def as_dict(row):
    if isinstance(row, dict):
        return row
    return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


@pytest.mark.parametrize("rows", [RandomRows(24), AnswerRows(24)], ids=["plain", "answers"])
@pytest.mark.parametrize("family", ["mixtral", "qwen"])
def test_a_training_equals_a_plain_loop_with_torch_alone(tmp_path, family, rows, request):
    source = request.getfixturevalue(family)
    config = settings(gradient_accumulation=2)
    objective = MoEObjective(balance_coefficient=0.3, z_coefficient=0.1)
    recorder = Recorder()
    result = run(tmp_path, source, config=config, rows=rows, objective=objective, progress=recorder)
    model, losses = plain_loop(source, rows, config, objective)
    trained = weights(tmp_path / "out")
    for name, expected in model.named_parameters():
        # fp32 sums in another order; Adam blows rounding up where a gradient is near zero.
        torch.testing.assert_close(trained[name], expected.data, atol=2e-5, rtol=0)
    for point, expected in zip(recorder.points, losses, strict=True):
        found = [point[key] for key in ("loss", "loss/balance", "loss/z")]
        assert found == pytest.approx(expected, rel=1e-4)
    assert result.final_loss == recorder.points[-1]["loss"]
    assert result.trained_parameters == result.total_parameters


def test_without_coefficients_the_losses_are_logged_but_train_nothing(tmp_path, mixtral):
    result = run(tmp_path, mixtral, "watched", objective=MoEObjective())
    run(tmp_path, mixtral, "plain")
    for name in ("model.safetensors", "config.json"):
        watched, plain = (tmp_path / run_ / name for run_ in ("watched", "plain"))
        assert watched.read_bytes() == plain.read_bytes()
    assert result.curves[0]["loss/balance"] > 0
    assert result.curves[0]["loss/z"] > 0


def test_transformers_own_balance_loss_is_never_added(tmp_path, mixtral):
    noisy = shutil.copytree(mixtral, tmp_path / "noisy")
    config = json.loads((noisy / "config.json").read_text())
    config |= {"output_router_logits": True, "router_aux_loss_coef": 10.0}
    (noisy / "config.json").write_text(json.dumps(config))
    run(tmp_path, noisy, "a")
    run(tmp_path, mixtral, "b")
    a, b = (tmp_path / name / "model.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_recomputing_activations_changes_nothing(tmp_path, qwen):
    objective = MoEObjective(balance_coefficient=0.3, z_coefficient=0.1)
    for name, recompute in (("kept", False), ("recomputed", True)):
        config = settings(gradient_checkpointing=recompute)
        run(tmp_path, qwen, name, config=config, objective=objective)
    kept, recomputed = (tmp_path / n / "model.safetensors" for n in ("kept", "recomputed"))
    assert kept.read_bytes() == recomputed.read_bytes()


@pytest.mark.parametrize("family", ["mixtral", "qwen"])
@pytest.mark.parametrize("group", ["router", "experts", "backbone", "expert_gates"])
def test_what_is_frozen_stays_bit_for_bit(tmp_path, family, group, request):
    source = request.getfixturevalue(family)
    config = settings(weight_decay=0.5, learning_rate=1e-2)
    objective = MoEObjective(trainable=(group,), balance_coefficient=0.1)
    result = run(tmp_path, source, config=config, objective=objective)
    before, after = weights(source), weights(tmp_path / "out")
    trained = 0
    for name, old in before.items():
        new = after[name]
        if group == "expert_gates" and name.endswith("gate_up_proj"):
            assert torch.equal(new[:, 64:], old[:, 64:]), name
            old, new = old[:, :64], new[:, :64]
            moves = True
        else:
            place = (
                "router" if ".gate." in name else "experts" if ".experts." in name else "backbone"
            )
            moves = place == group
        if not moves:
            assert torch.equal(old, new), name
        elif old.any():  # Qwen2Moe's shared expert is zero, and zero is where it stays
            assert (old - new).abs().max() > 1e-4, name
        trained += old.numel() if moves else 0
    assert result.trained_parameters == trained
    assert result.total_parameters == sum(tensor.numel() for tensor in before.values())


def test_a_finished_training_says_the_same_again(tmp_path, mixtral, monkeypatch):
    objective = MoEObjective(trainable=("router",), watch_steps=2)
    first = run(tmp_path, mixtral, objective=objective)
    expected = (tmp_path / "out" / "model.safetensors").read_bytes()
    (tmp_path / "out" / "model.safetensors").unlink()
    monkeypatch.setattr(CausalTrainer, "compute_loss", None)
    assert run(tmp_path, mixtral, objective=objective) == first
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected


def test_points_of_the_watch_equal_plain_loops(tmp_path, mixtral):
    config = settings(steps=5, gradient_accumulation=2, max_gradient_norm=1e-3, log_steps=4)
    rows = AnswerRows(20)
    objective = MoEObjective(trainable=("router", "backbone"), watch_steps=3)
    recorder = Recorder()
    result = run(
        tmp_path, mixtral, config=config, rows=rows, objective=objective, progress=recorder
    )
    points = [point for point in result.curves if "load/layer_0/expert_0" in point]
    assert [point["step"] for point in points] == [3, 5]
    assert [point["step"] for point in result.curves] == [1, 3, 4, 5]
    steps = replay(mixtral, rows, config)
    for point, covered in zip(points, (steps[:3], steps[3:]), strict=True):
        for layer in (0, 1):
            shares = [point[f"load/layer_{layer}/expert_{e}"] for e in range(3)]
            counts = sum(step["counts"][layer] for step in covered)
            assert shares == pytest.approx((counts / counts.sum()).tolist())
            entropy = torch.cat([step["entropy"][layer] for step in covered]).mean().item()
            # Weights of later steps differ by rounding alone.
            assert point[f"router_entropy/layer_{layer}"] == pytest.approx(entropy, rel=1e-4)
            norm = covered[-1]["norms"][layer]
            assert point[f"gradient_norm/layer_{layer}"] == pytest.approx(norm, rel=1e-3)
            assert point[f"gradient_norm/layer_{layer}"] > 100 * config.max_gradient_norm
    reported = [point for point in recorder.points if "load/layer_1/expert_2" in point]
    for told, kept in zip(reported, points, strict=True):
        assert {key: told[key] for key in kept} == kept


def replay(source, rows, config):
    """Counts, entropies and gradient norms of each step of the training, slowly."""
    model = AutoModelForCausalLM.from_pretrained(source, experts_implementation="eager").train()
    seen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output: seen.append(output))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    free = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in free if p.ndim != 1], "weight_decay": 0.1},
        {"params": [p for p in free if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), foreach=False)
    steps = []
    for step in range(config.steps):
        batches = [[rows[4 * step + 2 * micro + i] for i in range(2)] for micro in range(2)]
        count = sum((row["labels"][1:] != -100).sum() for batch in batches for row in batch)
        found = {"counts": [torch.zeros(3)] * 2, "entropy": [torch.zeros(0)] * 2}
        for batch in batches:
            stacked = {key: torch.stack([row[key] for row in batch]) for key in batch[0]}
            seen.clear()
            model(**stacked, num_items_in_batch=count).loss.backward()
            real = stacked["attention_mask"].reshape(-1).bool()
            for layer, (logits, _, chosen) in enumerate(seen):
                p = torch.softmax(logits[real].detach().double(), -1)
                found["entropy"][layer] = torch.cat(
                    [found["entropy"][layer], -(p * p.log()).sum(-1)]
                )
                hits = torch.stack([(chosen[real] == e).sum() for e in range(3)])
                found["counts"][layer] = found["counts"][layer] + hits
        found["norms"] = [
            math.sqrt(
                sum(
                    float((p.grad.double() ** 2).sum())
                    for p in layer.parameters()
                    if p.grad is not None
                )
            )
            for layer in model.model.layers
        ]
        torch.nn.utils.clip_grad_norm_(free, config.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(found)
    return steps


def test_a_dense_model_with_an_objective_is_watched_for_gradients_alone(tmp_path):
    source = save_pico(tmp_path / "dense")
    result = run(tmp_path, source, objective=MoEObjective(watch_steps=3))
    point = next(point for point in result.curves if point["step"] == 3)
    watched = {key for key in point if "/" in key}
    assert watched == {"gradient_norm/layer_0", "gradient_norm/layer_1"}


def test_bad_objectives_are_refused_before_weights_are_read(tmp_path, mixtral):
    bare = shutil.copytree(mixtral, tmp_path / "bare")
    for path in bare.glob("*.safetensors"):
        path.unlink()
    config = json.loads((bare / "config.json").read_text())
    for k, objective, message in (
        (1, MoEObjective(trainable=("router",)), "no gradient"),
        (1, None, "no gradient"),
        (7, MoEObjective(), "1 to 3, the number of experts"),
        (2, MoEObjective(trainable=("routers",)), "no such group"),
    ):
        (bare / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": k}))
        with pytest.raises(InputError, match=message):
            run(tmp_path, bare, objective=objective)
    (bare / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    # Nothing is wrong but the missing weights.
    with pytest.raises(InputError, match=r"neither model\.safetensors"):
        run(tmp_path, bare, objective=MoEObjective(trainable=("experts", "backbone")))


def test_a_step_without_a_label_is_refused(tmp_path, mixtral):
    class Mute(RandomRows):
        def __getitem__(self, index):
            ids = super().__getitem__(index)
            silent = torch.full((LENGTH,), -100)
            return {"input_ids": ids, "labels": silent if index >= 4 else ids}

    with pytest.raises(InputError, match=r"rows of step 3.*no label"):
        run(tmp_path, mixtral, rows=Mute(12))
