"""Pico experts that grew from one seed, joined into a MoE, for tests."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import WIDTH, recast
from upcycle_core.moe.assemble import assemble

IDS = torch.randint(0, 96, (3, 19), generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True)
class Grown:
    """Where seed and MoE lie."""

    seed: Path
    model: Path


def grow(
    folder: Path,
    family: str = "llama",
    *,
    experts: int = 3,
    noise: float = 0.05,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    **overrides,
) -> Grown:
    """Experts are the seed with noise on their FFNs; routers are random."""
    overrides = {"intermediate_size": WIDTH} | overrides
    seed = save_pico(folder / "seed", family, seed=1, **overrides)
    if dtype != torch.float32:
        recast(seed, dtype)
    generator, paths = torch.Generator().manual_seed(7), {}
    for index in range(experts):
        paths[f"domain{index}"] = folder / f"expert{index}"
        save_pico(paths[f"domain{index}"], family, seed=1, **overrides)
        weights = load_file(seed / "model.safetensors")
        for name, weight in weights.items():
            if ".mlp." in name:
                drawn = torch.randn(weight.shape, generator=generator)
                weights[name] = (weight + noise * drawn).to(dtype)
        save_file(weights, paths[f"domain{index}"] / "model.safetensors", {"format": "pt"})
    config = json.loads((seed / "config.json").read_text())
    routers = {
        layer: torch.randn(config["hidden_size"], experts, generator=generator)
        for layer in range(config["num_hidden_layers"])
    }
    assemble(paths, None, routers, folder / "moe", top_k=top_k, max_shard_bytes=10**9)
    return Grown(seed, folder / "moe")


def logits_of(directory: Path) -> torch.Tensor:
    """Logits [3, 19, V] of a checkpoint on fixed ids; every key has its place."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def set_config(directory: Path, **fields) -> None:
    """Change config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
