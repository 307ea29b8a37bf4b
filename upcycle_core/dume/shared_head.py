"""One head for all experts, fitted to the logits of each.

An average of heads is what all experts have in common; what each has learnt beside it is lost. But
a repaired expert may map its final states as it likes, its last down projection writes them. So
head and maps are sought together, by alternating least squares, of which either half has a closed
form:

    min_W,P  sum_d sum_v w_dv ||(W_v P_d - W_dv) C_d^1/2||^2 + rho sum_d g_d ||P_d - 1||^2

with w_dv how often domain d's text has token v, W_dv the rows of expert d's head, and C_d the
second moment of its final states on its domain's calibration text. A row of W is the solution of
one H x H system, as in RegMean (arXiv 2212.09849, equation 2) but for weights and maps; P_d, at the
end, is the repair's (``dume.repair.HeadTarget``). No paper of it is known to us.

Shapes: V vocabulary, H hidden size, D domains, R rows at a time.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from upcycle_core.activations.moments import add_gram, mirror
from upcycle_core.activations.stream import LayerStream
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.dume.calibration import calibration_batches
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.errors import Fault, InputError
from upcycle_core.precision import weights_type as type_in
from upcycle_core.progress import Progress, Silent

ROUNDS = 6
RHO = 0.1
"""Of the mean diagonal of the maps' systems: how near they stay to doing nothing, which an FFN can
do best. 0 to 0.1 differ by 0.15 points on the demo, two rounds and twenty by less."""
ROWS_AT_ONCE = 1 << 13
ALIKE = 64
"""Rows of one group at the least, on average: a group costs an inverse, a row some twenty steps."""
RAREST = 2.0**-20
"""What a share counts as where it is less: no domain's text is that long."""
EXACT = 1e-8
"""Residual of a row's system, of its right side, at which conjugate gradients end."""
STEPS = 100
TINY = 1e-9
"""Added to the rows' systems, of their mean diagonal: states need not fill all dimensions."""
SMALLEST = torch.finfo(torch.float64).tiny


def final_moments(
    expert: Path,
    corpus: Path,
    *,
    config: StatisticsConfig,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Tensor:
    """C_d: the mean of n n^T over a domain's calibration tokens, n what its expert's head reads.

    Args:
        expert: A dense checkpoint; it is computed layer by layer.
        corpus: A split's directory.
        config: How much text is read, and in which arithmetic.
        device: Where layers are computed.
        progress: Hears of every layer.

    Returns:
        [H, H] fp64.

    Raises:
        InputError: The states are not finite.
    """
    reader = CheckpointReader(expert, field="expert")
    dtype = type_in(config.precision, device)
    stream = LayerStream(expert, reader.tensor, dtype=dtype, device=device)
    batches = calibration_batches(corpus, config)
    texts = stream.start([batch.input_ids for batch in batches])
    progress = progress or Silent()
    progress.start("states before the head", stream.layers, "layers")
    for index in range(stream.layers):
        with stream.layer(index):
            for text in texts:
                text.hidden_BSH = stream.through(text)
        progress.advance()
    norm, rows = stream.final_norm(), 0
    size = stream.model.config.hidden_size
    total = torch.zeros(size, size, dtype=torch.float64, device=device)
    with torch.inference_mode():
        for batch, text in zip(batches, texts, strict=True):
            counted = batch.counted.bool().flatten().to(device)
            n_TH = norm(text.hidden_BSH).flatten(0, 1)[counted]
            add_gram(total, n_TH)
            rows += len(n_TH)
    mirror(total)
    if not torch.isfinite(total).all():
        remedy = "its last states hold NaN or infinity on its calibration text: check its weights"
        raise InputError(Fault("expert", str(expert), remedy))
    return total.cpu() / rows


def fitted_head(
    heads: Sequence[Tensor],
    frequencies_DV: Tensor,
    moments: Sequence[Tensor],
    *,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> Tensor:
    """The head W [V, H] that does best by every expert, each after a map of its states.

    It begins with the rows weighted by frequencies, and holds W alone beside what a few thousand
    rows need.

    Args:
        heads: W_d [V, H] of every expert.
        frequencies_DV: w_dv fp64, above 0.
        moments: C_d [H, H] fp64.
        rounds: Of maps and rows in turn.
        progress: Hears of every round.

    Returns:
        fp32.
    """
    progress = progress or Silent()
    progress.start("fitting the head", rounds, "rounds")
    merged, shares_DV = _weighted(heads, frequencies_DV), _shares(frequencies_DV)
    groups = _alike(shares_DV)
    for _ in range(rounds):
        maps = [_map(merged, head, w_V) for head, w_V in zip(heads, frequencies_DV, strict=True)]
        right = [C @ P.T for P, C in zip(maps, moments, strict=True)]
        left = [P @ r for P, r in zip(maps, right, strict=True)]
        tiny = TINY * sum(m.diagonal().mean() for m in left) * torch.eye(len(left[0])).double()
        left = [m + tiny for m in left]
        for rows in groups:
            weights = shares_DV[:, rows]
            owns = (head[rows].double() @ r for head, r in zip(heads, right, strict=True))
            wanted, start = _sum(weights, owns), merged[rows].double()
            merged[rows] = _solved(left, weights, wanted, start).float()
        progress.advance()
    return merged


def _weighted(heads: Sequence[Tensor], frequencies_DV: Tensor) -> Tensor:
    """Rows weighted by frequencies, [V, H] fp32."""
    merged = torch.empty(heads[0].shape)
    for rows in _slices(len(merged)):
        owns = (head[rows].double() for head in heads)
        merged[rows] = _sum(_shares(frequencies_DV[:, rows]), owns).float()
    return merged


def _map(merged: Tensor, own: Tensor, w_V: Tensor) -> Tensor:
    """P_d [H, H]: what brings logits under ``merged`` nearest to the expert's, up to a constant."""
    size = merged.shape[1]
    gram, cross = (torch.zeros(size, size, dtype=torch.float64) for _ in range(2))
    sums = [torch.zeros(size, dtype=torch.float64) for _ in range(2)]
    for rows in _slices(len(merged)):
        m, e, w = merged[rows].double(), own[rows].double(), w_V[rows]
        weighed = (m * w[:, None]).T
        gram += weighed @ m
        cross += weighed @ e
        sums = [total + w @ x for total, x in zip(sums, (m, e), strict=True)]
    gram -= torch.outer(sums[0], sums[0]) / w_V.sum()
    cross -= torch.outer(sums[0], sums[1]) / w_V.sum()
    ridge = RHO * gram.trace() / size * torch.eye(size, dtype=torch.float64)
    return torch.linalg.solve(gram + ridge, cross + ridge)


def _alike(shares_DV: Tensor) -> list[Tensor]:
    """Rows in groups of much the same weights: systems of a group have spectra alike.

    Weights of a group lie within a factor of 2^width of each other, where each is first held
    against the row's largest; the width is the smallest that leaves groups large enough.
    """
    levels_DV = (shares_DV / shares_DV.amax(0)).clamp_min(RAREST).log2()
    width = 1.0
    while True:
        kinds, kind_V = torch.unique((levels_DV / width).round(), dim=1, return_inverse=True)
        if kinds.shape[1] * ALIKE <= len(kind_V) or kinds.shape[1] == 1:
            break
        width *= 2
    ordered = kind_V.argsort(stable=True).split(torch.bincount(kind_V).tolist())
    return [rows for group in ordered for rows in group.split(ROWS_AT_ONCE)]


def _solved(
    left: Sequence[Tensor], weights_DR: Tensor, wanted_RH: Tensor, start_RH: Tensor
) -> Tensor:
    """Rows x with sum_d w_dr x M_d = wanted, by conjugate gradients, each row for itself.

    They are preconditioned by the system of the rows' mean weights: of rows whose weights are at
    most a factor c of that mean, up or down, the condition is c^2, whatever the M_d.

    Args:
        left: M_d [H, H], positive definite.
        weights_DR: Of a sum of 1 over D; of rows that are alike.
        wanted_RH: The right sides.
        start_RH: Where the search begins; written to.
    """
    mean_D = weights_DR.mean(1)
    factor = torch.linalg.cholesky(sum(w * m for w, m in zip(mean_D, left, strict=True)))
    inverse = torch.cholesky_inverse(factor)

    def apply(x_RH: Tensor) -> Tensor:
        return _sum(weights_DR, (x_RH @ m for m in left))

    x, residual = start_RH, apply(start_RH).neg_().add_(wanted_RH)
    direction = residual @ inverse
    product, z = _dots(residual, direction), torch.empty_like(direction)
    bound = EXACT**2 * _dots(wanted_RH, wanted_RH)
    for _ in range(STEPS):
        if bool((_dots(residual, residual) <= bound).all()):
            break
        pushed = apply(direction)
        step = product / _dots(direction, pushed).clamp_min(SMALLEST)
        x.addcmul_(step, direction)
        residual.addcmul_(step, pushed, value=-1)
        torch.mm(residual, inverse, out=z)
        before, product = product, _dots(residual, z)
        direction.mul_(product / before.clamp_min(SMALLEST)).add_(z)
    return _finished(left, weights_DR, wanted_RH, x, (_dots(residual, residual) > bound)[:, 0])


def _finished(
    left: Sequence[Tensor], weights_DR: Tensor, wanted_RH: Tensor, x_RH: Tensor, open_R: Tensor
) -> Tensor:
    """Rows that conjugate gradients have not solved, by a factor of each one's own system."""
    for row in open_R.nonzero().flatten().tolist():
        system = sum(w * m for w, m in zip(weights_DR[:, row], left, strict=True))
        factor = torch.linalg.cholesky(system)
        x_RH[row] = torch.cholesky_solve(wanted_RH[row, :, None], factor).flatten()
    return x_RH


def _sum(weights_DR: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """sum_d w_dr x_d[r] of parts [R, H], one at a time."""
    total: Tensor | None = None
    for weights_R, part_RH in zip(weights_DR, parts, strict=True):
        if total is None:
            total = weights_R[:, None] * part_RH
        else:
            total.addcmul_(weights_R[:, None], part_RH)
    assert total is not None  # there are experts
    return total


def _dots(one_RH: Tensor, other_RH: Tensor) -> Tensor:
    """Row by row, [R, 1]."""
    return torch.einsum("rh,rh->r", one_RH, other_RH)[:, None]  # holds no products


def _shares(frequencies_DR: Tensor) -> Tensor:
    """Columns of a sum of 1."""
    return frequencies_DR / frequencies_DR.sum(0)


def _slices(count: int) -> list[slice]:
    return [slice(start, start + ROWS_AT_ONCE) for start in range(0, count, ROWS_AT_ONCE)]
