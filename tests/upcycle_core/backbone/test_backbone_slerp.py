import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.upcycle_core.backbone.sphere import arc, karcher
from upcycle_core.backbone import slerp as module
from upcycle_core.backbone.slerp import slerp, spherical_mean
from upcycle_core.errors import InputError

FOLDER = Path(__file__).parents[2] / "golden" / "symphony"
GOLDEN = json.loads((FOLDER / "slerp.json").read_text())


@pytest.fixture(autouse=True)
def one_thread():
    """Sums over several threads differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("case", sorted(GOLDEN["t"]))
def test_slerp_is_mergekits_to_the_bit(case):
    golden = load_file(FOLDER / "slerp.safetensors")
    result = slerp(golden[f"{case}.first"], golden[f"{case}.second"], GOLDEN["t"][case])
    assert result.dtype == golden[f"{case}.result"].dtype
    assert torch.equal(result, golden[f"{case}.result"])


def mixed(elements: int, seed: int) -> Tensor:
    """Numbers between -1 and 1 that no random generator of any version is needed for."""
    i = torch.arange(elements) * 2654435761 + seed * 40503
    return (((i ^ (i >> 13)) % 65521).double() / 32760.5 - 1).float()


def test_slerp_of_a_large_tensor_is_cut_where_mergekit_cuts():
    large = GOLDEN["large"]
    first, second = mixed(large["elements"], 7), mixed(large["elements"], 107)
    result = slerp(first, second + 0.25 * first, large["t"])
    assert hashlib.sha256(result.numpy().tobytes()).hexdigest() == large["sha256"]


def test_slerp_keeps_inputs_and_shape_and_takes_strided_tensors():
    first, second = random(6, 4, seed=0).T, random(4, 6, seed=1)
    copies = first.clone(), second.clone()
    assert torch.equal(slerp(first, second, 0.3), slerp(*copies, 0.3))
    assert torch.equal(first, copies[0])
    assert torch.equal(second, copies[1])
    assert slerp(torch.zeros(0, 3), torch.zeros(0, 3), 0.5).shape == (0, 3)


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("mix", [-3.0, -0.5, 0.0, 1.0, 30.0, 1e4])
def test_the_spherical_mean_of_two_is_slerp(t, mix):
    first = random(30, 20, seed=0)
    second = 5 * (mix * first + random(30, 20, seed=1))
    result = spherical_mean([first, second], [1 - t, t])
    scale = float(max(first.abs().max(), second.abs().max()))
    torch.testing.assert_close(result, arc(first, second, t), rtol=0, atol=1e-12 * scale)
    if mix < 30:  # beyond, mergekit's is linear
        torch.testing.assert_close(result, slerp(first, second, t), rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("weights", [[0.25] * 4, [0.1, 0.2, 0.3, 0.4]])
@pytest.mark.parametrize("shared", [0.0, 2.0])
def test_the_spherical_mean_of_many_is_the_point_where_all_pulls_cancel(weights, shared):
    common = random(15, 8, seed=9)
    models = [(i + 1) * (random(15, 8, seed=i) + shared * common) for i in range(4)]
    mean, expected = karcher(models, weights)
    result = spherical_mean(models, weights)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-11)
    units = [v / v.norm() for v in models]
    direction = spherical_mean(units, weights)
    torch.testing.assert_close(direction.flatten(), mean, rtol=0, atol=1e-12)
    assert float(direction.norm()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_order_of_the_models_changes_no_bit(dtype):
    models = [random(9, 7, seed=i, dtype=dtype) for i in range(3)]
    models.append(models[0].flip(0))  # of the same norm
    weights = [0.3, 0.1, 0.4, 0.2]
    expected = spherical_mean(models, weights)
    for order in itertools.permutations(range(4)):
        result = spherical_mean([models[i] for i in order], [weights[i] for i in order])
        assert torch.equal(result, expected)


def test_the_same_tensor_with_other_weights_may_come_in_any_order():
    one, other = random(9, seed=0), random(9, seed=1)
    results = [
        spherical_mean([one, one, other], [0.1, 0.6, 0.3]),
        spherical_mean([one, other, one], [0.6, 0.3, 0.1]),
    ]
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], arc(one, other, 0.3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_models_come_out_as_they_are(dtype):
    one = random(9, 7, seed=0, dtype=dtype)
    tolerance = 1e-15 if dtype == torch.float64 else 0.0  # the last bit of fp64
    torch.testing.assert_close(spherical_mean([one] * 3), one, rtol=tolerance, atol=0)
    assert torch.equal(spherical_mean([one]), one)


def test_models_of_weight_zero_are_not_looked_at():
    one, other = random(9, seed=0), random(9, seed=1)
    broken = torch.full((9,), torch.nan, dtype=torch.float64)
    result = spherical_mean([one, broken, other], [2.0, 0.0, 2.0])
    assert torch.equal(result, spherical_mean([one, other]))


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_values_whose_squares_leave_fp64_have_a_mean(scale):
    one, other = random(9, seed=0), random(9, seed=1)
    result = spherical_mean([one * scale, other * scale])
    torch.testing.assert_close(result / scale, arc(one, other, 0.5), rtol=0, atol=1e-12)


def test_pieces_change_the_mean_by_rounding_alone(monkeypatch):
    models = [random(11, 13, seed=i) for i in range(3)]
    whole = spherical_mean(models)
    monkeypatch.setattr(module, "PIECE", 10)
    torch.testing.assert_close(spherical_mean(models), whole, rtol=0, atol=1e-14)


def test_opposite_tensors_have_no_mean():
    one, other = random(9, 7, seed=0), random(9, 7, seed=1)
    for second, weights in [(-one, None), (-3 * one, [0.9, 0.1]), (0.01 * other - one, None)]:
        with pytest.raises(InputError, match=r"layer\.q_proj = 'antipodal'.*opposite directions"):
            spherical_mean([one, second], weights, field="layer.q_proj")


def test_two_opposite_tensors_and_a_third_have_a_mean():
    one, other = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 2.0, 0.0])
    result = spherical_mean([one, -one, other], [0.1, 0.1, 0.8])
    torch.testing.assert_close(result, other, rtol=0, atol=1e-6)  # the pulls of the two cancel


def test_zeros_have_no_direction():
    one = random(9, seed=0)
    with pytest.raises(InputError, match=r"q_proj\[1\] = 'zeros': has no direction"):
        spherical_mean([one, torch.zeros_like(one), one], field="q_proj")
    assert not spherical_mean([torch.zeros(3), torch.zeros(3)]).any()
    assert spherical_mean([torch.zeros(0, 3)] * 2).shape == (0, 3)


def test_what_is_not_finite_is_named():
    broken = torch.tensor([1.0, torch.nan])
    with pytest.raises(InputError, match=r"q_proj\[1\] = nan: holds NaN or infinity"):
        spherical_mean([torch.ones(2), broken], field="q_proj")


def test_other_shapes_types_and_weights_are_refused():
    one = torch.ones(3)
    for others in ([torch.ones(4)], [torch.ones(3, dtype=torch.bfloat16)]):
        for call in (lambda o: spherical_mean([one, *o]), lambda o: slerp(one, *o, 0.5)):
            with pytest.raises(InputError, match=r"tensor\[1\] = .*differs from the first's \[3\]"):
                call(others)
    with pytest.raises(InputError, match="at least one model"):
        spherical_mean([])
    for weights in ([1.0], [1.0, -1.0], [0.0, 0.0], [1.0, torch.inf], [1.0, torch.nan]):
        with pytest.raises(InputError, match=r"tensor\.weights = .*give 2 finite numbers"):
            spherical_mean([one, one], weights)
    with pytest.raises(InputError, match=r"tensor\.t = 1\.5: lies outside 0 to 1"):
        slerp(one, one, 1.5)
