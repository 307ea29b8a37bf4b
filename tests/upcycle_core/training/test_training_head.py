"""The head in slices against the stock model's own loss and gradients."""

import pytest
import torch
from pico import save_pico

from tests.upcycle_core.moe.joined import join
from tests.upcycle_core.simoe.grown import grown, save_dense
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.upcycle import write_ders_upcycling
from upcycle_core.progress import Silent
from upcycle_core.training import head
from upcycle_core.training.head import sliced_head

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "olmo2", "ernie4_5"]


def batch(*, masked: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (3, 19), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    if masked:
        labels[0, :11] = -100
        labels[2] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(network, values, *, precision=torch.float32, **options):
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        loss = network(**values, **options, use_cache=False).loss
    (2.5 * loss).backward()
    found = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    return loss.detach(), found


@pytest.fixture(autouse=True, params=[1 << 24, 96 * 7, 1], ids=["whole", "sevens", "singly"])
def slices(request, monkeypatch):
    monkeypatch.setattr(head, "SLICE", request.param)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_whole_logits(tmp_path, family, tied):
    network = load_causal_lm(save_pico(tmp_path / "m", family, tie_word_embeddings=tied))
    for values, options in (
        (batch(masked=False), {}),
        (batch(masked=True), {}),
        (batch(masked=True), {"num_items_in_batch": torch.tensor(71)}),
    ):
        loss, expected = gradients(network, values, **options)
        names = [name for name, _ in network.named_parameters()]
        with sliced_head(network):
            assert [name for name, _ in network.named_parameters()] == names
            sliced, found = gradients(network, values, **options)
        # fp32, sums in another order
        torch.testing.assert_close(sliced, loss, rtol=1e-5, atol=1e-6)
        assert set(found) == set(expected)
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * grad.abs().max())
    assert gradients(network, values, **options)[0] == loss  # everything is as it was


def test_a_moe_has_the_same_loss_too(tmp_path):
    network = load_causal_lm(join(tmp_path, "qwen2", top_k=2).model)
    loss, expected = gradients(network, batch(masked=True), output_router_logits=False)
    with sliced_head(network):
        sliced, found = gradients(network, batch(masked=True), output_router_logits=False)
    torch.testing.assert_close(sliced, loss, rtol=1e-5, atol=1e-6)
    assert set(found) == set(expected)


def simoe(folder, **settings):
    return grown(save_dense(folder, tie_word_embeddings=not settings), experts=3, **settings)


def ders(folder):
    codec = DersUpcyclingConfig(codec="low_rank", rank=4)
    size = {"experts": 3, "top_k": 2, "seed": 0, "max_shard_bytes": 10**9}
    write_ders_upcycling(
        save_pico(folder / "dense"), folder / "m", config=codec, progress=Silent(), **size
    )
    network = load_causal_lm(folder / "m")
    for parameter in network.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape)
    return network


@pytest.mark.parametrize("made", [simoe, ders])
def test_our_own_architectures_make_no_whole_logits_either(tmp_path, made):
    network = made(tmp_path)
    values, options = batch(masked=True), {"num_items_in_batch": torch.tensor(71)}
    values["attention_mask"] = torch.ones_like(values["input_ids"])
    loss, expected = gradients(network, values, **options)
    with sliced_head(network):
        sliced, found = gradients(network, values, **options)
        hidden = network.config.hidden_size
        assert network(**values, use_cache=False).logits.shape == (3, 19, hidden)
        assert head.is_sliced(network)
    torch.testing.assert_close(sliced, loss, rtol=1e-5, atol=1e-6)
    assert set(found) == set(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * grad.abs().max())
    assert not head.is_sliced(network)
    assert gradients(network, values, **options)[0] == loss


def test_a_head_with_experts_stays_as_it_is(tmp_path):
    network = simoe(tmp_path, lm_head=True)
    with sliced_head(network):
        assert network(**batch(masked=True)).logits.shape == (3, 19, 96)


def test_under_autocast_the_head_multiplies_in_bf16(tmp_path):
    network = load_causal_lm(save_pico(tmp_path / "m", "llama"))
    exact, gradient = gradients(network, batch(masked=False))
    loss, expected = gradients(network, batch(masked=False), precision=torch.bfloat16)
    with sliced_head(network):
        sliced, found = gradients(network, batch(masked=False), precision=torch.bfloat16)
    assert (sliced - loss).abs() <= (loss - exact).abs() / 10
    for name, grad in gradient.items():  # as far from fp32 as the whole logits are
        rounding = (expected[name] - grad).norm()
        assert 0 < (found[name] - grad).norm() <= 1.1 * rounding


def test_a_frozen_head_gets_no_gradient_and_what_lies_below_gets_its_own(tmp_path):
    network = load_causal_lm(save_pico(tmp_path / "m", "llama"))
    network.lm_head.weight.requires_grad_(False)
    _, expected = gradients(network, batch(masked=False))
    with sliced_head(network):
        _, found = gradients(network, batch(masked=False))
    assert (
        set(found)
        == set(expected)
        == {n for n, _ in network.named_parameters()} - {"lm_head.weight"}
    )


def test_without_gradients_there_is_the_loss_alone(tmp_path):
    network = load_causal_lm(save_pico(tmp_path / "m", "llama"))
    with torch.no_grad():
        loss = network(**batch(masked=True)).loss
        with sliced_head(network):
            sliced = network(**batch(masked=True)).loss
    torch.testing.assert_close(sliced, loss, rtol=1e-5, atol=1e-6)
    assert not sliced.requires_grad


def test_another_head_stays_as_it_is(tmp_path):
    network = load_causal_lm(save_pico(tmp_path / "m", "llama"))
    network.lm_head = torch.nn.Linear(32, 96, bias=True)
    with sliced_head(network):
        assert network(**batch(masked=True)).logits.shape == (3, 19, 96)
