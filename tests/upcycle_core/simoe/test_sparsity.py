"""Sparsity and overlap of masks against sums over single gates."""

import itertools

import pytest
import torch

from tests.upcycle_core.simoe.grown import all_masks, grow, grown, save_dense, upcycled
from upcycle_core.errors import InputError
from upcycle_core.simoe.model import gated_modules
from upcycle_core.simoe.prune import prune
from upcycle_core.simoe.sparsity import (
    close_deficit,
    expected_sparsity,
    mean_overlap,
    open_surplus,
    overlap,
    realised_sparsity,
)

WAYS = ("mean", "use", "union")
USE = (0.625, 0.25, 0.125)
"""Mean coefficients of three experts, in whole parts of a power of two."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("dense"))


def slow_parameters(model):
    """{layer: which parameters of its delta are masked, [M, parameters] bool}."""
    found = {}
    for name, z in all_masks(model).items():
        delta = gated_modules(model)[name].delta
        whole = z if z.dim() > delta.dim() else z[:, None].expand(len(z), *delta.shape)
        found[name] = whole.reshape(len(z), -1) == 0
    return found


def slow_sparsity(model):
    zeros = list(slow_parameters(model).values())
    every = torch.cat([z.flatten() for z in zeros])
    shared = torch.cat([z.all(0) for z in zeros])
    return every.double().mean().item(), shared.double().mean().item()


@pytest.mark.parametrize("masks", ["neurons", "parameters"])
def test_zeros_are_weighted_by_parameters(dense, masks):
    model = grown(dense, experts=3, masks=masks)
    found = realised_sparsity(model)
    assert (found.mean, found.union) == pytest.approx(slow_sparsity(model), abs=1e-12)
    assert found.use == found.mean


@pytest.mark.parametrize("masks", ["neurons", "parameters"])
def test_zeros_count_by_the_use_of_their_experts(dense, masks):
    model = grown(dense, experts=3, masks=masks)
    zeros = torch.cat(list(slow_parameters(model).values()), dim=1).double()
    wanted = sum(use * float(own.mean()) for use, own in zip(USE, zeros, strict=True))
    assert realised_sparsity(model, USE).use == pytest.approx(wanted, abs=1e-12)
    assert realised_sparsity(prune(model), USE).use == pytest.approx(wanted, abs=1e-12)
    for module in gated_modules(model).values():
        module.log_phi.data[0] = -3.0
    assert realised_sparsity(model, (1.0, 0.0, 0.0)).use == pytest.approx(1, abs=1e-5)


def test_a_pruned_model_is_as_sparse_and_overlaps_as_much(dense):
    model = grown(dense, experts=3)
    small = prune(model)
    assert realised_sparsity(small) == realised_sparsity(model)
    assert torch.equal(overlap(small), overlap(model))
    with pytest.raises(InputError, match="it is pruned"):
        expected_sparsity(small)


@pytest.mark.parametrize("masks", ["neurons", "parameters"])
def test_overlap_is_the_jaccard_index_of_mask_entries(dense, masks):
    model = grown(dense, experts=3, masks=masks)
    used = torch.cat([z.flatten(1) != 0 for z in all_masks(model).values()], dim=1)
    slow = [[((a & b).sum() / (a | b).sum()).item() for b in used] for a in used]
    torch.testing.assert_close(
        overlap(model), torch.tensor(slow, dtype=torch.float64), atol=1e-6, rtol=0
    )
    pairs = [slow[i][j] for i, j in itertools.combinations(range(3), 2)]
    assert mean_overlap(model) == pytest.approx(sum(pairs) / 3, abs=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_missing_is_closed_where_gates_are_nearest_to_it(dense, way):
    model = grown(dense, experts=3)
    before = [m.log_phi.detach().clone() for m in gated_modules(model).values()]
    weights = [m.weights_per_gate for m in gated_modules(model).values()]
    whole = sum(
        w * (p.numel() if way == "mean" else p.shape[1])
        for w, p in zip(weights, before, strict=True)
    )
    by_use = {m: use if way == "use" else 1 for m, use in enumerate(USE)}
    places = []  # (log phi that decides, parameters, layer, gates)
    for layer, (log_phi, weight) in enumerate(zip(before, weights, strict=True)):
        for i in range(log_phi.shape[1]):
            own = [(m, i) for m in range(3)]
            for gates in [own] if way == "union" else [[gate] for gate in own]:
                score = max(float(log_phi[gate]) for gate in gates)
                places.append((score, weight * by_use[gates[0][0]], layer, gates))
    closed = sum(w for score, w, *_ in places if score <= -1.5986)
    wanted = {layer: set() for layer in range(len(before))}
    for score, weight, layer, gates in sorted(places, key=lambda place: place[0]):
        if closed >= 0.7 * whole:
            break
        if score > -1.5986:
            closed += weight
            wanted[layer] |= set(gates)
    close_deficit(model, 0.7, way, use_M=USE)
    for layer, (module, old) in enumerate(zip(gated_modules(model).values(), before, strict=True)):
        for gate in ((m, i) for m in range(3) for i in range(old.shape[1])):
            new, was = module.log_phi[gate].item(), old[gate].item()
            assert new == pytest.approx(min(was, -1.5987) if gate in wanted[layer] else was)
    assert 0.7 <= getattr(realised_sparsity(model, USE), way) < 0.71


def test_experts_without_anything_do_not_overlap(dense):
    model = upcycled(dense, experts=2)
    for module in gated_modules(model).values():
        module.log_phi.data.fill_(-3)
    assert overlap(model).tolist() == [[1, 0], [0, 1]]
    assert realised_sparsity(model).union == 1


@pytest.mark.parametrize("way", WAYS)
def test_expected_sparsity_and_its_gradient_are_those_of_equation_8(dense, way):
    model = grown(dense, experts=3).double()
    shift = 2 / 3 * torch.tensor(0.1 / 1.1, dtype=torch.float64).log()
    layers = list(gated_modules(model).values())

    def slow():
        total = sum(m.delta.numel() for m in layers)
        zeros = 0
        for module in layers:
            closed = 1 - 1 / (1 + torch.exp(shift - module.log_phi))
            each = {
                "mean": closed.mean(0),
                "use": sum(use * own for use, own in zip(USE, closed, strict=True)),
                "union": closed[0] * closed[1] * closed[2],
            }[way]
            zeros = zeros + (each * module.delta.numel() / each.numel()).sum()
        return zeros / total

    parameters = [module.log_phi for module in layers]
    found, wanted = expected_sparsity(model, way, use_M=USE), slow()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-10)
    for left, right in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True
    ):
        torch.testing.assert_close(left, right, atol=1e-10, rtol=1e-6)


def test_a_new_model_expects_five_percent_and_has_none(dense):
    model = upcycled(dense, experts=4, initial_spread=0.0)
    assert expected_sparsity(model).item() == pytest.approx(0.05, abs=1e-4)
    assert expected_sparsity(model, "union", rooted=True).item() == pytest.approx(0.05, abs=1e-4)
    assert realised_sparsity(model).mean == 0


def test_the_root_agrees_where_gates_are_decided_and_pulls_where_all_are_open(dense):
    model = upcycled(dense, experts=8, initial_spread=0.0)
    slopes = []
    for rooted in (False, True):
        model.zero_grad()
        expected_sparsity(model, "union", rooted=rooted).backward()
        slopes.append(-sum(m.log_phi.grad.sum().item() for m in gated_modules(model).values()))
    assert slopes[0] < 1e-8  # 8 * 0.05^7 * 0.0475 * 8, of a sum of shares that is one
    assert slopes[1] == pytest.approx(0.0475, abs=1e-3)
    for module in gated_modules(model).values():
        module.log_phi.data = torch.where(torch.rand_like(module.log_phi) < 0.8, -30.0, 30.0)
    exact, root = (expected_sparsity(model, "union", rooted=r).item() for r in (False, True))
    assert root == pytest.approx(exact, abs=0.12)  # one open gate of eight leaves 1e-7 ^ (1 / 8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tau", [0.0, 0.2, 0.5, 0.9999])
def test_only_what_is_closed_beyond_tau_is_opened(dense, way, tau):
    model, use = grown(dense, experts=2), (0.75, 0.25)
    for module in gated_modules(model).values():
        module.log_phi.data -= 0.8  # about two thirds closed, nearly half of the places
    before = {name: module.log_phi.clone() for name, module in gated_modules(model).items()}
    earlier = getattr(realised_sparsity(model, use), way)
    open_surplus(model, tau, way, use_M=use)
    found = getattr(realised_sparsity(model, use), way)
    if earlier < tau:
        assert found == earlier
    else:
        assert tau <= found < tau + 1e-2  # one gate of at most 48 of some 13000 parameters
    opened, still = [], []
    for name, module in gated_modules(model).items():
        changed = module.log_phi != before[name]
        assert (module.masks()[changed] > 0).all()
        old, new = (
            (before[name], module.log_phi)
            if way != "union"
            else (before[name].amax(0), module.log_phi.amax(0))
        )
        opened += old[(old <= -1.5987) & (new > -1.5985)].tolist()
        still += old[new <= -1.5987].tolist()
    assert (earlier >= tau) == bool(opened)
    if opened and still:
        assert max(still) <= min(opened)
    again = {name: module.log_phi.clone() for name, module in gated_modules(model).items()}
    open_surplus(model, tau, way, use_M=use)
    assert all(torch.equal(again[n], m.log_phi) for n, m in gated_modules(model).items())


def test_masks_that_are_not_finite_are_named(dense):
    model = grow(upcycled(dense, experts=2))
    gated_modules(model)["model.model.layers.1.mlp.down_proj"].log_phi.data[1, 3] = float("nan")
    with pytest.raises(FloatingPointError, match=r"layers\.1\.mlp\.down_proj"):
        realised_sparsity(model)
