import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.upcycle_core.moe.joined import join
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.training.losses import (
    Routing,
    balance_loss,
    expert_counts,
    record_routers,
    z_loss,
)

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "ernie4_5"])


def random_routing(layers=3, tokens=17, experts=5, k=2, masked=()):
    generator = torch.Generator().manual_seed(3)
    logits = [
        torch.randn(tokens, experts, generator=generator, dtype=torch.float64).mul_(2)
        for _ in range(layers)
    ]
    mask = None
    if masked:
        mask = torch.ones(tokens, dtype=torch.bool)
        mask[list(masked)] = False
    return Routing(logits, [layer.topk(k).indices for layer in logits], mask)


def slow_balance(routing):
    """Switch Transformer eq. 4-6 in plain loops."""
    layers = []
    for logits, chosen in zip(routing.logits, routing.experts, strict=True):
        tokens = [t for t in range(len(logits)) if routing.mask is None or routing.mask[t]]
        count = logits.shape[1]
        total = 0.0
        for expert in range(count):
            hits = sum(1 for t in tokens for e in chosen[t].tolist() if e == expert)
            share = hits / (len(tokens) * chosen.shape[1])
            probability = 0.0
            for t in tokens:
                exponentials = [math.exp(x) for x in logits[t].tolist()]
                probability += exponentials[expert] / sum(exponentials) / len(tokens)
            total += share * probability
        layers.append(count * total)
    return sum(layers) / len(layers)


def slow_z(routing):
    """ST-MoE eq. 5 in plain loops."""
    layers = []
    for logits in routing.logits:
        tokens = [t for t in range(len(logits)) if routing.mask is None or routing.mask[t]]
        squares = [math.log(sum(math.exp(x) for x in logits[t].tolist())) ** 2 for t in tokens]
        layers.append(sum(squares) / len(squares))
    return sum(layers) / len(layers)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("masked", [(), (0, 4, 16)])
def test_both_losses_equal_plain_loops(k, masked):
    routing = random_routing(k=k, masked=masked)
    # fp64 both; sums in another order.
    assert balance_loss(routing).item() == pytest.approx(slow_balance(routing), rel=1e-12)
    assert z_loss(routing).item() == pytest.approx(slow_z(routing), rel=1e-12)


def test_padding_changes_neither_loss():
    plain = random_routing(tokens=9)
    padded = Routing(
        [torch.cat([layer, torch.full((4, 5), 7.0)]) for layer in plain.logits],
        [torch.cat([layer, torch.zeros(4, 2, dtype=torch.int64)]) for layer in plain.experts],
        torch.arange(13) < 9,
    )
    torch.testing.assert_close(balance_loss(padded), balance_loss(plain))
    torch.testing.assert_close(z_loss(padded), z_loss(plain))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_uniform_router_has_balance_one_for_every_k(k):
    turns = (torch.arange(20)[:, None] + torch.arange(k)) % 4  # every expert equally often
    routing = Routing([torch.zeros(20, 4)], [turns])
    assert balance_loss(routing).item() == pytest.approx(1.0, abs=1e-6)


def test_opposite_collapses_in_two_layers_do_not_cancel():
    left = torch.tensor([[9.0, -9.0]]).repeat(8, 1)
    collapsed = Routing([left, -left], [left.topk(1).indices, (-left).topk(1).indices])
    assert balance_loss(collapsed).item() == pytest.approx(2.0, abs=1e-4)
    pooled = Routing([torch.cat(collapsed.logits)], [torch.cat(collapsed.experts)])
    assert balance_loss(pooled).item() == pytest.approx(1.0, abs=1e-4)  # what must not happen


def test_gradients_equal_those_of_the_formula():
    routing = random_routing(layers=1, masked=(2,))
    logits = routing.logits[0].requires_grad_()
    balance_loss(routing).backward()
    found, logits.grad = logits.grad, None
    kept = [t for t in range(17) if t != 2]
    share = torch.zeros(5, dtype=torch.float64)
    for t in kept:
        for expert in routing.experts[0][t].tolist():
            share[expert] += 1 / 32
    (5 * (share * torch.softmax(logits[kept], -1).mean(0)).sum()).backward()
    torch.testing.assert_close(found, logits.grad)


def test_sixteen_bit_logits_are_summed_in_fp32():
    routing = random_routing(tokens=1000)
    coarse = Routing([layer.bfloat16() for layer in routing.logits], routing.experts)
    assert balance_loss(coarse).dtype == z_loss(coarse).dtype == torch.float32
    exact = Routing([layer.bfloat16().double() for layer in routing.logits], routing.experts)
    assert z_loss(coarse).item() == pytest.approx(z_loss(exact).item(), rel=1e-5)


def test_counts_leave_padding_out():
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    assert expert_counts(chosen, 5, None).tolist() == [2, 2, 2, 2, 0]
    mask = torch.tensor([True, True, False, True])
    assert expert_counts(chosen, 5, mask).tolist() == [2, 2, 1, 1, 0]


@FAMILIES
def test_routers_of_every_family_return_logits(tmp_path, family):
    model = load_causal_lm(join(tmp_path, family, top_k=2).model)
    inputs = []
    hooks = [
        layer.mlp.gate.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
        for layer in model.model.layers
    ]
    with record_routers(model) as routing, torch.no_grad():
        model(input_ids=torch.arange(24).view(2, 12))
    for hook in hooks:
        hook.remove()
    for layer, states, logits, chosen in zip(
        model.model.layers, inputs, routing.logits, routing.experts, strict=True
    ):
        expected = functional.linear(states.reshape(-1, 32), layer.mlp.gate.weight)
        torch.testing.assert_close(logits, expected)
        assert torch.equal(chosen.sort().values, expected.topk(2).indices.sort().values)


@FAMILIES
def test_the_gradient_of_both_losses_reaches_every_router_under_recomputation(tmp_path, family):
    ids = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    source = join(tmp_path, family, top_k=2).model
    gradients = []
    for recompute in (False, True):
        model = load_causal_lm(source).train()
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
        with record_routers(model, mask) as routing:
            text = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        (0 * text + balance_loss(routing) + z_loss(routing)).backward()
        assert len(routing.logits) == len(routing.experts) == 2, "recorded again"
        assert not any(layer.mlp.gate._forward_hooks for layer in model.model.layers)
        gradients.append([layer.mlp.gate.weight.grad for layer in model.model.layers])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain.norm() > 1e-3
        torch.testing.assert_close(recomputed, plain)


def test_a_dense_model_has_nothing_to_record():
    with pytest.raises(InputError, match="no routers"), record_routers(nn.Linear(2, 2)):
        pass
