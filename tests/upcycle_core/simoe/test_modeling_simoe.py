import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.func import functional_call
from transformers import AutoConfig

from tests.upcycle_core.simoe.grown import (
    FAMILIES,
    all_masks,
    batch_of,
    dense_config,
    grown,
    merged,
    padded,
    save_dense,
    slow_alpha,
    slow_masks,
    some_ids,
    upcycled,
)
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import SimoeConfig, SimoeForCausalLM, gated_modules
from upcycle_core.simoe.upcycle import upcycle_in_memory

EMBEDDINGS = ("word_embeddings", "embed_tokens", "wte", "wpe")


def logits_of(model, **kwargs):
    with torch.no_grad():
        return model(**kwargs).logits


@pytest.mark.parametrize("routing", ["instance", "token"])
@pytest.mark.parametrize("family", FAMILIES)
def test_before_training_it_is_the_dense_model_to_the_bit(tmp_path, family, routing):
    dense = load_causal_lm(save_dense(tmp_path, family))
    model = upcycled(tmp_path, routing=routing)
    batch = batch_of(some_ids(9, 9), "right")
    labels = batch["input_ids"]
    found, expected = model(**batch, labels=labels), dense(**batch, labels=labels)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    shape = (2, 8) if routing == "instance" else (2, 9, 8)
    assert found.coefficients.shape == shape
    assert torch.allclose(found.coefficients.sum(-1), torch.ones(shape[:-1]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits_of(model, **batch), logits_of(dense, **batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_and_norm_holds_experts(tmp_path, family):
    save_dense(tmp_path, family)
    weights = {
        name.removesuffix(".weight")
        for name, _ in load_causal_lm(tmp_path).named_parameters()
        if name.endswith(".weight") and not any(e in name for e in EMBEDDINGS)
    }
    tied = family in ("gpt2", "falcon")
    assert ("lm_head" in weights) is not tied
    found = set(gated_modules(upcycled(tmp_path, lm_head=True)))
    assert found == {f"model.{name}" for name in weights}
    body = set(gated_modules(upcycled(tmp_path)))
    assert body == found - {"model.lm_head"}
    ffn = set(gated_modules(upcycled(tmp_path, layers="ffn")))
    assert ffn == {name for name in body if ".mlp." in name}
    assert len(ffn) == 4 if family in ("phi", "gpt2", "falcon") else 6


def test_a_tied_head_holds_none(tmp_path):
    save_dense(tmp_path, tie_word_embeddings=True)
    model = upcycled(tmp_path, lm_head=True)
    assert "model.lm_head" not in gated_modules(model)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def check_against_merged(dense_path, model, side, tasks=None, tolerance=1e-5):
    """Three prompts with responses together, and each alone through a model of merged weights."""
    rows, prompts = some_ids(9, 6, 11), [4, 6, 1]
    batch = batch_of(rows, side)
    ignored = [
        torch.where(torch.arange(len(r)) < p, -100, r) for r, p in zip(rows, prompts, strict=True)
    ]
    labels = padded(ignored, side, -100)
    given = {} if tasks is None else {"task_ids": torch.tensor(tasks)}
    together = model(**batch, labels=labels, **given)
    dense, masks = load_causal_lm(dense_path), all_masks(model)
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        if tasks is None:
            alpha = slow_alpha(model, dense, row[:prompt])
        else:
            table = model.router.logits.detach().softmax(-1)
            alpha = table[tasks[index]] if tasks[index] >= 0 else table.mean(0)
        torch.testing.assert_close(together.coefficients[index], alpha, rtol=1e-4, atol=1e-6)
        alone = merged(model, copy.deepcopy(dense), alpha, masks)
        expected = logits_of(alone, input_ids=row[None])[0]
        found = together.logits[index][batch["attention_mask"][index].bool()]
        assert (found - expected).abs().max() < tolerance * expected.abs().max()
        assert (logits_of(dense, input_ids=row[None]) - expected).abs().max() > 0.1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_prompt_runs_through_weights_of_its_own(tmp_path, family, side):
    save_dense(tmp_path, family)
    model = grown(tmp_path, lm_head=True)
    check_against_merged(tmp_path, model, side)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("masks", ["parameters", "real"])
def test_other_masks_are_merged_alike(tmp_path, masks, family):
    save_dense(tmp_path, family)
    check_against_merged(tmp_path, grown(tmp_path, masks=masks, experts=3), "left")


def test_tasks_have_coefficients_of_their_own(tmp_path):
    save_dense(tmp_path)
    model = grown(tmp_path, routing="task", tasks=("add", "sort"))
    check_against_merged(tmp_path, model, "right", tasks=[1, -1, 0])
    batch = batch_of(some_ids(5), "right")
    unseen = model(**batch, task_ids=torch.tensor([-1])).coefficients
    assert torch.equal(model(**batch).coefficients, unseen)
    with pytest.raises(ValueError, match=r"task_ids = None: .*config\.tasks"):
        model.train()(**batch)
    with pytest.raises(InputError, match="tasks"):
        upcycled(tmp_path, routing="task")


@pytest.mark.parametrize("kind", ["linear", "norm", "heads"])
def test_a_layer_of_tokens_computes_the_equation_token_by_token(tmp_path, kind):
    model = grown(save_dense(tmp_path, "qwen3"), routing="token", experts=3)
    layer = model.model.model.layers[0]
    module, shape = {
        "linear": (layer.mlp.down_proj, (2, 5, 48)),
        "norm": (layer.input_layernorm, (2, 5, 32)),
        "heads": (layer.self_attn.q_norm, (2, 5, 4, 8)),
    }[kind]
    x, alpha_BSM = torch.randn(shape), torch.rand(2, 5, 3)
    z_MI = slow_masks(module)
    with torch.no_grad():
        with model.mixture.using(alpha_BSM):
            found = module(x)
        for b in range(2):
            for s in range(5):
                weight = module.base.weight + (alpha_BSM[b, s] @ z_MI) * module.delta
                own = functional_call(module.base, {"weight": weight}, x[b, s])
                torch.testing.assert_close(found[b, s], own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 3, 8), (2, 3, 5, 8), (2, 4, 3, 8)])
def test_tokens_are_told_from_heads_however_they_lie(tmp_path, shape):
    model = grown(save_dense(tmp_path, "qwen3"), routing="token", experts=3)
    norm = model.model.model.layers[0].self_attn.q_norm
    positions = 3
    alpha = torch.rand(2, positions, 3)
    heads = shape[2] if shape[1] == positions else shape[1]
    x = torch.randn(2, positions, heads, 8)
    with torch.no_grad(), model.mixture.using(alpha):
        torch.testing.assert_close(norm(x.transpose(1, 2)), norm(x).transpose(1, 2))


def test_each_tokens_coefficients_come_from_the_frozen_model(tmp_path):
    model = grown(save_dense(tmp_path), routing="token")
    rows, dense = some_ids(7, 4), load_causal_lm(tmp_path)
    found = model(**batch_of(rows, "left")).coefficients
    for index, row in enumerate(rows):
        for length in range(1, len(row) + 1):
            expected = slow_alpha(model, dense, row[:length])
            own = found[index, 7 - len(row) + length - 1]
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


def test_the_prompt_decides_alone_wherever_padding_is(tmp_path):
    model = grown(save_dense(tmp_path))
    rows = some_ids(6, 9, 5)
    prompts = [row[:n] for row, n in zip(rows, (3, 9, 1), strict=True)]
    expected = [model.coefficients(prompt[None]).squeeze(0).detach() for prompt in prompts]
    assert (expected[0] - expected[1]).abs().max() > 0.01
    lengths = torch.tensor([3, 9, 1])
    for side in ("left", "right"):
        batch = batch_of(rows, side)
        labels = [row.clone() for row in rows]
        labels[0][:3] = -100
        labels[0][4:] = -100  # what follows the first label does not matter
        labels[1][:] = -100  # no label: all of it
        # The last row begins with a label: its first token.
        by_labels = model.coefficients(**batch, labels=padded(labels, side, -100))
        by_length = model.coefficients(**batch, prompt_lengths=lengths)
        for index, alpha in enumerate(expected):
            torch.testing.assert_close(by_labels[index], alpha, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(by_length[index], alpha, rtol=1e-4, atol=1e-6)


def test_the_frozen_pass_reads_no_more_than_the_prompts(tmp_path):
    model = grown(save_dense(tmp_path))
    seen = []
    model.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    batch = batch_of(some_ids(9, 9), "right")
    labels = batch["input_ids"].clone()
    labels[0, :2], labels[1, :4] = -100, -100
    model(**batch, labels=labels)
    assert seen == [4, 9]
    model(**batch, coefficients=torch.full((2, 8), 0.125))
    assert seen == [4, 9, 9]


def test_the_frozen_pass_has_no_dropout(tmp_path):
    save_dense(tmp_path, "gpt2")  # 0.1 by default
    model = grown(tmp_path)
    batch = batch_of(some_ids(9, 5), "right")
    expected = model.coefficients(**batch)
    model.train()
    model.model.transformer.h[0].mlp.eval()
    before = [module.training for module in model.modules()]
    assert torch.equal(model.coefficients(**batch), expected)
    assert [module.training for module in model.modules()] == before
    assert model(**batch).logits.ne(model(**batch).logits).any()


def loss_gradients(model, backward=torch.Tensor.backward, **settings):
    batch = batch_of(some_ids(9, 7), "right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :3] = -100
    model.zero_grad()
    backward(model(**batch, labels=labels, use_cache=False, **settings).loss)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("masks", ["neurons", "parameters", "real"])
@pytest.mark.parametrize("routing", ["instance", "token"])
def test_gradients_reach_experts_masks_and_router_alone(tmp_path, masks, routing):
    save_dense(tmp_path, "qwen3")
    model = upcycled(tmp_path, masks=masks, routing=routing, lm_head=True).train()
    trained = ("delta", "log_phi")
    first = loss_gradients(model)  # deltas are zero
    for name, gradient in first.items():
        if name.endswith("delta"):
            assert gradient.abs().max() > 0, name
        elif not name.endswith("log_phi") and not name.startswith("router"):
            assert gradient is None, name
            assert not model.get_parameter(name).requires_grad
        else:
            assert not gradient.any(), name
    for module in gated_modules(model).values():
        module.delta.data.normal_(std=0.1)
    for name, gradient in loss_gradients(model).items():
        reached = name.endswith(trained) or name.startswith("router")
        assert (gradient is not None and bool(gradient.any())) is reached, name


def test_gradients_reach_layers_whose_outputs_are_added_to_in_place(tmp_path):
    """Falcon's blocks add what attention gives to what the FFN gives."""
    model = grown(save_dense(tmp_path, "falcon")).train()
    for name, gradient in loss_gradients(model).items():
        if name.endswith("delta"):
            assert gradient.any(), name


@pytest.mark.parametrize("masks", ["neurons", "parameters"])
@pytest.mark.parametrize("shape", [(2, 3, 32), (6, 32)])
def test_gradients_of_a_layer_are_right(tmp_path, masks, shape):
    model = grown(save_dense(tmp_path), masks=masks, experts=2).double()
    module = model.model.model.layers[0].self_attn.k_proj
    names = {"delta": module.delta, "log_phi": module.log_phi}
    names = {k: v.detach().clone().requires_grad_() for k, v in names.items()}
    if masks == "parameters":
        names["log_phi"] = torch.full((2, 16, 32), 0.3, dtype=torch.float64, requires_grad=True)
    else:
        names["log_phi"].data.clamp_(-1.5, 1.5)  # finite differences do not straddle a clamp
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    alpha = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)

    def run(x, alpha, delta, log_phi):
        with model.mixture.using(alpha):
            return functional_call(module, {"delta": delta, "log_phi": log_phi}, (x,))

    assert torch.autograd.gradcheck(run, (x, alpha, *names.values()), fast_mode=True)


@pytest.mark.parametrize("routing", ["instance", "token"])
def test_gradient_checkpointing_gives_the_same_gradients(tmp_path, routing):
    model = grown(save_dense(tmp_path), routing=routing).train()
    plain = loss_gradients(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    again = copy.deepcopy(model)
    for checkpointed in (model, again):  # a copy computes with its own coefficients
        found = loss_gradients(checkpointed)
        for name, gradient in plain.items():
            assert (gradient is None and found[name] is None) or torch.equal(gradient, found[name])
    with pytest.raises(ValueError, match="use_reentrant = True"):
        model.activation_checkpointing_enable({"use_reentrant": True})


def test_a_block_is_computed_again_in_the_thread_of_the_backward_pass(tmp_path):
    """A GPU's is not the one that ran the model."""
    model = grown(save_dense(tmp_path)).train()
    plain = loss_gradients(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    with ThreadPoolExecutor(1) as thread:
        found = loss_gradients(model, backward=lambda loss: thread.submit(loss.backward).result())
    for name, gradient in plain.items():
        assert gradient is None or torch.equal(gradient, found[name])


def test_half_precision_stays_close(tmp_path):
    model = grown(save_dense(tmp_path, "qwen3")).train()
    exact = loss_gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_gradients(model)
    for name, gradient in exact.items():
        if gradient is not None:
            assert found[name].dtype == torch.float32
            away = (found[name] - gradient).norm() / gradient.norm()
            assert away < 0.1, (name, away)  # bf16 has 3 digits, and errors add up over layers


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_it_is_the_same(tmp_path, tied):
    save_dense(tmp_path / "dense", tie_word_embeddings=tied)
    model = grown(tmp_path / "dense", lm_head=True)
    model.save_pretrained(tmp_path / "model")
    batch = batch_of(some_ids(6, 4), "left")
    again = load_causal_lm(tmp_path / "model")
    assert isinstance(again, SimoeForCausalLM)
    assert torch.equal(logits_of(again, **batch), logits_of(model, **batch))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n, p in again.named_parameters() if p.requires_grad} == trained
    half = load_causal_lm(tmp_path / "model", dtype=torch.bfloat16)
    for name, tensor in half.state_dict().items():
        assert tensor.dtype == (torch.float32 if "log_phi" in name else torch.bfloat16)
    assert torch.isfinite(logits_of(half, **batch)).all()
    copied = copy.deepcopy(model)
    assert torch.equal(logits_of(copied, **batch), logits_of(model, **batch))
    recorded = json.loads((tmp_path / "model" / "checksums.json").read_text())
    assert set(recorded) == {"config.json", "model.safetensors"}
    config = (tmp_path / "model" / "config.json").read_text()
    (tmp_path / "model" / "config.json").write_text(config + "\n")
    with pytest.raises(ValueError, match=r"config\.json: was altered"):
        load_causal_lm(tmp_path / "model")


def test_seed_decides_masks_and_router(tmp_path):
    save_dense(tmp_path)
    draws = [
        upcycle_in_memory(
            tmp_path, SimoeUpcyclingConfig(initial_spread=0.05), seed=seed
        ).state_dict()
        for seed in (1, 1, 2)
    ]
    drawn = {n for n in draws[0] if n.endswith("log_phi") or ("router" in n and "weight" in n)}
    for name, tensor in draws[0].items():
        assert torch.equal(tensor, draws[1][name])
        assert torch.equal(tensor, draws[2][name]) is (name not in drawn)
    log_phi = torch.cat([t.flatten() for n, t in draws[0].items() if n.endswith("log_phi")])
    assert abs(log_phi.mean() - 1.3458) < 0.002
    assert abs(log_phi.std() - 0.05) < 0.002
    both = [t for n, t in draws[0].items() if n.endswith("log_phi") and len(t.flatten()) == 256]
    assert not torch.equal(both[0], both[1])


def test_bad_input_is_said(tmp_path):
    model = grown(save_dense(tmp_path))
    batch = batch_of(some_ids(4), "left")
    for whole in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="call the whole model"):
            whole.model(**batch)
    with pytest.raises(ValueError, match=r"(?s)masks = 'rows'.*num_simoe_experts = 1"):
        SimoeConfig(dense=dense_config("llama"), masks="rows", num_simoe_experts=1)
    with pytest.raises(ValueError, match="kept"):
        SimoeForCausalLM(SimoeConfig(dense=dense_config("llama"), kept={"model.lm_head": 3}))


def test_the_configuration_reads_the_dense_one(tmp_path):
    config = SimoeConfig(dense=dense_config("llama"), routing="task", tasks=["a", "b"])
    assert (config.hidden_size, config.eos_token_id, config.num_hidden_layers) == (32, 0, 2)
    assert not hasattr(config, "no_such_field")
    assert not hasattr(config, "num_experts")
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, SimoeConfig)
    assert again.to_dict() == {**config.to_dict(), "_name_or_path": str(tmp_path)}
    assert "ders" not in "".join(m for m in sys.modules if m.startswith("upcycle_core.simoe"))


def test_a_file_tells_no_place_of_this_machine(tmp_path):
    upcycled(save_dense(tmp_path / "dense")).save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").glob("*.json"):
        assert str(tmp_path) not in file.read_text(), file.name
