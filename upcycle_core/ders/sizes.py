"""How large compressed FFNs are: the paper's formulas, and what they leave out.

F entries of one FFN (all its matrices), D deltas, K bits of a weight, p drop rate, b bits of a
quantised entry, r rank, [O, I] a matrix.

    sparse      K F + D (1 - p) F K              + D (1 - p) F j      of indices of j bits
    quantised   K F + D b F                      + D K sum O ceil(I / g)  of scales, g columns each
    low rank    K F + D r K sum (O + I)

The paper (section 3.3) counts the first two columns, as 1 + N (1 - p) FFNs, and K + N b bits.
"""

from collections.abc import Mapping

from upcycle_core.ders.config import CodecConfig
from upcycle_core.ders.model.deltas_ders import index_dtype


def ffn_bits(
    matrices: Mapping[str, tuple[int, int]],
    deltas: int,
    config: CodecConfig,
    *,
    value_bits: int,
    ranks: Mapping[str, int],
) -> float:
    """Size of the FFN of one layer by the formulas above, in bits; not whole where they are not.

    Args:
        matrices: Name to [O, I] of the FFN's matrices.
        deltas: D: N experts, and one for a universal FFN that is stored as a delta.
        config: How deltas are stored; without faults.
        value_bits: K.
        ranks: Matrix to rank, where ``config`` gives a share of energy; else empty.
    """
    shapes = list(matrices.values())
    entries = sum(o * i for o, i in shapes)
    if config.codec == "sparse":
        assert config.drop_rate is not None
        kept = deltas * (1 - config.drop_rate)
        indices = sum(kept * 8 * index_dtype(o * i).itemsize * o * i for o, i in shapes)
        return value_bits * entries + kept * value_bits * entries + indices
    if config.codec == "quantised":
        assert config.bits is not None
        groups = sum(o * -(-i // (config.group_size or i)) for o, i in shapes)
        return value_bits * entries + deltas * (config.bits * entries + value_bits * groups)
    rank_of = ranks or dict.fromkeys(matrices, config.rank or 0)
    sides = sum(rank_of[name] * (o + i) for name, (o, i) in matrices.items())
    return value_bits * (entries + deltas * sides)
