"""What a recipe says about DeRS: a shared base, light deltas, for compression and for training."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, get_args

from upcycle_core.config import SEEDS, config
from upcycle_core.errors import Fault

Kind = Literal["sparse", "quantised", "low_rank"]
Keep = Literal["random", "magnitude"]
Layers = Literal["all", "every-other"]
Universal = Literal["none", "own", "delta"]
Combine = Literal["sum", "normalised"]
BITS = (1, 2, 4, 8)
"""Widths of a quantised entry."""


@config
class CodecConfig:
    """How the deltas of a finished model are stored."""

    codec: Kind
    """`sparse` and `quantised` are the paper's, `low_rank` is not."""
    drop_rate: float | None = None
    """p of `sparse`: share of a delta's entries that is dropped, an exact count."""
    keep: Keep | None = None
    """Which entries `sparse` keeps: `random`, drawn (the paper's, and the default), or those of the
    largest `magnitude`."""
    rescale: bool | None = None
    """Whether `sparse` multiplies what it keeps by 1 / (1 - p), as the paper does; it does so by
    default."""
    bits: int | None = None
    """Width of a `quantised` entry: 8, 4, 2 or 1 (sign times mean magnitude)."""
    group_size: int | None = field(default=None, metadata={"ge": 1})
    """Columns that share a scale in `quantised`; a whole row by default."""
    rank: int | None = field(default=None, metadata={"ge": 1})
    """r of `low_rank`."""
    energy: float | None = None
    """Instead of `rank`: the least share of a delta's squared singular values that is kept."""

    def faults(self, name: str) -> list[Fault]:
        """What is wrong with it; ``name`` is the field's."""
        found = _choice_faults(name, {"codec": (self.codec, Kind), "keep": (self.keep, Keep)})
        if found:
            return found
        if self.codec == "sparse":
            if self.drop_rate is None or not 0 <= self.drop_rate < 1:
                remedy = "must be in [0, 1): a share, not percent; e.g. 0.9"
                found.append(Fault(f"{name}.drop_rate", self.drop_rate, remedy))
        elif self.codec == "quantised":
            if self.bits not in BITS:
                remedy = f"choose {', '.join(map(str, BITS))}"
                found.append(Fault(f"{name}.bits", self.bits, remedy))
        else:
            if (self.rank is None) == (self.energy is None):
                remedy = "give either rank or energy"
                found.append(Fault(f"{name}.rank", self.rank, remedy))
            if self.energy is not None and not 0 < self.energy <= 1:
                found.append(Fault(f"{name}.energy", self.energy, "must be in (0, 1]"))
        mine = {
            "sparse": {"drop_rate", "keep", "rescale"},
            "quantised": {"bits", "group_size"},
            "low_rank": {"rank", "energy"},
        }
        for other in sorted(set.union(*mine.values()) - mine[self.codec]):
            if getattr(self, other) is not None:
                remedy = f"is not a setting of {self.codec}; leave it out"
                found.append(Fault(f"{name}.{other}", getattr(self, other), remedy))
        return found


@config
class CompressionConfig:
    """Deltas of a finished model, stored in several ways, and which of them is kept."""

    models: tuple[str, ...] = ("dume",)
    """Rows that are compressed: `dume`, and baselines that are Mixture-of-Experts."""
    base: Literal["seed", "mean"] = "seed"
    """What deltas are taken from: the FFNs of the seed, or the mean of the experts."""
    minimum_cosine: float = field(default=0.5, metadata={"ge": -1, "le": 1})
    """Least cosine of an expert's gate or up projection to the base's; below it the base is no
    ancestor of the experts, and nothing is compressed."""
    codecs: Mapping[str, CodecConfig] = field(default_factory=dict)
    """The ways to store them, by name."""
    tolerance: float = field(default=1.0, metadata={"ge": 0})
    """Percent of the original's normalised score that the smallest file may lose and still be the
    one that is registered."""
    seed: int = field(default=0, metadata={"ge": 0, "lt": SEEDS})
    """Decides which entries a random drop keeps."""


@config
class DersUpcyclingConfig:
    """A dense model's FFN as the shared base of experts that are light deltas."""

    codec: Literal["sparse", "low_rank"] = "low_rank"
    """`sparse`: a vector of values at fixed random places (DeRS-SM); `low_rank`: B A (DeRS-LM)."""
    drop_rate: float | None = None
    """p of `sparse`: share of places without a value."""
    rank: int | None = field(default=None, metadata={"ge": 1})
    """r of `low_rank`."""
    layers: Layers = "all"
    """Blocks that become Mixture-of-Experts: all, or the first, the third, ..."""
    universal: Universal = "none"
    """An FFN that every token passes through as well: none, one of its own weights, or one more
    delta of the shared base (the paper's extended form)."""
    combine: Combine = "normalised"
    """`sum` is the paper's Eq. 1: probabilities as they are, beside the universal FFN if there is
    one. `normalised`: weights of the k experts sum to one; beside a universal FFN, that gets what
    the k probabilities leave of one. Then the model begins as the dense model exactly."""

    def faults(self, name: str) -> list[Fault]:
        """What is wrong with it; ``name`` is the field's."""
        choices = {
            "codec": (self.codec, Literal["sparse", "low_rank"]),
            "layers": (self.layers, Layers),
            "universal": (self.universal, Universal),
            "combine": (self.combine, Combine),
        }
        found = _choice_faults(name, choices)
        if not found and self.codec == "low_rank" and self.rank is None:
            found.append(Fault(f"{name}.rank", None, "say how many; e.g. 4"))
        if found:
            return found
        return CodecConfig(codec=self.codec, drop_rate=self.drop_rate, rank=self.rank).faults(name)


def _choice_faults(name: str, choices: Mapping[str, tuple[Any, Any]]) -> list[Fault]:
    """Values that are none of a field's choices; a field that may be left out may be None."""
    found = []
    for field_name, (value, kind) in choices.items():
        known = get_args(kind)
        if value not in known and not (value is None and field_name == "keep"):
            found.append(Fault(f"{name}.{field_name}", value, f"choose {', '.join(known)}"))
    return found
