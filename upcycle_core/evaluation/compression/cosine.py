"""How alike a MoE's experts and their base are, as vectors of weights (DeRS, Fig. 1).

N experts, l layer.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upcycle_core.architectures.dense_of import experts_of, target_of
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import Target
from upcycle_core.checkpoints.reader import CHUNK, CheckpointReader
from upcycle_core.errors import Fault, InputError, raise_faults

MATRICES = ("gate", "up", "down")


def cosine_similarities(moe: Path, base: Path | None) -> dict[str, Any]:
    """Cosine of every two of a layer's FFNs: the base's and the N experts'.

    cos(a, b) = a.b / (|a| |b|), where a and b are all of an FFN's weights in one vector (Fig. 1 of
    DeRS), or one matrix. Sums are fp64, over pieces: no whole matrix is copied.

    Args:
        moe: A stock MoE checkpoint; layers without experts are left out.
        base: The dense checkpoint that the experts grew from; None for the experts' mean.

    Returns:
        JSON-able: ``names``, N+1 of them: ``base`` or ``mean``, then ``E1`` to ``EN``; ``layers``,
        {l as text: [N+1][N+1] cosines of whole FFNs}; ``matrices``, {l as text: {"gate" | "up" |
        "down": the same of one matrix}}.

    Raises:
        InputError: ``moe`` is no stock MoE, ``base`` has other shapes or is not supported, or
            weights have no direction (all zero, or not finite).
    """
    model, dense = CheckpointReader(moe, field="moe"), None
    target = target_of(model.config, field="moe.model_type")
    count, _ = experts_of(model.config)
    if not count:
        remedy = "say how many experts there are"
        raise InputError(Fault(f"moe.{target.count_fields[0]}", None, remedy))
    layers = [
        layer
        for layer in range(model.config["num_hidden_layers"])
        if target.router_name(layer) in model.tensors
    ]
    places = {layer: _names(target, layer, count) for layer in layers}
    own: dict[int, list[str]] = {}
    if base is not None:
        dense = CheckpointReader(base, field="base")
        family = family_of(dense.config, field="base.model_type")
        own = {layer: list(family.ffn(layer)) for layer in layers}
    raise_faults(_shape_faults(model, places, dense, own))
    names = ["mean" if dense is None else "base", *(f"E{i + 1}" for i in range(count))]
    found: dict[str, Any] = {"names": names, "layers": {}, "matrices": {}}
    for layer in layers:
        products = {}
        for place, matrix in enumerate(MATRICES):
            weights = [model.tensor(name) for name in places[layer][place]]
            first = dense.tensor(own[layer][place]) if dense else None
            products[matrix] = _products(first, weights)
        where = f"layer {layer}"
        whole = torch.stack(list(products.values())).sum(0)
        found["layers"][str(layer)] = _cosines(whole, where, names)
        found["matrices"][str(layer)] = {
            matrix: _cosines(product, f"{where}, {matrix}", names)
            for matrix, product in products.items()
        }
    return found


def _products(base: Tensor | None, experts: list[Tensor]) -> Tensor:
    """[N+1, N+1] fp64 inner products; the mean of ``experts`` stands for no ``base``."""
    flat = [weight.reshape(-1) for weight in ([] if base is None else [base]) + experts]
    total = torch.zeros(len(experts) + 1, len(experts) + 1, dtype=torch.float64)
    for start in range(0, flat[0].numel(), CHUNK):
        rows = torch.stack([row[start : start + CHUNK].double() for row in flat])
        if base is None:
            rows = torch.cat([rows.mean(0, keepdim=True), rows])
        total += rows @ rows.T
    return total


def _cosines(products: Tensor, where: str, names: list[str]) -> list[list[float]]:
    lengths = products.diagonal().sqrt()
    bad = [
        Fault(f"{where}, {name}", length, "has no direction; the weights are zero or broken")
        for name, length in zip(names, lengths.tolist(), strict=True)
        if not 0 < length < float("inf")
    ]
    raise_faults(bad)
    cosines = (products / torch.outer(lengths, lengths)).clamp(-1, 1)
    return cosines.fill_diagonal_(1.0).tolist()


def _names(target: Target, layer: int, experts: int) -> list[list[str]]:
    """Names of a layer's matrices: three lists, one name an expert."""
    ffns = [target.expert_ffn(layer, expert) for expert in range(experts)]
    return [list(names) for names in zip(*ffns, strict=True)]


def _shape_faults(
    model: CheckpointReader,
    places: dict[int, list[list[str]]],
    dense: CheckpointReader | None,
    own: dict[int, list[str]],
) -> list[Fault]:
    faults = []
    if not places:
        faults.append(Fault("moe", str(model.directory), "has no layer with a router"))
    for layer, matrices in places.items():
        for place, names in enumerate(matrices):
            missing = [name for name in names if name not in model.tensors]
            faults += [Fault("moe", str(model.directory), f"has no tensor {n}") for n in missing]
            if dense is None or missing:
                continue
            name, shape = own[layer][place], model.tensors[names[0]].shape
            base = dense.tensors.get(name)
            if base is None or base.shape != shape:
                remedy = f"{name} is {base.shape if base else 'missing'}, the experts' is {shape}"
                faults.append(Fault("base", str(dense.directory), remedy))
    return faults
