"""Pico experts joined into a MoE, for tests."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.moe.assemble import assemble

# torch's SiLU rounds a row's last elements otherwise if they do not fill a vector, and a MoE's gate
# is half a row of a fused product. Widths of real models are multiples of 32; so is this one.
WIDTH = 64


@dataclass(frozen=True)
class Joined:
    """Where the parts of a MoE lie."""

    experts: dict[str, Path]
    backbone: Path
    routers: dict[int, torch.Tensor]
    model: Path


def join(
    folder: Path,
    family: str = "llama",
    *,
    seeds: tuple[int, ...] = (0, 1, 2),
    top_k: int = 1,
    max_shard_bytes: int = 10**9,
    dtype: torch.dtype | None = None,
    **overrides,
) -> Joined:
    """Make experts, average them, and assemble them with random routers."""
    overrides = {"intermediate_size": WIDTH} | overrides
    experts = {}
    for index, seed in enumerate(seeds):
        directory = save_pico(folder / f"expert{index}", family, seed=seed, **overrides)
        if dtype is not None:
            recast(directory, dtype)
        experts[f"domain{index}"] = directory
    readers = [CheckpointReader(directory) for directory in experts.values()]
    write_backbone(readers, folder / "backbone", max_shard_bytes=max_shard_bytes)
    torch.manual_seed(99)
    routers = {
        layer: torch.randn(readers[0].config["hidden_size"], len(seeds), dtype=torch.float64)
        for layer in range(readers[0].config["num_hidden_layers"])
    }
    assemble(
        experts,
        folder / "backbone",
        routers,
        folder / "moe",
        top_k=top_k,
        max_shard_bytes=max_shard_bytes,
    )
    return Joined(experts, folder / "backbone", routers, folder / "moe")


def recast(directory: Path, dtype: torch.dtype) -> None:
    """Save the checkpoint again in another type."""
    AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).save_pretrained(directory)
