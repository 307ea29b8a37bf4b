"""The size of a dense model, by what is shared in a Mixture-of-Experts and what is not."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from upcycle_core.architectures.families import FAMILIES, family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD, RECOMPUTED
from upcycle_core.checkpoints.reader import CheckpointReader, read_config
from upcycle_core.errors import raise_faults

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Types of weights by the names of config.json."""
ATTENTION = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
)
"""What a MoE's config.json says of itself in the words of a dense model's."""


@dataclass(frozen=True)
class Shape:
    """Parameters of a dense model, none of them read.

    Args:
        config: The content of config.json.
        whole: All of its parameters; a tied head counts once.
        ffns: Those of its FFNs, which a MoE has once an expert.
        ends: Those of its embeddings and its head.
        largest: Those of its largest tensor.
        itemsize: Bytes of a parameter in its files.
        dtype: Its type there, where that is known and one.
    """

    config: Mapping[str, Any]
    whole: int
    ffns: int
    ends: int
    largest: int
    itemsize: int
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, directory: Path, *, field: str = "model") -> "Shape":
        """What a checkpoint's headers say, or config.json where there are no weights beside it.

        Args:
            directory: Where it lies.
            field: How errors name it.

        Raises:
            InputError: There is no config.json, it is none, or of no family that is known.
        """
        if any(directory.glob("*.safetensors")):
            return cls.of_reader(CheckpointReader(directory, field=field))
        return cls.of_config_alone(directory, field=field)

    @classmethod
    def of_config_alone(cls, directory: Path, *, field: str = "model") -> "Shape":
        """What config.json says, whatever lies beside it.

        Args:
            directory: Where it lies.
            field: How errors name it.

        Raises:
            InputError: There is no config.json, it is none, or of no family that is known.
        """
        config, faults = read_config(directory, field)
        raise_faults(faults)
        named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = DTYPES.get(named, torch.float32)
        return replace(cls.of_config(config, dtype.itemsize, field=field), dtype=dtype)

    @classmethod
    def of_scored(cls, reader: CheckpointReader) -> tuple["Shape", int]:
        """The shape of a dense model, or of each expert of a stock MoE, and how many there are.

        Raises:
            InputError: It is of no family that is known.
        """
        config = reader.config
        targets = {family.target.model_type: family.target for family in FAMILIES.values()}
        target = targets.get(str(config.get("model_type")))
        if target is None:
            return cls.of_reader(reader), 1
        known = {key: config[key] for key in ATTENTION if config.get(key) is not None}
        dense = {
            **known,
            "model_type": "llama",
            "intermediate_size": config[target.width_fields[0]],
        }
        stored = next(iter(reader.tensors.values())).dtype
        return cls.of_config(dense, stored.itemsize), int(config[target.count_fields[0]])

    @classmethod
    def of_config(
        cls, config: Mapping[str, Any], itemsize: int, *, field: str = "model"
    ) -> "Shape":
        """What a configuration makes.

        Args:
            config: The content of config.json.
            itemsize: Bytes of a parameter in its files.
            field: How errors name its model.

        Raises:
            InputError: It is of no family that is known.
        """
        family = family_of(config, field=f"{field}.config.model_type")
        full = family.resolve(config, field=f"{field}.config")
        sizes = {n: math.prod(shape) for n, shape in family.tensors(full).items()}
        return cls._of(config, sizes, itemsize, field=field)

    @classmethod
    def of_reader(cls, reader: CheckpointReader) -> "Shape":
        """What a checkpoint's headers say."""
        kept = {n: info for n, info in reader.tensors.items() if not RECOMPUTED.fullmatch(n)}
        sizes = {name: math.prod(info.shape) for name, info in kept.items()}
        stored = sum(sizes[name] * info.dtype.itemsize for name, info in kept.items())
        types = {info.dtype for info in kept.values()}
        made = cls._of(
            reader.config, sizes, round(stored / max(1, sum(sizes.values()))), field=reader.field
        )
        return replace(made, dtype=types.pop() if len(types) == 1 else None)

    @classmethod
    def _of(
        cls, config: Mapping[str, Any], sizes: Mapping[str, int], itemsize: int, *, field: str
    ) -> "Shape":
        family = family_of(config, field=f"{field}.config.model_type")
        return cls(
            config=family.resolve(config, field=f"{field}.config"),
            whole=sum(sizes.values()),
            ffns=sum(size for name, size in sizes.items() if family.is_ffn(name)),
            ends=sum(sizes.get(name, 0) for name in (EMBEDDING, LM_HEAD)),
            largest=max(sizes.values()),
            itemsize=itemsize,
        )

    @property
    def layers(self) -> int:
        """L."""
        return int(self.config["num_hidden_layers"])

    @property
    def hidden(self) -> int:
        """H."""
        return int(self.config["hidden_size"])

    @property
    def inner(self) -> int:
        """I."""
        return int(self.config["intermediate_size"])

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self.config["vocab_size"])

    @property
    def heads_width(self) -> int:
        """Numbers that all query heads say of a token."""
        heads = int(self.config["num_attention_heads"])
        return heads * int(self.config.get("head_dim") or self.hidden // heads)

    @property
    def key_value_width(self) -> int:
        """Numbers that all keys of a token are; so many are its values."""
        heads = int(self.config["num_attention_heads"])
        return self.heads_width // heads * int(self.config.get("num_key_value_heads") or heads)

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the head as well."""
        return self.ends < 2 * self.vocabulary * self.hidden

    @property
    def stored(self) -> int:
        """Bytes of its weights in files."""
        return self.itemsize * self.whole

    @property
    def linear(self) -> int:
        """Parameters that every token is multiplied with, the head left out."""
        return self.whole - self.ends

    def mixture(self, experts: int) -> int:
        """Parameters of the MoE of so many of them, with its routers."""
        return self.whole + (experts - 1) * self.ffns + self.layers * experts * self.hidden

    def with_inner(self, inner: int) -> "Shape":
        """The same with FFNs of another width."""
        return Shape.of_config({**self.config, "intermediate_size": inner}, self.itemsize)

    def with_vocabulary(self, size: int, *, tied: bool | None = None) -> "Shape":
        """The same for another number of tokens, and maybe with a head of its own.

        Args:
            size: V.
            tied: Whether the embedding is the head; as it is by default.
        """
        is_tied = self.is_tied if tied is None else tied
        config = {**self.config, "vocab_size": size, "tie_word_embeddings": is_tied}
        return Shape.of_config(config, self.itemsize)
