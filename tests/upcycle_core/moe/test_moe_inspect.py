import pytest
import torch

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import join
from upcycle_core.checkpoints import load
from upcycle_core.checkpoints.load import choose_experts_implementation, load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.moe.inspect import (
    force_expert,
    record_routing,
    routers_of,
    set_routers,
    set_top_k,
)

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "ernie4_5"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return join(tmp_path_factory.mktemp("inspect")).model


@pytest.fixture
def model(folder):
    return load_causal_lm(folder)


def some_ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 11), generator=torch.Generator().manual_seed(7))


def router_inputs(model, **inputs) -> list[torch.Tensor]:
    """What each layer's router reads: [T, H]."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.post_attention_layernorm.register_forward_hook(
            lambda _module, _inputs, output: seen.append(output.reshape(-1, output.shape[-1]))
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return seen


def test_a_cpu_runs_eager_but_trains_grouped_as_a_gpu_does():
    assert choose_experts_implementation("cpu", "fp32", training=True) == "grouped_mm"
    assert choose_experts_implementation("cpu", "bf16", training=True) == "grouped_mm"
    assert choose_experts_implementation("cpu", "fp32") == "eager"
    assert choose_experts_implementation("cpu", "bf16") == "eager"
    assert choose_experts_implementation("cuda:1", "bf16") == "grouped_mm"
    assert choose_experts_implementation("cuda", "fp32") == "grouped_mm"


def test_a_loaded_moe_runs_the_chosen_implementation(folder, monkeypatch):
    for name in ("eager", "grouped_mm"):
        monkeypatch.setattr(load, "choose_experts_implementation", lambda *_, name=name, **__: name)
        assert load_causal_lm(folder).config._experts_implementation == name


def test_the_choice_knows_device_and_precision(folder, monkeypatch):
    asked = []

    def choose(device, precision, *, training):
        asked.append((device, precision, training))
        return "eager"

    monkeypatch.setattr(load, "choose_experts_implementation", choose)
    options = [{}, {"dtype": torch.bfloat16}, {"precision": "bf16"}, {"training": True}]
    for given in options:
        load_causal_lm(folder, **given)
    assert asked == [
        ("cpu", "fp32", False),
        ("cpu", "bf16", False),
        ("cpu", "bf16", False),
        ("cpu", "fp32", True),
    ]


@FAMILIES
def test_routing_counts_are_those_of_the_largest_logits(tmp_path, family):
    joined = join(tmp_path, family, top_k=2)
    model = load_causal_lm(joined.model)
    with record_routing(model) as counts:
        inputs = router_inputs(model, input_ids=some_ids())
    expected = torch.zeros(2, 3, dtype=torch.int64)
    for layer, x_TH in enumerate(inputs):
        for logits in (x_TH.double() @ joined.routers[layer]).tolist():
            best = sorted(range(3), key=lambda expert: -logits[expert])[:2]
            for expert in best:
                expected[layer, expert] += 1
    assert torch.equal(counts, expected)
    assert counts.sum().item() == 2 * 2 * some_ids().numel()


def test_padding_is_not_counted(model):
    ids = some_ids()
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    padded = torch.where(mask.bool(), ids, 1)
    with record_routing(model) as counts, torch.no_grad():
        model(input_ids=padded, attention_mask=mask)
    with record_routing(model) as apart, torch.no_grad():
        model(input_ids=ids[:1, :6])
        model(input_ids=ids[1:])
    assert torch.equal(counts, apart)


def test_counts_grow_while_generating_and_stop_afterwards(model):
    with record_routing(model) as counts:
        model.generate(some_ids(), max_new_tokens=4, do_sample=False, eos_token_id=None)
    # The prompt and all new tokens but the last, which nothing has read yet.
    assert counts.sum(dim=1).tolist() == [2 * (11 + 3)] * 2
    before = counts.clone()
    with torch.no_grad():
        model(input_ids=some_ids())
    assert torch.equal(counts, before)


def test_a_forced_expert_takes_all_tokens_and_then_lets_go(model):
    with torch.no_grad():
        free = model(input_ids=some_ids()).logits
        with force_expert(model, 1), record_routing(model) as counts:
            forced = model(input_ids=some_ids()).logits
        assert counts.tolist() == [[0, 22, 0]] * 2
        assert not torch.equal(forced, free)
        assert torch.equal(model(input_ids=some_ids()).logits, free)


def test_forcing_ends_when_the_inside_raises(model):
    with torch.no_grad():
        free = model(input_ids=some_ids()).logits
        with pytest.raises(RuntimeError), force_expert(model, 1):
            raise RuntimeError
        assert torch.equal(model(input_ids=some_ids()).logits, free)


def test_two_models_are_forced_apart(folder, model):
    other = load_causal_lm(folder)
    with torch.no_grad():
        free = other(input_ids=some_ids()).logits
        with force_expert(model, 0):
            assert torch.equal(other(input_ids=some_ids()).logits, free)


def test_routers_are_replaced_where_they_are_named(model):
    before = [router.weight.clone() for router in routers_of(model)]
    weight = torch.randn(32, 3, dtype=torch.float64)
    set_routers(model, {1: weight})
    after = [router.weight for router in routers_of(model)]
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], weight.T.float())


def test_top_k_changes_how_many_experts_run(model):
    with torch.no_grad():
        for k in (1, 2, 3):
            set_top_k(model, k)
            with record_routing(model) as counts:
                model(input_ids=some_ids())
            assert counts.sum(dim=1).tolist() == [22 * k] * 2
    assert model.config.num_experts_per_tok == 3


def test_wrong_requests_are_refused(tmp_path, model):
    for k in (0, 4):
        with pytest.raises(InputError, match="top_k"):
            set_top_k(model, k)
    with pytest.raises(InputError, match="expert = 3"), force_expert(model, 3):
        pass
    with pytest.raises(InputError) as caught:
        set_routers(model, {5: torch.zeros(32, 3), 0: torch.zeros(3, 32)})
    assert {fault.field for fault in caught.value.faults} == {"routers.5", "routers.0"}
    dense = load_causal_lm(save_pico(tmp_path))
    with pytest.raises(InputError, match="no routers"):
        routers_of(dense)
