import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from upcycle_core.ders.model import deltas_ders
from upcycle_core.ders.model.deltas_ders import Delta, SparseDelta, index_dtype, make_delta, unpack

D, OUT, IN = 3, 11, 14
CODECS = {
    "low rank": {"codec": "low_rank", "rank": 2},
    "low rank, by expert": {"codec": "low_rank", "rank": 90},
    "thin": {"codec": "sparse", "drop_rate": 0.9},
    "thick": {"codec": "sparse", "drop_rate": 0.4},
    "8 bits": {"codec": "quantised", "bits": 8},
    "4 bits, groups": {"codec": "quantised", "bits": 4, "group_size": 4},
    "2 bits": {"codec": "quantised", "bits": 2},
    "1 bit, groups": {"codec": "quantised", "bits": 1, "group_size": 5},
}
FAST = [name for name, how in CODECS.items() if how["codec"] != "quantised"]


def random_delta(how: dict, dtype=torch.float64, shape=(D, OUT, IN)) -> Delta:
    torch.manual_seed(0)
    delta = make_delta(*shape, bias=False, **how).to(dtype)
    for tensor in [*delta.parameters(), *delta.buffers()]:
        if tensor.is_floating_point():
            tensor.data.normal_()
        elif how["codec"] == "quantised":
            tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    return delta


def slow_matrix(delta: Delta, how: dict, expert: int) -> Tensor:
    """One delta entry by entry, from the layout of its file."""
    found = torch.zeros(delta.outputs, delta.inputs, dtype=torch.float64)
    tensors = dict(delta.state_dict())
    for o in range(delta.outputs):
        for i in range(delta.inputs):
            if how["codec"] == "low_rank":
                a, b = tensors["a"][expert, :, i], tensors["b"][expert, o]
                found[o, i] = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
            elif how["codec"] == "quantised":
                bits, size = how["bits"], how.get("group_size") or delta.inputs
                row = sum(int(c) << 8 * n for n, c in enumerate(tensors["codes"][expert, o]))
                code = row >> bits * i & 2**bits - 1
                level = 2 * code - 1 if bits == 1 else code - (2 ** (bits - 1) - 1)
                found[o, i] = level * float(tensors["scales"][expert, o, i // size])
    if how["codec"] == "sparse":
        for place, value in zip(tensors["indices"][expert], tensors["values"][expert], strict=True):
            found[divmod(int(place), delta.inputs)] = float(value)
    return found


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("case", CODECS)
def test_each_token_passes_through_its_own_delta(case, gradients):
    how = CODECS[case]
    delta, x = random_delta(how), torch.randn(9, IN, dtype=torch.float64)
    experts = torch.tensor([2, 0, 0, 2, 2, 0, 2, 0, 2])  # none goes through the second
    matrices = [slow_matrix(delta, how, expert) for expert in range(D)]
    expected = torch.stack([matrices[e] @ row for e, row in zip(experts, x, strict=True)])
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(delta(x, experts).detach(), expected)
        torch.testing.assert_close(delta.apply_one(x, 1).detach(), x @ matrices[1].T)
        assert delta(x[:0], experts[:0]).shape == (0, OUT)
    for expert in range(D):
        torch.testing.assert_close(delta.dense(expert).detach(), matrices[expert])


def gradients_of(delta: Delta, x: Tensor, experts: Tensor, gy: Tensor, *, dense: bool):
    """Of a loss, for x and for what is trained; through whole matrices if ``dense``."""
    x = x.clone().requires_grad_()
    if dense:
        y = torch.stack([delta.dense(int(e)) @ row for e, row in zip(experts, x, strict=True)])
    else:
        y = delta(x, experts)
    return torch.autograd.grad((y * gy).sum(), [x, *delta.parameters()])


@pytest.mark.parametrize("entries", [1 << 20, 40], ids=["one block", "blocks of two rows"])
@pytest.mark.parametrize("case", FAST)
def test_gradients_are_those_through_whole_matrices(monkeypatch, case, entries):
    monkeypatch.setattr(deltas_ders, "_BLOCK_ENTRIES", entries)
    delta = random_delta(CODECS[case])
    x, gy = torch.randn(8, IN, dtype=torch.float64), torch.randn(8, OUT, dtype=torch.float64)
    experts = torch.tensor([1, 0, 2, 2, 1, 0, 0, 1])
    fast = gradients_of(delta, x, experts, gy, dense=False)
    for found, expected in zip(fast, gradients_of(delta, x, experts, gy, dense=True), strict=True):
        torch.testing.assert_close(found, expected)


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest dense tensor that anything makes inside."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("drop_rate", [0.95, 0.6])
def test_training_sparse_values_makes_nothing_as_large_as_a_matrix(monkeypatch, drop_rate):
    monkeypatch.setattr(deltas_ders, "_BLOCK_ENTRIES", 1000)
    delta = random_delta({"codec": "sparse", "drop_rate": drop_rate}, shape=(2, 200, 100))
    x = torch.randn(6, 100, dtype=torch.float64, requires_grad=True)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with Sizes() as sizes, saved_tensors_hooks(pack, lambda tensor: tensor):
        delta(x, torch.tensor([0, 1, 0, 1, 1, 0])).sum().backward()
    values = delta.values.numel()
    assert delta.values.grad.shape == delta.values.shape
    assert max(kept) <= values  # the values and their positions, and the tokens
    assert sizes.largest <= max(values, 1200) < 200 * 100


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("case", CODECS)
def test_bf16_is_near_fp64(case, autocast):
    exact, dtype = random_delta(CODECS[case]), torch.float32 if autocast else torch.bfloat16
    delta = random_delta(CODECS[case]).to(dtype)
    x, experts = torch.randn(8, IN, dtype=torch.float64), torch.tensor([1, 0, 2, 2, 1, 0, 0, 1])
    near = x.to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = delta(near, experts)
        y.float().sum().backward()  # inside: autocast must not reach the sparse products
    assert y.dtype == torch.bfloat16
    expected = exact(x, experts).detach()
    # A bf16 number is right to 2^-9; products of these are sums of a few dozen.
    assert (y.detach() - expected).abs().max() <= 0.03 * expected.abs().max()
    assert near.grad.dtype == dtype


def test_a_new_delta_is_zero_and_its_places_are_drawn():
    torch.manual_seed(0)
    for how in ({"codec": "low_rank", "rank": 3}, {"codec": "sparse", "drop_rate": 0.9}):
        delta = make_delta(D, 40, 50, bias=True, **how)
        assert all(delta.dense(expert).abs().max() == 0 for expert in range(D))
        assert delta.bias.shape == (D, 40)
        x = torch.randn(5, 50)
        delta(x, torch.tensor([0, 1, 2, 0, 1])).sum().backward()
        trained = delta.b if how["codec"] == "low_rank" else delta.values
        assert trained.grad.abs().max() > 0
    assert isinstance(delta, SparseDelta)
    assert delta.indices.shape == (D, 200)
    assert delta.indices.dtype == torch.uint16
    places = delta.indices.long()
    assert (places[:, 1:] > places[:, :-1]).all()
    assert not torch.equal(places[0], places[1])
    assert places.float().mean() == pytest.approx(1000, rel=0.1)


def test_positions_take_the_smallest_type_that_holds_them():
    sizes = {256: torch.uint8, 257: torch.uint16, 65536: torch.uint16, 65537: torch.int32}
    sizes |= {2**31: torch.int32, 2**31 + 1: torch.int64}
    assert {size: index_dtype(size) for size in sizes} == sizes


def test_codes_are_packed_little_end_first():
    codes = torch.tensor([[0b11100100, 0b00000001]], dtype=torch.uint8)
    assert unpack(codes, 2, 5).tolist() == [[0, 1, 2, 3, 1]]
    assert unpack(codes, 4, 3).tolist() == [[4, 14, 1]]
    assert unpack(codes, 1, 9).tolist() == [[0, 0, 1, 0, 0, 1, 1, 1, 1]]
    assert unpack(codes, 8, 2).tolist() == [[228, 1]]
