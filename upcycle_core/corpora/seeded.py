"""Order from a seed: the same on every machine and in every process."""

import hashlib

import numpy as np


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
