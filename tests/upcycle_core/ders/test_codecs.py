import itertools
import math

import numpy as np
import pytest
import torch

from upcycle_core.ders.codec import Codec, codec_of, rank_of_energy, stored_codec
from upcycle_core.ders.config import CodecConfig

SHAPE = (13, 37)
KEY = (0, 1, "up_proj")
CONFIGS = {
    "sparse": CodecConfig(codec="sparse", drop_rate=0.7),
    "largest": CodecConfig(codec="sparse", drop_rate=0.7, keep="magnitude", rescale=False),
    "low rank": CodecConfig(codec="low_rank", rank=5),
    **{
        f"{bits} bits, {size}": CodecConfig(codec="quantised", bits=bits, group_size=size)
        for bits, size in itertools.product((8, 4, 2, 1), (None, 8, 100))
    },
}
EVERY = pytest.mark.parametrize("name", CONFIGS)
QUANTISED = pytest.mark.parametrize("name", [name for name in CONFIGS if "bit" in name])


def sparse(**settings) -> Codec:
    return codec_of(CodecConfig(codec="sparse", **settings))


def some_deltas(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))


def slow_decode(config: CodecConfig, tensors: dict, expert: int) -> np.ndarray:
    """A delta from its tensors, entry by entry, as the format's description has it."""
    found, (rows, columns) = np.zeros(SHAPE), SHAPE
    part = {name: tensor[expert].double().numpy() for name, tensor in tensors.items()}
    if config.codec == "sparse":
        for place, value in zip(part["indices"], part["values"], strict=True):
            found[int(place) // columns, int(place) % columns] = value
        return found
    if config.codec == "low_rank":
        return part["b"] @ part["a"]
    bits, size = config.bits, config.group_size or columns
    for row, column in itertools.product(range(rows), range(columns)):
        first = column * bits
        code = (int(part["codes"][row, first // 8]) >> (first % 8)) % 2**bits
        level = 2 * code - 1 if bits == 1 else code - (2 ** (bits - 1) - 1)
        found[row, column] = level * part["scales"][row, column // size]
    return found


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_as_promised_and_hold_as_many_numbers(name, dtype):
    codec = codec_of(CONFIGS[name])
    tensors = codec.encode(some_deltas(), dtype=dtype, key=KEY)
    assert codec.layout(3, SHAPE, dtype) == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    own = sum(t.numel() for n, t in tensors.items() if n in ("values", "a", "b"))
    assert codec.entries(3, SHAPE) == (own or 3 * math.prod(SHAPE))


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_is_what_the_format_means(name, dtype):
    config = CONFIGS[name]
    tensors = codec_of(config).encode(some_deltas(), dtype=dtype, key=KEY)
    again = stored_codec(codec_of(config).settings, 0, "up_proj")
    for expert in range(3):
        decoded = again.decode(tensors, SHAPE, expert)
        assert decoded.dtype == torch.float32
        # fp32 arithmetic of a product and a sum of at most 5 terms
        assert np.abs(decoded.numpy() - slow_decode(config, tensors, expert)).max() < 2e-6


@pytest.mark.parametrize(("drop_rate", "count"), [(0.0, 481), (0.7, 144), (0.99, 5), (0.9999, 1)])
def test_an_exact_count_of_entries_is_kept_and_scaled(drop_rate, count):
    deltas = some_deltas()
    codec = sparse(drop_rate=drop_rate)
    tensors = codec.encode(deltas, dtype=torch.float32, key=KEY)
    places = tensors["indices"].long()
    assert places.shape == (3, count)
    assert all(len(set(row.tolist())) == count for row in places)
    assert torch.equal(places, places.sort().values)
    kept = deltas.flatten(1).gather(1, places)
    torch.testing.assert_close(tensors["values"], kept / (1 - drop_rate), rtol=1e-6, atol=0)
    bare = sparse(drop_rate=drop_rate, rescale=False)
    assert torch.equal(bare.encode(deltas, dtype=torch.float32, key=KEY)["values"], kept)


def test_what_is_drawn_depends_on_seed_layer_matrix_and_expert_alone():
    deltas, codec = some_deltas(), sparse(drop_rate=0.9)

    def places(*key, of=deltas):
        return codec.encode(of, dtype=torch.float32, key=key)["indices"]

    first = places(0, 1, "up_proj")
    others = [places(1, 1, "up_proj"), places(0, 2, "up_proj"), places(0, 1, "gate_proj")]
    torch.manual_seed(3)
    assert torch.equal(places(0, 1, "up_proj", of=2 * deltas), first)
    assert torch.equal(places(0, 1, "up_proj", of=deltas[:2]), first[:2])
    assert not any(torch.equal(first, other) for other in others)
    assert not torch.equal(first[0], first[1])


def test_the_largest_entries_are_kept_and_of_equal_ones_the_first():
    deltas = some_deltas().mul(3).round()  # many of equal size
    codec = sparse(drop_rate=0.6, keep="magnitude", rescale=False)
    tensors = codec.encode(deltas, dtype=torch.float32, key=KEY)
    for row, places in zip(deltas.flatten(1).tolist(), tensors["indices"], strict=True):
        order = sorted(range(len(row)), key=lambda place: (-abs(row[place]), place))
        assert places.tolist() == sorted(order[: len(places)])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((16, 16), torch.uint8),
        ((1, 257), torch.uint16),
        ((256, 256), torch.uint16),
        ((1, 65537), torch.int32),
    ],
)
def test_indices_have_the_smallest_type_that_fits(shape, dtype):
    delta = torch.ones(1, *shape)
    tensors = sparse(drop_rate=0.0).encode(delta, dtype=torch.float32, key=KEY)
    assert tensors["indices"].dtype == dtype
    assert tensors["indices"].long().tolist() == [list(range(delta.numel()))]


@QUANTISED
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 1e-6)]
)
def test_quantised_entries_are_within_their_bound(name, dtype, scale):
    config, deltas = CONFIGS[name], some_deltas(scale)[:2]
    deltas[0, 4] = 0
    tensors = codec_of(config).encode(deltas, dtype=dtype, key=KEY)
    size = config.group_size or SHAPE[1]
    for expert, row, column in itertools.product(range(2), range(13), range(37)):
        group = deltas[expert, row, column // size * size :][:size].double().numpy()
        stored = float(tensors["scales"][expert, row, column // size])
        if config.bits == 1:
            # summed in fp32 and rounded to the type; half a spacing of fp16 next to zero is 2^-25
            relative = 1e-6 + float(torch.finfo(dtype).eps)
            assert math.isclose(stored, np.abs(group).mean(), rel_tol=relative, abs_tol=3e-8)
        else:
            levels = 2 ** (config.bits - 1) - 1
            largest = np.abs(group).max() / levels
            spacing = max(float(torch.finfo(dtype).eps) * largest, 6e-8)
            assert largest * (1 - 1e-7) <= stored <= largest + spacing
    if config.bits > 1:
        wide = tensors["scales"].double().numpy().repeat(size, axis=2)[:, :, : SHAPE[1]]
        for expert in range(2):
            lost = np.abs(slow_decode(config, tensors, expert) - deltas[expert].double().numpy())
            # fp32 rounds the quotient that decides between two integers
            assert (lost <= wide[expert] * (0.5 + 1e-5)).all()
            assert (lost[deltas[expert].numpy() == 0] == 0).all()


def test_one_bit_is_the_sign_and_zero_counts_as_positive():
    delta = torch.tensor([[[0.0, -1.0, 2.0, -3.0, 0.0]]])
    codec = codec_of(CodecConfig(codec="quantised", bits=1, group_size=4))
    tensors = codec.encode(delta, dtype=torch.float32, key=KEY)
    assert codec.decode(tensors, (1, 5), 0).tolist() == [[1.5, -1.5, 1.5, -1.5, 0.0]]
    assert tensors["codes"].tolist() == [[[0b10101]]]


@pytest.mark.parametrize("rank", [1, 4, 13])
def test_the_error_of_a_rank_is_the_singular_values_that_it_leaves_out(rank):
    deltas = some_deltas()
    codec = codec_of(CodecConfig(codec="low_rank", rank=rank))
    tensors = codec.encode(deltas, dtype=torch.float32, key=KEY)
    for expert, delta in enumerate(deltas):
        exact = delta.double().numpy()
        expected = np.linalg.svd(exact, compute_uv=False)[rank:]
        lost = np.linalg.norm(exact - codec.decode(tensors, SHAPE, expert).double().numpy())
        # fp32: 1e-6 of the delta's norm, about 22
        assert abs(lost - np.linalg.norm(expected)) < 3e-5


@pytest.mark.parametrize("energy", [0.01, 0.5, 0.9, 1.0])
def test_the_rank_of_an_energy_is_the_least_that_keeps_it(energy):
    delta = some_deltas()[0]
    squares = np.linalg.svd(delta.double().numpy(), compute_uv=False) ** 2
    least = next(
        r for r in range(1, 14) if squares[:r].sum() >= energy * squares.sum() * (1 - 1e-9)
    )
    assert rank_of_energy(delta, energy) == least
    assert rank_of_energy(torch.zeros(4, 5), energy) == 1
