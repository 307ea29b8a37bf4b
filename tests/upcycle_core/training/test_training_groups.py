from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import join
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.training.checks import routing_faults
from upcycle_core.training.config import MoEObjective
from upcycle_core.training.groups import parts_of, select_trainable

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "ernie4_5"])


def trained_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@FAMILIES
@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (("router",), {"gate"}),
        (("experts",), {"experts"}),
        (("backbone",), {"rest"}),
        (("router", "experts"), {"gate", "experts"}),
        (("all",), {"gate", "experts", "rest"}),
    ],
)
def test_exactly_the_modules_of_a_group_are_trained(tmp_path, family, groups, expected):
    model = load_causal_lm(join(tmp_path, family, top_k=2).model)
    places = {
        name: "gate" if ".mlp.gate." in name else "experts" if ".mlp.experts." in name else "rest"
        for name, _ in model.named_parameters()
        if not name.endswith("e_score_correction_bias")  # nothing flows back through a choice
    }
    chosen = select_trainable(model, groups)
    assert trained_names(model) == {name for name, place in places.items() if place in expected}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert chosen.total == sum(sizes.values())
    assert chosen.trained == sum(sizes[n] for n, place in places.items() if place in expected)
    assert not chosen.undecayed


def test_a_shared_expert_belongs_to_the_backbone(tmp_path):
    parts = parts_of(load_causal_lm(join(tmp_path, "qwen2", top_k=2).model))
    shared = {part for name, part in parts.items() if "shared_expert" in name}
    assert shared == {"backbone"}


@FAMILIES
def test_expert_gates_are_half_of_the_fused_matrix(tmp_path, family):
    model = load_causal_lm(join(tmp_path, family, top_k=2).model)
    chosen = select_trainable(model, ("router", "expert_gates"))
    fused = {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in (0, 1)}
    routers = {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)}
    assert trained_names(model) == fused | routers
    assert chosen.undecayed == fused
    assert chosen.trained == 2 * (3 * 64 * 32 + 3 * 32)  # layers x (D I H + D H)
    ids = torch.arange(24).view(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        gradient = layer.mlp.experts.gate_up_proj.grad
        assert gradient[:, :64].abs().max() > 1e-5
        assert not gradient[:, 64:].any()


def test_expert_gates_beside_experts_change_nothing(tmp_path):
    model = load_causal_lm(join(tmp_path, top_k=2).model)
    chosen = select_trainable(model, ("expert_gates", "experts"))
    assert not chosen.undecayed
    ids = torch.arange(24).view(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad[:, 64:].any()


class Own(nn.Module):
    """An architecture of its own: marked modules, one inside another, and unfused experts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.attention = nn.Module()
        self.attention.parameter_group = "experts"
        self.attention.query = nn.Linear(2, 2)
        self.attention.chooser = nn.Linear(2, 3)
        self.attention.chooser.parameter_group = "router"
        self.expert = nn.Module()
        self.expert.parameter_group = "experts"
        self.expert.gate_proj = nn.Linear(2, 5, bias=False)
        self.expert.up_proj = nn.Linear(2, 5, bias=False)


def test_a_module_may_say_which_group_it_belongs_to():
    assert parts_of(Own()) == {
        "embed.weight": "backbone",
        "attention.query.weight": "experts",
        "attention.query.bias": "experts",
        "attention.chooser.weight": "router",
        "attention.chooser.bias": "router",
        "expert.gate_proj.weight": "experts",
        "expert.up_proj.weight": "experts",
    }
    model = Own()
    chosen = select_trainable(model, ("expert_gates",))
    assert trained_names(model) == {"expert.gate_proj.weight"}
    assert (chosen.trained, chosen.undecayed) == (10, frozenset())


def test_a_shared_base_is_a_group_apart_from_the_backbone():
    model = Own()
    model.expert.gate_proj.parameter_group = "base"
    assert parts_of(model)["expert.gate_proj.weight"] == "base"
    select_trainable(model, ("shared_base",))
    assert trained_names(model) == {"expert.gate_proj.weight"}
    select_trainable(model, ("backbone",))
    assert trained_names(model) == {"embed.weight"}
    select_trainable(model, ("router", "experts", "backbone"))
    assert trained_names(model) == set(parts_of(model)) - {"expert.gate_proj.weight"}
    select_trainable(model, ("all",))
    assert trained_names(model) == set(parts_of(model))


def test_a_module_in_a_group_that_is_not_there_is_an_error():
    model = Own()
    model.attention.parameter_group = "routers"
    with pytest.raises(InputError, match=r"attention.parameter_group = 'routers'.*choose router"):
        parts_of(model)


@pytest.mark.parametrize(
    ("groups", "message"), [(("gate",), "'gate': no such group"), ((), "trains nothing")]
)
def test_unknown_groups_and_none_are_refused(groups, message):
    with pytest.raises(InputError, match=message):
        select_trainable(Own(), groups)


def test_a_group_that_the_model_does_not_have_is_refused(tmp_path):
    model = load_causal_lm(save_pico(tmp_path))
    for group in ("router", "experts", "expert_gates", "shared_base"):
        with pytest.raises(InputError, match="no such parameters"):
            select_trainable(model, (group,))


@dataclass
class Shape:
    """What is looked at of a model's configuration."""

    model_type: str = "mixtral"
    num_local_experts: int | None = 4
    num_experts_per_tok: int = 1
    norm_topk_prob: bool = False


def faults(shape, **objective):
    return [str(fault) for fault in routing_faults(shape, MoEObjective(**objective))]


@pytest.mark.parametrize("trainable", [("router",), ("all",), ("router", "expert_gates")])
def test_routers_at_k_1_with_renormalised_weights_are_refused(trainable):
    for shape in (Shape(), Shape(model_type="qwen2_moe", norm_topk_prob=True)):
        (fault,) = faults(shape, trainable=trainable)
        assert "no gradient" in fault
        assert "top_k >= 2" in fault
        assert "experts and backbone" in fault


def test_routers_that_get_a_gradient_are_not_refused():
    assert not faults(Shape(num_experts_per_tok=2))
    assert not faults(Shape(model_type="qwen2_moe"))
    assert not faults(Shape(), trainable=("experts", "backbone"))


def test_k_above_the_number_of_experts_is_refused():
    (fault,) = faults(Shape(num_experts_per_tok=5))
    assert "num_experts_per_tok = 5" in fault
    assert "1 to 4" in fault


def test_what_only_a_moe_has_is_refused_for_a_dense_model():
    dense = Shape(model_type="llama", num_local_experts=None)
    assert not faults(dense)
    assert not list(routing_faults(dense, None))
    found = faults(dense, trainable=("router", "experts"), balance_coefficient=0.1)
    assert [text.split(" =")[0] for text in found] == [
        "objective.trainable",
        "objective.trainable",
        "objective.balance_coefficient",
    ]
