"""What two models' modules read on the same tokens, against hidden states computed by hand."""

import pytest
import torch
from transformers import AutoModel

from tests.pico import pico_config
from upcycle_core.activations.cross import CrossMoments
from upcycle_core.activations.pairs import (
    PairedBatch,
    collect_pairs,
    head_reader,
    module_inputs,
    neuron_reader,
    residual_readers,
)
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent

TOKENS = torch.arange(3 * 7).view(3, 7) * 5 % 96
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 2 + [0] * 5])


def model_of(family: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModel.from_config(pico_config(family)).eval()


def batches() -> list[PairedBatch]:
    parts = (slice(0, 1), slice(1, 3))  # one without padding, one with
    return [same_tokens(TOKENS[p], MASK[p]) for p in parts]


def same_tokens(ids: torch.Tensor, mask: torch.Tensor) -> PairedBatch:
    """Both models see the same ids, and every token is counted."""
    rows = mask.flatten().nonzero()[:, 0]
    return PairedBatch(
        first_ids=ids,
        first_mask=mask,
        second_ids=ids,
        second_mask=mask,
        first_rows=rows,
        second_rows=rows,
    )


@torch.no_grad()
def activations(model: torch.nn.Module, layer: int) -> torch.Tensor:
    """act(gate) * up of ``layer`` on every counted token, the MLP written out."""
    seen = []
    mlp = model.layers[layer].mlp
    handle = mlp.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    model(input_ids=TOKENS, use_cache=False)
    handle.remove()
    x = seen[0][MASK.bool()]
    return torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)


@pytest.mark.parametrize("family", FAMILIES)
def test_neurons_of_two_models_are_counted_on_the_same_tokens(family):
    first, second = model_of(family, 0), model_of(family, 1)
    moments = {neuron_reader(FAMILIES[family], layer): CrossMoments(48) for layer in (0, 1)}
    collect_pairs(first, second, batches(), moments, progress=Silent())
    for layer, counted in enumerate(moments.values()):
        x_TI, y_TI = activations(first, layer), activations(second, layer)
        assert counted.count == 13
        torch.testing.assert_close(counted.products, (x_TI.T @ y_TI).double(), rtol=1e-4, atol=1e-6)


def test_paths_may_share_an_accumulator_and_are_changed_on_the_way():
    first, second = model_of("llama", 0), model_of("llama", 1)
    paths = residual_readers(FAMILIES["llama"], (0, 1))
    shared, alone = CrossMoments(32), {path: CrossMoments(32) for path in paths}
    for moments in (dict.fromkeys(paths, shared), alone):
        collect_pairs(
            first, second, batches(), moments, change=lambda _path, x: 2 * x, progress=Silent()
        )
    assert shared.count == 5 * 13
    total = sum(moments.products for moments in alone.values())
    torch.testing.assert_close(shared.products, total)
    embedded = [model.embed_tokens(TOKENS[MASK.bool()]).detach() for model in (first, second)]
    expected = 4 * (embedded[0].T @ embedded[1]).double()
    torch.testing.assert_close(alone[paths[0]].products, expected, rtol=1e-4, atol=1e-8)


def test_heads_are_what_o_proj_reads():
    model = model_of("qwen3", 0)
    seen = {}
    with module_inputs(model, [head_reader(1)], seen.__setitem__):
        model(input_ids=TOKENS, use_cache=False)
    assert {path: x.shape for path, x in seen.items()} == {head_reader(1): (3, 7, 32)}
    model(input_ids=TOKENS[:1], use_cache=False)
    assert seen[head_reader(1)].shape[0] == 3  # nobody listens any more


def test_each_model_has_rows_of_its_own():
    first, second = model_of("llama", 0), model_of("llama", 1)
    rows = torch.tensor([0, 3, 9, 14]), torch.tensor([1, 2, 6, 7])
    other = TOKENS[:2, :5].flip(0)
    batch = PairedBatch(
        first_ids=TOKENS,
        first_mask=MASK,
        second_ids=other,
        second_mask=torch.ones_like(other),
        first_rows=rows[0],
        second_rows=rows[1],
    )
    path = residual_readers(FAMILIES["llama"], [0])[0]
    moments = {path: CrossMoments(32)}
    collect_pairs(first, second, [batch], moments, progress=Silent())
    x_TH = first.embed_tokens(TOKENS.flatten()[rows[0]])
    y_TH = second.embed_tokens(other.flatten()[rows[1]])
    expected = (x_TH.T @ y_TH).double().detach()
    torch.testing.assert_close(moments[path].products, expected, rtol=1e-4, atol=1e-8)
    assert moments[path].count == 4


@pytest.mark.parametrize("last", ["heads", "neurons", "norm"])
def test_nothing_behind_the_last_module_is_computed(last):
    first, second = model_of("llama", 0), model_of("llama", 1)
    paths = {
        "heads": [head_reader(0), residual_readers(FAMILIES["llama"], [0])[0]],
        "neurons": [neuron_reader(FAMILIES["llama"], 0), head_reader(0)],
        "norm": residual_readers(FAMILIES["llama"], (0, 1)),
    }[last]
    sizes = {path: 48 if "down_proj" in path else 32 for path in paths}
    ran: dict[str, list[str]] = {"first": [], "second": []}
    for model, seen in zip((first, second), ran.values(), strict=True):
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(lambda *_, name=name, seen=seen: seen.append(name))
    moments = {path: CrossMoments(size) for path, size in sizes.items()}
    collect_pairs(first, second, batches(), moments, progress=Silent())
    ends = {"heads": "self_attn.v_proj", "neurons": "mlp.up_proj", "norm": "mlp.down_proj"}
    end = f"layers.{1 if last == 'norm' else 0}.{ends[last]}"
    for seen in ran.values():
        assert seen[-1] == end
        assert seen.count(end) == 2  # batches
        assert seen.index(end) == len(seen) // 2 - 1
    assert all(counted.count == 13 for counted in moments.values())


def test_what_is_not_finite_is_named_in_both_models_where_it_begins():
    first, second = model_of("llama", 0), model_of("llama", 1)
    with torch.no_grad():
        first.layers[1].mlp.up_proj.weight[3, 3] = torch.nan
        second.layers[0].self_attn.v_proj.weight[:] = 1e38
    family = FAMILIES["llama"]
    paths = [*(neuron_reader(family, la) for la in (0, 1)), *(head_reader(la) for la in (0, 1))]
    moments = {path: CrossMoments(48 if "mlp" in path else 32) for path in paths}
    with pytest.raises(InputError) as caught:
        collect_pairs(
            first, second, batches(), moments, names=("experts.a", "experts.b"), progress=Silent()
        )
    assert [(fault.field, fault.value) for fault in caught.value.faults] == [
        ("experts.a", neuron_reader(family, 1)),
        ("experts.b", head_reader(0)),
    ]
