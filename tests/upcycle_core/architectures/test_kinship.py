"""Models that share no seed are told from fine-tuned ones, by their attention weights alone."""

import math

import pytest
import torch
from pico import save_pico
from safetensors.torch import load_file, save_file

from upcycle_core.architectures.kinship import apart, distances
from upcycle_core.checkpoints.reader import CheckpointReader


def moved(seed, out, *, by):
    """A copy whose every weight has moved by a share of its size, as a fine-tuning moves it."""
    save_pico(out)
    draw = torch.Generator().manual_seed(1)
    weights = load_file(seed / "model.safetensors")
    for name, own in weights.items():
        step = torch.randn(own.shape, generator=draw)
        weights[name] = own + by * own.norm() / step.norm() * step
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kin")
    first = save_pico(folder / "first", seed=0)
    models = {
        "first": first,
        "tuned": moved(first, folder / "tuned", by=0.3),
        "stranger": save_pico(folder / "stranger", seed=1),
    }
    return {name: CheckpointReader(path) for name, path in models.items()}


def test_distances_are_those_of_all_matrices_as_one_vector(readers):
    def vector(name):
        names = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo")
        return torch.cat([readers[name].tensor(own).flatten().double() for own in names])

    first, found = vector("first"), distances(readers)
    assert list(found) == ["tuned", "stranger"]
    for name, far in found.items():
        other = vector(name)
        size = ((first @ first + other @ other) / 2).sqrt()
        assert far == pytest.approx(float((first - other).norm() / size), rel=1e-6)
    assert found["stranger"] == pytest.approx(math.sqrt(2), abs=0.05)


def test_strangers_alone_are_apart(readers):
    assert list(apart(readers)) == ["stranger"]
    assert apart({"first": readers["first"]}) == {} == distances({})
