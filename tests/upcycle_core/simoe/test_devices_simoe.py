"""A model whose later layers lie on another device, as ``device_map`` places them.

Tensors have devices and no numbers: no GPU is needed, and one is enough.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.pico import pico_config
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model.layers_simoe import SimoeLinear, SimoeNorm
from upcycle_core.simoe.model.routing_simoe import Mixture, states_at
from upcycle_core.simoe.upcycle import simoe_config

FIRST, SECOND = "cpu", "cuda:0"


@pytest.fixture(autouse=True)
def fake():
    with FakeTensorMode(), torch.no_grad():
        yield


@pytest.mark.parametrize("masks", ["neurons", "parameters"])
@pytest.mark.parametrize("shape", [(2, 8), (2, 7, 8)], ids=["instance", "token"])
def test_layers_take_coefficients_that_were_found_on_another_device(masks, shape):
    config, mixture = simoe_config(pico_config(), SimoeUpcyclingConfig(masks=masks)), Mixture()
    linear = SimoeLinear(nn.Linear(32, 48), config, mixture, None)
    norm = SimoeNorm(LlamaRMSNorm(32), config, mixture, None)
    x = torch.empty(2, 7, 32, device=SECOND)
    with mixture.using(torch.empty(shape, device=FIRST)):
        for layer in (linear, norm):
            assert moved(layer)(x).device == x.device


def moved(layer):
    """It, on the second."""
    for module in layer.modules():
        for name, own in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(own.shape, device=SECOND), False))
    return layer


def test_the_router_reads_states_where_they_lie():
    last = torch.empty(2, dtype=torch.int64, device=FIRST)
    state = torch.empty(2, 7, 32, device=SECOND)
    found = states_at(last, state)
    assert (found.shape, found.device) == ((2, 32), state.device)
