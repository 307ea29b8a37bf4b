"""Assemble the MoE: backbone, experts and routers streamed into a stock architecture's files.

H hidden size, D experts.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from upcycle_core.architectures.compare import tensor_faults
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import Family
from upcycle_core.backbone.average import write_generation_config
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.checkpoints.writer import TensorSpec, write_json, write_sharded
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.progress import Progress, Silent

Source = Callable[[], torch.Tensor]


def assemble(
    experts: Mapping[str, Path],
    backbone: Path,
    routers: Mapping[int, torch.Tensor],
    out: Path,
    *,
    top_k: int,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Write the MoE checkpoint that a stock architecture of transformers loads.

    No tensor is held longer than it takes to write it. Weights keep the experts' type.

    Args:
        experts: Domain to its expert's checkpoint; the order is the order of the experts.
        backbone: What ``write_backbone`` wrote.
        routers: Layer to W [H, D], columns in the order of ``experts``.
        out: The directory that is written: weights under per-expert names, config.json,
            generation configuration, tokenizer.
        top_k: Experts a token passes through.
        max_shard_bytes: Size of one safetensors file.
        progress: Hears of every tensor.

    Raises:
        InputError: k > D; experts and backbone that do not fit; routers missing, of another
            shape or not finite.
    """
    progress = progress or Silent()
    shared = CheckpointReader(backbone, field="backbone")
    readers = {d: CheckpointReader(path, field=f"experts.{d}") for d, path in experts.items()}
    family = family_of(shared.config, field="backbone.config.model_type")
    dtype = _dtype(shared)
    _check(family, shared, readers, routers)
    config = family.target_config(shared.config, experts=len(readers), top_k=top_k, dtype=dtype)
    plan = _plan(family, shared, list(readers.values()), routers)
    specs = [TensorSpec(name, shape, dtype) for name, (shape, _) in plan.items()]
    progress.start("assembly", len(specs), "tensors")

    def produce(name: str) -> torch.Tensor:
        progress.advance()
        return plan[name][1]().to(dtype)

    write_sharded(out, specs, produce, max_shard_bytes=max_shard_bytes)
    write_json(out / "config.json", config)
    copy_tokenizer(backbone, out)
    write_generation_config(shared, out)


def _plan(
    family: Family,
    shared: CheckpointReader,
    readers: list[CheckpointReader],
    routers: Mapping[int, torch.Tensor],
) -> dict[str, tuple[tuple[int, ...], Source]]:
    """Every tensor of the MoE, in the order it is written, with its shape and where it is from."""
    dense = family.tensors(shared.config)
    layer_of = {name: i for i in range(len(routers)) for name in family.ffn(i)}
    plan: dict[str, tuple[tuple[int, ...], Source]] = {}
    for name, shape in dense.items():
        if name not in layer_of:
            plan[name] = shape, partial(shared.tensor, name)
        elif name == family.ffn(layer_of[name]).gate:
            layer = layer_of[name]
            plan |= _moe_layer(family, shared.config, layer, readers, routers[layer])
    return plan


def _moe_layer(
    family: Family,
    config: Mapping,
    layer: int,
    readers: list[CheckpointReader],
    router_HD: torch.Tensor,
) -> dict[str, tuple[tuple[int, ...], Source]]:
    """The tensors of one MoE block: router, what must be zero, experts."""
    target = family.target
    hidden, count = router_HD.shape
    plan: dict[str, tuple[tuple[int, ...], Source]] = {
        target.router_name(layer): ((count, hidden), lambda: router_HD.T)
    }
    for name, shape in family.zeros(config, layer).items():
        plan[name] = shape, partial(torch.zeros, shape)
    for index, reader in enumerate(readers):
        names = zip(family.ffn(layer), target.expert_ffn(layer, index), strict=True)
        plan |= {
            new: (reader.tensors[old].shape, partial(reader.tensor, old)) for old, new in names
        }
    return plan


def _check(
    family: Family,
    shared: CheckpointReader,
    readers: Mapping[str, CheckpointReader],
    routers: Mapping[int, torch.Tensor],
) -> None:
    config, dtype = shared.config, _dtype(shared)
    faults = tensor_faults(shared, family, "backbone", ffn=False)
    for reader in readers.values():
        faults += tensor_faults(reader, family, reader.field, config=config)
        if _dtype(reader) != dtype:
            remedy = f"weights are {_dtype(reader)}, the backbone's {dtype}; save both in one type"
            faults.append(Fault(reader.field, str(reader.directory), remedy))
    raise_faults(faults + _router_faults(family.resolve(config), len(readers), routers))


def _dtype(reader: CheckpointReader) -> torch.dtype:
    return next(iter(reader.tensors.values())).dtype


def _router_faults(full: Mapping, experts: int, routers: Mapping[int, torch.Tensor]) -> list[Fault]:
    layers, shape = full["num_hidden_layers"], (full["hidden_size"], experts)
    faults = []
    if sorted(routers) != list(range(layers)):
        faults.append(Fault("routers", sorted(routers), f"must be layers 0 to {layers - 1}"))
    for layer, weight_HD in routers.items():
        if tuple(weight_HD.shape) != shape:
            remedy = f"must be {list(shape)}: hidden size, experts"
            faults.append(Fault(f"routers.{layer}", list(weight_HD.shape), remedy))
        elif not torch.isfinite(weight_HD).all():
            faults.append(Fault(f"routers.{layer}", "NaN or infinity", "solve the routers again"))
    return faults
