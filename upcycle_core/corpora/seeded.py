"""Order from a seed: the same on every machine and in every process."""

import hashlib

import numpy as np


def place(thing: bytes, *key: int | str) -> float:
    """Where ``thing`` lies between 0 and 1, uniformly, by ``key`` and itself alone.

    Args:
        thing: Its identity.
        key: What it is placed for (a seed, a name).
    """
    digest = hashlib.sha256(repr(key).encode() + thing).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def permutation(count: int, *key: int | str) -> np.ndarray:
    """A random order of ``range(count)`` that depends on ``key`` alone.

    Args:
        count: How many things are ordered.
        key: What the order is for (a seed, a name, an epoch).

    Returns:
        ``[count]`` int64, each of ``0 .. count - 1`` once.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
    return generator.permutation(count)
