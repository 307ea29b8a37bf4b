"""Which neuron of a model stands where: one linear assignment problem (Symphony-MoE, Eqs. 2 to 4).

I neurons. Places are numbered as the anchor's neurons.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from upcycle_core.activations.cross import Similarity
from upcycle_core.architectures.axes import along, axes_of, layer_of
from upcycle_core.architectures.family import Family
from upcycle_core.backbone.rewrite import Transform
from upcycle_core.errors import raise_faults
from upcycle_core.symphony.checks import Solver, solver_faults


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A permutation of one model's neurons, and what it is worth.

    Args:
        order: [I] int64, place to the neuron that comes to stand there.
        aligned: Places whose neuron was chosen for its similarity.
        before: Mean similarity of the anchor's neurons to those of the same number.
        after: Mean similarity to those that stand there now; dead pairs count as they are in the
            similarity's matrix (zero for cosine and correlation).
        dead_anchor: Neurons of the anchor without variance.
        dead: Neurons of the model without variance.
    """

    order: Tensor
    aligned: int
    before: float
    after: float
    dead_anchor: int
    dead: int

    @property
    def moved(self) -> int:
        """How many neurons stand at another place than before."""
        return int((self.order != torch.arange(len(self.order))).sum())


def assign(
    similarity: Similarity, *, fraction: float = 1.0, solver: Solver = "scipy"
) -> Assignment:
    """Find the permutation of the second stream's neurons with the largest total similarity.

    "Align 80 % of the neurons" (Symphony-MoE, Table 3) is read so: the assignment is solved for
    all neurons, the ``fraction`` of pairs that are most similar is aligned, and the other neurons
    keep their order among the places that are left. Dead neurons, of which nothing is known, take
    no part in the problem: they are among those others, however large ``fraction`` is.

    Args:
        similarity: Anchor by model.
        fraction: Share of all I neurons that is aligned, 0 to 1; round(fraction I) at most.
        solver: Who solves it. Every solver finds the largest total; where several permutations
            have it, they may find different ones.

    Raises:
        InputError: The solver is not installed.
        ValueError: ``fraction`` is out of its range; a similarity is not finite.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction = {fraction}: choose 0 to 1")
    raise_faults(solver_faults(solver))
    matrix = similarity.matrix.cpu()
    alive, alive_anchor = ~similarity.dead_second.cpu(), ~similarity.dead_first.cpu()
    places, neurons = _solve(matrix, alive_anchor.nonzero()[:, 0], alive.nonzero()[:, 0], solver)
    best = matrix[places, neurons].argsort(descending=True, stable=True)
    best = best[: round(fraction * len(matrix))]
    order = _fill(len(matrix), places[best], neurons[best])
    every = torch.arange(len(matrix))
    return Assignment(
        order=order,
        aligned=len(best),
        before=float(matrix[every, every].mean()),
        after=float(matrix[every, order].mean()),
        dead_anchor=int((~alive_anchor).sum()),
        dead=int((~alive).sum()),
    )


def permute_neurons(family: Family, orders: Mapping[int, Tensor]) -> Transform:
    """Reorder gate and up rows, down columns, and MLP biases where a family has them (Eqs. 3, 4).

    The model computes what it computed.

    Args:
        family: Of the model.
        orders: Layer to [I] int64, place to the neuron that comes to stand there
            (``Assignment.order``); layers that are not there stay as they are.

    Returns:
        Name and tensor to the reordered tensor; exact in any type.

    Raises:
        ValueError: An order is no permutation.
    """
    for layer, order in orders.items():
        if order.sort().values.tolist() != list(range(len(order))):
            raise ValueError(f"layer {layer}: the order of its neurons is no permutation")

    def permute(name: str, tensor: Tensor) -> Tensor:
        layer = layer_of(name)
        if layer is None or layer not in orders:
            return tensor
        order = orders[layer]
        letters = axes_of(family, name)
        return along(tensor, letters, "I", lambda t, axis: t.index_select(axis, order))

    return permute


def _solve(
    matrix: Tensor, places: Tensor, neurons: Tensor, solver: Solver
) -> tuple[Tensor, Tensor]:
    """The pairs among ``places`` and ``neurons`` of largest total; some stay single if unequal."""
    chosen = matrix[places[:, None], neurons]
    if solver == "lapjv":
        rows, columns = _lapjv(chosen)
    else:
        found = linear_sum_assignment(chosen.numpy(), maximize=True)
        rows, columns = (torch.from_numpy(ids) for ids in found)
    return places[rows], neurons[columns]


def _lapjv(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of largest total, by a solver that minimises square problems alone."""
    height, width = chosen.shape
    size = max(height, width)
    # Rows or columns that fill it up cost the same wherever they end: they decide nothing.
    cost = torch.zeros(size, size, dtype=torch.float64)
    cost[:height, :width] = -chosen
    rows = torch.arange(height)
    if size == 0:
        return rows, rows
    columns = torch.as_tensor(import_module("lapjv").lapjv(cost.numpy())[0][:height]).long()
    real = columns < width
    return rows[real], columns[real]


def _fill(size: int, places: Tensor, neurons: Tensor) -> Tensor:
    """Put ``neurons`` at ``places`` and the others, in their order, at the free ones."""
    free_place = torch.ones(size, dtype=torch.bool)
    free_neuron = torch.ones(size, dtype=torch.bool)
    free_place[places], free_neuron[neurons] = False, False
    order = torch.empty(size, dtype=torch.int64)
    order[places] = neurons
    order[free_place] = free_neuron.nonzero()[:, 0]
    return order
