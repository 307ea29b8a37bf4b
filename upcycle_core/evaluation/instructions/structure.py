"""Where a SIMoE model grew experts, and what they share: the paper's Fig. 4 and Fig. 5.

M experts, in inputs and out outputs of a layer.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upcycle_core.errors import Fault, InputError
from upcycle_core.plain import Plain

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = "norms"
OUTSIDE = "outside"
"""Depth of what belongs to no layer: the final norm, the output head."""
_HALVES = ("encoder", "decoder")


@dataclass(frozen=True, kw_only=True)
class Structure(Plain):
    """Shares of expert parameters whose mask is not zero. Shares are 0 to 1.

    Args:
        by_type: {layer type: [M] share of each expert}; ``norms`` are all norms.
        by_depth: {layer as text, or ``outside``: the same}.
        total: [M] of all.
        parameters: What the shares are of: weights of the pre-trained model that may have experts.
        union: What at least one expert uses, of all: what pruning leaves.
        overlap: [M][M] mask entries that both experts use, of those that one of them uses; 0 for
            two that use nothing, 1 on the diagonal.
    """

    by_type: Mapping[str, tuple[float, ...]]
    by_depth: Mapping[str, tuple[float, ...]]
    total: tuple[float, ...]
    parameters: int
    union: float
    overlap: tuple[tuple[float, ...], ...]
    written = (
        *("by_type", "by_depth", "total", "parameters", "union", "overlap"),
        *("density", "mean_overlap"),
    )

    @property
    def density(self) -> float:
        """Mean of ``total`` over experts; 1 minus the realised sparsity that tau holds."""
        return sum(self.total) / len(self.total)

    @property
    def mean_overlap(self) -> float:
        """Mean of ``overlap`` over pairs of different experts."""
        return mean_of_pairs(self.overlap)


def mean_of_pairs(square: Sequence[Sequence[float]]) -> float:
    """The mean of a square [M][M] without its diagonal: over pairs of different experts."""
    pairs = [value for i, row in enumerate(square) for j, value in enumerate(row) if i != j]
    return sum(pairs) / len(pairs)


@torch.no_grad()
def structure_of(modules: Mapping[str, Any]) -> Structure:
    """Count what the masks leave.

    Args:
        modules: {name: gated module}, what ``simoe``'s ``gated_modules(model)`` gives, of a trained
            or of a pruned model. Each has ``masks()`` [M, in] or [M, out, in], after pruning of the
            inputs that are left; ``weights_per_gate``, the parameters that one entry of it governs;
            and ``base.weight``, whose size all shares refer to.

    Raises:
        InputError: There is no gated module.
    """
    if not modules:
        raise InputError(Fault("model", None, "it has no layer with experts; give a SIMoE model"))
    used: dict[str, dict[str, Tensor]] = {"type": {}, "depth": {}, "all": {}}
    sizes: dict[str, dict[str, int]] = {"type": {}, "depth": {}, "all": {}}
    union, both, either = 0, torch.zeros(()), torch.zeros(())
    depth_of = _depths(modules)
    for name, module in modules.items():
        active_MN = module.masks().flatten(1).ne(0).cpu()
        per_gate, size = int(module.weights_per_gate), int(module.base.weight.numel())
        counts_M = active_MN.sum(1).double() * per_gate
        for way, group in (("type", kind_of(name)), ("depth", depth_of[name]), ("all", "")):
            used[way][group] = used[way].get(group, 0) + counts_M
            sizes[way][group] = sizes[way].get(group, 0) + size
        union += int(active_MN.any(0).sum()) * per_gate
        active = active_MN.double()  # counts up to 2^53 are exact
        shared_MM, own_M = active @ active.T, active.sum(1)
        both = both + shared_MM
        either = either + own_M[:, None] + own_M[None, :] - shared_MM
    shares = {
        way: {group: tuple((own / sizes[way][group]).tolist()) for group, own in groups.items()}
        for way, groups in used.items()
    }
    overlap_MM = (both / either.clamp(min=1)).fill_diagonal_(1.0)
    return Structure(
        by_type=dict(sorted(shares["type"].items(), key=lambda own: _kind_order(own[0]))),
        by_depth=dict(sorted(shares["depth"].items(), key=lambda own: _depth_order(own[0]))),
        total=shares["all"][""],
        parameters=sizes["all"][""],
        union=union / sizes["all"][""],
        overlap=tuple(tuple(row) for row in overlap_MM.tolist()),
    )


def kind_of(name: str) -> str:
    """A module's layer type: the last part of its name, ``norms`` for every norm."""
    kind = name.rsplit(".", 1)[-1]
    return NORMS if re.search(r"norm|^ln_", kind) else kind


def _depths(names: Iterable[str]) -> dict[str, str]:
    """{module name: the number of its layer, ``outside`` if it has none}.

    In an encoder-decoder both count from 0: ``encoder 0``, ``decoder 0``.
    """
    found = {}
    halves = {half for name in names for half in _HALVES if half in name.split(".")}
    for name in names:
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        half = next((half for half in _HALVES if half in name.split(".")), "")
        prefix = f"{half} " if len(halves) == 2 else ""
        found[name] = f"{prefix}{number.group(1)}" if number else OUTSIDE
    return found


def _kind_order(kind: str) -> tuple[int, str]:
    if kind == NORMS:
        return len(KINDS) + 1, kind
    return (KINDS.index(kind) if kind in KINDS else len(KINDS)), kind


def _depth_order(depth: str) -> tuple[bool, bool, int]:
    number = depth.rsplit(" ", 1)[-1]
    return depth == OUTSIDE, depth.startswith(_HALVES[1]), int(number) if number.isdigit() else 0
