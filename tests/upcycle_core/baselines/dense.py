"""Dense pico checkpoints and what lies in checkpoints, for the tests of the baselines."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.pico import save_pico

# torch's SiLU rounds a row's last elements otherwise if they do not fill a vector.
WIDTH = 64
COMMON = {"router_seed": 7, "max_shard_bytes": 10**9}


def dense_models(
    folder: Path, family: str = "llama", *, seeds: tuple[int, ...] = (0, 1, 2), **overrides
) -> dict[str, Path]:
    """Random experts, one a seed."""
    overrides = {"intermediate_size": WIDTH} | overrides
    return {
        f"domain{index}": save_pico(folder / f"dense{index}", family, seed=seed, **overrides)
        for index, seed in enumerate(seeds)
    }


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by its name on the disk."""
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def some_ids() -> torch.Tensor:
    """[3, 19] token ids."""
    return torch.randint(0, 96, (3, 19), generator=torch.Generator().manual_seed(5))


def logits_of(model) -> torch.Tensor:
    """Logits of ``some_ids``."""
    with torch.no_grad():
        return model(input_ids=some_ids(), use_cache=False).logits


def average(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Mean in fp64, one by one."""
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor in tensors:
        total += tensor.double()
    return (total / len(tensors)).to(tensors[0].dtype)
