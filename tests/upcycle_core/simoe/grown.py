"""Small SIMoE models with random experts, and what they must compute, the slow way."""

import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    PhiConfig,
    PreTrainedModel,
    StableLmConfig,
)

from tests.pico import CONFIGS, VOCABULARY, pico_config
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import gated_modules
from upcycle_core.simoe.upcycle import upcycle_in_memory

FAMILIES = [*CONFIGS, "phi", "stablelm", "gpt2", "falcon"]


def dense_config(family: str, **overrides):
    if family in CONFIGS:
        return pico_config(family, **overrides)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    if family == "gpt2":
        shape = {"n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
        return GPT2Config(vocab_size=VOCABULARY, **shape, **ids, **overrides)
    if family == "falcon":
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        return FalconConfig(vocab_size=VOCABULARY, ffn_hidden_size=48, **shape, **ids, **overrides)
    llama = pico_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    shape = {name: llama[name] for name in (*names, "num_attention_heads")}
    shape["num_key_value_heads"] = 4
    kind = {"phi": PhiConfig, "stablelm": StableLmConfig}[family]
    return kind(**shape, **ids, **overrides)


def save_dense(directory: Path, family: str = "llama", **overrides) -> Path:
    """A random dense checkpoint, with norms and biases that are not one and zero."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(dense_config(family, **overrides))
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        parameter.data.normal_(mean=float(is_norm), std=0.1 if parameter.dim() == 1 else 0.2)
    model.save_pretrained(directory)
    return directory


def upcycled(dense: Path, *, tasks=(), **settings):
    return upcycle_in_memory(dense, SimoeUpcyclingConfig(**settings), seed=1, tasks=tasks)


def grow(model: PreTrainedModel):
    """Random deltas, masks with zeros, ones and between, and a router that tells prompts apart."""
    torch.manual_seed(7)
    for module in gated_modules(model).values():
        module.delta.data.normal_(std=0.15)
        module.log_phi.data.normal_(mean=-1.0, std=1.5)
    for parameter in model.router.parameters():
        parameter.data.normal_(std=0.5)
    return model


def grown(dense: Path, **settings):
    return grow(upcycled(dense, **settings))


def slow_gate(log_phi: float) -> float:
    s = 1 / (1 + math.exp(-log_phi * 3 / 2)) * 1.2 - 0.1
    return min(1.0, max(0.0, s))


def slow_masks(module) -> Tensor:
    """z from log phi, number by number."""
    if module.is_real:
        return module.log_phi.detach().clone()
    numbers = [slow_gate(value) for value in module.log_phi.detach().flatten().tolist()]
    return torch.tensor(numbers).view(module.log_phi.shape)


def all_masks(model) -> dict[str, Tensor]:
    return {name: slow_masks(module) for name, module in gated_modules(model).items()}


def merged(model, dense: PreTrainedModel, alpha_M: Tensor, masks: dict) -> PreTrainedModel:
    """``dense`` with theta_pre + sum_i alpha_i z_i * theta_delta as its weights."""
    state = dense.state_dict()
    for name, module in gated_modules(model).items():
        weight = state[f"{name.removeprefix('model.')}.weight"]
        for alpha, z in zip(alpha_M.tolist(), masks[name], strict=True):
            delta = module.delta.detach()
            in_place = delta.T * z if type(module.base).__name__ == "Conv1D" else delta * z
            weight += alpha * (in_place.T if type(module.base).__name__ == "Conv1D" else in_place)
    return dense


def slow_alpha(model, dense: PreTrainedModel, prompt: Tensor) -> Tensor:
    """alpha [M] of one prompt [S]: the dense model's last state, an MLP, softmax."""
    with torch.no_grad():
        state = dense(prompt[None], output_hidden_states=True).hidden_states[-1][0, -1]
        inner = model.router.hidden.weight @ state + model.router.hidden.bias
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        logits = model.router.output.weight @ inner + model.router.output.bias
        return logits.exp() / logits.exp().sum()


def some_ids(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator) for n in lengths]


def padded(rows: list[Tensor], side: str, value: int = 1) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=value, padding_side=side
    )


def batch_of(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    mask = padded([torch.ones_like(row) for row in rows], side, 0)
    return {"input_ids": padded(rows, side), "attention_mask": mask}
