"""Which corpus each sequence of a mixture comes from: exact shares, well spread.

D corpora, N sequences.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from upcycle_core.corpora.seeded import permutation
from upcycle_core.errors import Fault


class Turns(NamedTuple):
    """Who gives each sequence.

    Args:
        corpus: ``[N]`` int64, the corpus that gives it.
        turn: ``[N]`` int64, how many that corpus has given before.
    """

    corpus: np.ndarray
    turn: np.ndarray


def weighted_turns(weights: Sequence[float], count: int, *, seed: int) -> Turns:
    """Let corpora take turns so that, at every moment, each has given its share within one.

    With p_d = weight_d / sum of weights, the k-th sequence (from 0) of corpus d may be no earlier
    than the floor(k / p_d)-th of all and no later than the one before the ceil((k + 1) / p_d)-th.
    Taking whoever must give soonest meets all of these limits (proportionate fairness: Baruah et
    al. 1996), and so |given - n p_d| < 1 after any n sequences. All arithmetic is exact, a weight
    being the decimal number it is written as; the seed decides among equals.

    Args:
        weights: D shares, relative to each other; 0 leaves a corpus out.
        count: N. A longer schedule begins with the shorter one.
        seed: Of the order of those who must give at the same time. Equal weights make every D
            sequences a permutation of the corpora.
    """
    shares = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(share.denominator for share in shares))
    parts = [int(share * scale) for share in shares]
    total = sum(parts)
    given = [0] * len(parts)
    latest = [-(-total // part) if part else 0 for part in parts]
    found = np.empty((2, count), dtype=np.int64)
    for place in range(count):
        block, inside = divmod(place, len(parts))
        if inside == 0:
            rank = np.argsort(permutation(len(parts), seed, "turn", block))
        allowed = (d for d, part in enumerate(parts) if given[d] * total < (place + 1) * part)
        chosen = min(allowed, key=lambda d: (latest[d], rank[d]))
        found[:, place] = chosen, given[chosen]
        given[chosen] += 1
        latest[chosen] = -(-(given[chosen] + 1) * total // parts[chosen])
    return Turns(found[0], found[1])


def weight_faults(weights: Sequence[float], corpora: int) -> Iterator[Fault]:
    """What is wrong with the weights of a mixture of ``corpora``."""
    if len(weights) != corpora:
        yield Fault("weights", list(weights), f"give one for each of the {corpora} corpora")
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            yield Fault("weights", weight, "a share is a number from 0 upwards; give another")
    if not any(weights):
        yield Fault("weights", list(weights), "they leave every corpus out; give one a share")
