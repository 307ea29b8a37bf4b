"""Values that transformers takes from a config.json, and no model can compute with."""

import pytest
from pico import pico_config

from upcycle_core.architectures.families import family_of

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"hidden_act": "banana"}, "hidden_act"),
        ({"hidden_act": None}, "hidden_act"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"rope_parameters": {**LINEAR, "rope_type": "banana"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {**LINEAR, "factor": "two"}}, "rope_parameters.factor"),
        ({"rope_parameters": {**LINEAR, "factor": -2.0}}, "rope_parameters.factor"),
        ({"rope_parameters": LONG | {"short_factor": [1.0]}}, "rope_parameters.short_factor"),
        ({"rope_parameters": LONG | {"long_factor": ["x"] * 4}}, "rope_parameters.long_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": True}}, "rope_theta"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_value_that_nothing_can_compute_is_named(kind, changes, where):
    config = pico_config(kind).to_dict() | changes
    faults = family_of(config).config_faults(config, "domains.a.expert")
    assert [fault.field for fault in faults] == [f"domains.a.expert.config.{where}"]
    assert "mend config.json" in faults[0].remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu_pytorch_tanh"},
        {"rope_parameters": {**LINEAR, "factor": 2}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
        {"rope_parameters": LONG},
        {"partial_rotary_factor": None},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": None},
    ],
)
def test_a_value_that_can_be_computed_is_taken(changes):
    config = pico_config().to_dict() | changes
    assert family_of(config).config_faults(config, "expert") == []
