"""How sparse SIMoE's masks are: exact zeros, what they are expected to be, and their overlap.

Sparsity is weighted by parameters: a mask entry counts as often as there are expert parameters that
it decides about. M experts.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from upcycle_core.errors import Fault, InputError
from upcycle_core.simoe.model import gated_modules
from upcycle_core.simoe.model.gates_simoe import median, probability_nonzero

Way = Literal["mean", "use", "union"]
"""Zeros of all masks together, each expert alike or by its use, or places where every mask is zero.
"""
USES = 1 << 20
"""The use of an expert is counted in whole parts of this, so that sums of parameters are exact."""
JUST_OPEN = -1.5975
"""log phi of a gate that is nearly closed, but not zero: z = 0.00015."""
FARTHEST = -2.1
"""log phi below which no gate goes that may be opened again."""
JUST_CLOSED = -1.5987
"""log phi of a gate that is zero, and nearly open."""


@dataclass(frozen=True)
class Sparsity:
    """Share of expert parameters whose mask is exactly zero, in [0, 1].

    Args:
        mean: Of the parameters of all M experts.
        union: Of the parameters that experts share: those which no expert uses.
        use: As ``mean``, each expert counted by its use; as ``mean`` where no use is known.
    """

    mean: float
    union: float
    use: float


def shares(use_M: Sequence[float]) -> list[int]:
    """The use of each expert in whole parts; no expert counts for nothing.

    Args:
        use_M: Mean coefficients.
    """
    return [max(1, round(USES * use)) for use in use_M]


def realised_sparsity(model: nn.Module, use_M: Sequence[float] | None = None) -> Sparsity:
    """Sparsity of a model, trained or pruned, by its masks' exact zeros.

    Args:
        model: With experts.
        use_M: The mean coefficient of each expert; all alike by default.

    Raises:
        FloatingPointError: A mask is not finite; names it.
    """
    modules = gated_modules(model)
    counts = torch.stack([_used(module) for module in modules.values()]).cpu()
    for name, own in zip(modules, counts, strict=True):
        if not own[-1]:
            raise FloatingPointError(f"the masks of {name} are not finite")
    *experts, union = counts[:, :-1].sum(0).tolist()
    size = sum(module.base.weight.numel() for module in modules.values())
    whole = size * len(experts)
    mean = (whole - sum(experts)) / whole
    by_use = mean
    if use_M is not None:
        parts = shares(use_M)
        zeros = sum(part * (size - own) for part, own in zip(parts, experts, strict=True))
        by_use = zeros / (size * sum(parts))
    return Sparsity(mean=mean, union=(size - union) / size, use=by_use)


def expected_sparsity(
    model: nn.Module,
    way: Way = "mean",
    *,
    rooted: bool = False,
    use_M: Sequence[float] | None = None,
) -> Tensor:
    """Expected sparsity of a model that is trained: a scalar fp32 that gradients flow through.

    Each gate is open with P = sigmoid(log phi - beta log(-gamma / zeta)) (Eq. 8). ``mean``: one
    minus the mean of P; ``use``: one minus the mean of P, each expert weighed by ``use_M``, which
    is constant; ``union``: the mean of the product over experts of 1 - P.

    Args:
        model: With gates.
        way: Of what.
        rooted: Take the M-th root of each product. It is the same where gates are decided, and has
            a gradient where they are not: of eight gates that are open with P = 0.95 the product
            has a slope of 1e-9, the root one as ``mean`` has.
        use_M: The mean coefficient of each expert, for ``use``.

    Raises:
        InputError: The model is pruned.
    """
    total, zeros = 0, []
    for weight, log_phi in gate_stacks(model):
        closed = 1 - probability_nonzero(log_phi)
        if way == "mean":
            shared = closed.mean(1)
        elif way == "use":
            weights_M = closed.new_tensor(_parts(use_M))
            shared = torch.einsum("lmg,m->lg", closed, weights_M / weights_M.sum())
        elif rooted:
            shared = closed.clamp(min=1e-7).log().mean(1).exp()
        else:
            shared = closed.prod(1)
        zeros.append(weight * shared.sum())
        total += weight * shared.numel()
    return torch.stack(zeros).sum() / total


def overlap(model: nn.Module) -> Tensor:
    """Pairwise overlap of the experts' masks, [M, M] fp64 on the CPU, 1 on the diagonal.

    |z_i and z_j != 0| / |z_i or z_j != 0| (Section 4.3), Jaccard's index, over the mask entries of
    all layers together, each counted once. Two experts that use nothing overlap by 0.
    """
    both: Any = 0
    for module in gated_modules(model).values():
        used = (module.masks().detach().flatten(1) != 0).double()
        both = both + used @ used.T
    own = both.diagonal()
    either = own[:, None] + own[None] - both
    ratio = torch.where(either > 0, both / either.clamp(min=1), 0.0)
    return ratio.fill_diagonal_(1.0).cpu()


def mean_overlap(model: nn.Module) -> float:
    """Mean of ``overlap`` over pairs of unlike experts."""
    found = overlap(model)
    experts = len(found)
    return float((found.sum() - experts) / (experts * (experts - 1)))


@torch.no_grad()
def open_surplus(
    model: nn.Module, tau: float, way: Way, *, use_M: Sequence[float] | None = None
) -> None:
    """Open gates that are closed beyond what tau asks for, the ones that are nearest to being open.

    Afterwards the realised sparsity is what it was if it was below tau; else it is tau, or more by
    less than one gate. Of ``union``, a place is closed if all its M gates are, and its gate that is
    nearest to being open is opened.

    Args:
        model: It is trained; its log phi is changed in place, the same on every worker.
        tau: In [0, 1).
        way: What tau is about.
        use_M: The mean coefficient of each expert, for ``use``.
    """
    modules = _trained(model)
    scores, places, weights = _places(modules, way, use_M)
    sizes = [score.numel() for score in scores]
    closed = (median(places) == 0).nonzero().squeeze(1)
    needed = _least_count(tau, int(weights.sum()))
    if int(weights[closed].sum()) <= needed:
        return
    order = closed[places[closed].argsort(stable=True)]
    before = weights[order].cumsum(0) - weights[order]
    surplus = order[before >= needed]
    if not len(surplus):
        return
    opened = torch.zeros_like(places, dtype=torch.bool)
    opened[surplus] = True
    for module, score, chosen in zip(modules, scores, opened.split(sizes), strict=True):
        nearest = (module.log_phi == score) & chosen.view_as(score)
        module.log_phi.masked_fill_(nearest, JUST_OPEN)


@torch.no_grad()
def close_deficit(
    model: nn.Module, tau: float, way: Way, *, use_M: Sequence[float] | None = None
) -> None:
    """Close the gates that are nearest to it until the realised sparsity is tau, or more by a gate.

    Of ``union``, all gates of a place are closed whose nearest to being open is the least so.

    Args: as for ``open_surplus``.
    """
    modules = _trained(model)
    scores, places, weights = _places(modules, way, use_M)
    is_closed = median(places) == 0
    missing = _least_count(tau, int(weights.sum())) - int(weights[is_closed].sum())
    if missing <= 0:
        return
    still = (~is_closed).nonzero().squeeze(1)
    order = still[places[still].argsort(stable=True)]
    before = weights[order].cumsum(0) - weights[order]
    closing = torch.zeros_like(is_closed)
    closing[order[before < missing]] = True
    sizes = [score.numel() for score in scores]
    for module, score, chosen in zip(modules, scores, closing.split(sizes), strict=True):
        here = chosen.view_as(score).expand_as(module.log_phi)
        module.log_phi.copy_(
            torch.where(here, module.log_phi.clamp(max=JUST_CLOSED), module.log_phi)
        )


@torch.no_grad()
def keep_near(model: nn.Module) -> None:
    """Hold gates that are closed where they can be opened again.

    lambda, which pulls at closed gates too, would take them where their slope is nothing.
    """
    for module in _trained(model):
        module.log_phi.clamp_(min=FARTHEST)


def _places(
    modules: list[Any], way: Way, use_M: Sequence[float] | None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Of each module the log phi that decide whether a place is closed; all of them in a row; the
    parameters that each decides about, times the parts of its expert's use where that counts."""
    scores = [m.log_phi.amax(0) if way == "union" else m.log_phi for m in modules]
    places = torch.cat([score.flatten() for score in scores])
    each = torch.tensor([module.weights_per_gate for module in modules], device=places.device)
    sizes = torch.tensor([score.numel() for score in scores], device=places.device)
    weights = each.repeat_interleave(sizes)
    if way == "use":
        parts_M = torch.tensor(_parts(use_M), device=places.device)
        gates = sizes // len(parts_M)  # an expert's, in a row
        weights = weights * torch.cat([parts_M.repeat_interleave(n) for n in gates.tolist()])
    return scores, places, weights


def _parts(use_M: Sequence[float] | None) -> list[int]:
    assert use_M is not None, "sparsity by use is asked for with the use of each expert"
    return shares(use_M)


def gate_stacks(model: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """Masks of layers that are alike, stacked, so that few calls see all of them.

    Yields:
        Parameters that a gate decides about, and what is trained of the masks [layers, M, gates].
        With a mask entry a parameter, one layer at a time.
    """
    alike: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for module in _trained(model):
        gates = module.log_phi.flatten(1)
        if module.by_parameter:
            yield module.weights_per_gate, gates[None]
        else:
            alike[module.weights_per_gate, *gates.shape].append(gates)
    for (weight, *_), layers in alike.items():
        yield weight, torch.stack(layers)


def _trained(model: nn.Module) -> list[Any]:
    modules = list(gated_modules(model).values())
    if not modules or not hasattr(modules[0], "log_phi"):
        remedy = "it is pruned, and has no gates to train; give the model as it is trained"
        raise InputError(Fault("model", type(model).__name__, remedy))
    return modules


def _used(module: Any) -> Tensor:
    """[M + 2] int64: parameters that each expert uses, that any uses, and whether all is finite."""
    masks = module.masks().detach().flatten(1)
    used = masks != 0
    counts_M = used.sum(1) * module.weights_per_gate
    union = used.any(0).sum() * module.weights_per_gate
    return torch.cat([counts_M, union[None], masks.isfinite().all()[None].long()])


def _least_count(tau: float, whole: int) -> int:
    """The smallest count whose share of ``whole`` is tau or more, as floats compare."""
    count = max(0, math.ceil(tau * whole) - 1)
    while count / whole < tau:
        count += 1
    return count
