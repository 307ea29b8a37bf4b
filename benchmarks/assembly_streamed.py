"""Our way of ``benchmarks.assembly``: tensors stream through."""

from collections.abc import Mapping
from pathlib import Path

import torch

from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.moe.assemble import assemble

NAMES = ("a", "b")


def run(folder: Path, out: Path, *, max_shard_bytes: int) -> None:
    """Our way: backbone to disk, then the MoE."""
    paths = {name: folder / name for name in NAMES}
    readers = [CheckpointReader(path) for path in paths.values()]
    write_backbone(readers, out / "backbone", max_shard_bytes=max_shard_bytes)
    config = readers[0].config
    routers = {layer: random_router(config, layer) for layer in range(config["num_hidden_layers"])}
    assemble(
        paths,
        out / "backbone",
        routers,
        out / "moe",
        top_k=1,
        max_shard_bytes=max_shard_bytes,
    )


def random_router(config: Mapping, layer: int) -> torch.Tensor:
    """Random weights [H, D], the same for every way."""
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(config["hidden_size"], len(NAMES), generator=generator)
