"""From settings to a codec."""

from collections.abc import Mapping
from typing import Any

from upcycle_core.ders.codecs.codec import Codec
from upcycle_core.ders.codecs.low_rank import LowRankCodec
from upcycle_core.ders.codecs.quantised import QuantisedCodec
from upcycle_core.ders.codecs.sparse import SparseCodec
from upcycle_core.ders.config import CodecConfig


def codec_of(config: CodecConfig, *, rank: int | None = None) -> Codec:
    """Return what ``config`` asks for.

    Args:
        config: Without faults.
        rank: r where ``config`` gives a share of energy instead.
    """
    if config.codec == "sparse":
        assert config.drop_rate is not None
        return SparseCodec(
            drop_rate=config.drop_rate,
            keep=config.keep or "random",
            rescale=config.rescale is not False,
        )
    if config.codec == "quantised":
        assert config.bits is not None
        return QuantisedCodec(bits_each=config.bits, group_size=config.group_size)
    chosen = config.rank if config.rank is not None else rank
    assert chosen is not None
    return LowRankCodec(rank=chosen)


def stored_codec(delta: Mapping[str, Any], layer: int, matrix: str) -> Codec:
    """Return the codec of one matrix, from config.json's ``delta``."""
    settings = {name: value for name, value in delta.items() if name != "ranks"}
    rank = (delta.get("ranks") or {}).get(f"{layer}.{matrix}", settings.get("rank"))
    return codec_of(CodecConfig(**{**settings, **({"rank": rank} if rank else {})}))
