"""Configuration of DeRS (Huang et al., arXiv 2503.01359): experts as one base and light deltas.

And what lies in a directory of such a model: how deltas are laid out, which files belong to it.

This file needs torch and transformers alone: it is copied beside the weights, so that
``from_pretrained(..., trust_remote_code=True)`` works without the package it comes from.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

CHECKSUMS = "checksums.json"
"""{file: sha256} of the weights and of config.json, beside them."""


class DersConfig(PretrainedConfig):
    """A dense model's configuration, and how its FFNs became experts.

    Attributes that this configuration does not have itself (``hidden_size``, ``layer_types``, ...)
    are read from ``dense``.

    Args:
        dense: Configuration of the dense model, as a dict with its ``model_type``.
        num_experts: N, experts a MoE layer.
        num_experts_per_tok: k, experts a token passes through.
        moe_layers: Layers whose FFN is replaced by experts; all by default.
        universal: An FFN that every token passes through as well: ``none``, one of its ``own``
            weights, or one more ``delta`` of the base, the last.
        combine: ``sum``: weights are the k largest probabilities, as they are (the paper's Eq. 1).
            ``normalised``: they are divided by their sum; beside a universal FFN they stay, and it
            gets what they leave of one.
        delta: How deltas are stored: ``codec`` and its ``drop_rate``, ``bits`` and ``group_size``,
            or ``rank``; ``ranks`` {"LAYER.MATRIX": r} where ranks differ.

    Raises:
        ValueError: A layer, a k or a choice that there is not.
    """

    model_type = "ders"
    sub_configs = {"dense": AutoConfig}
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        dense: dict | PretrainedConfig | None = None,
        num_experts: int = 4,
        num_experts_per_tok: int = 1,
        moe_layers: list[int] | None = None,
        universal: str = "none",
        combine: str = "normalised",
        delta: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if dense is None:
            dense = {"model_type": "llama"}
        if isinstance(dense, dict):
            dense = AutoConfig.for_model(**dense)
        super().__init__(**kwargs)
        self.dense = dense
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        layers = range(dense.num_hidden_layers)
        self.moe_layers = list(layers) if moe_layers is None else list(moe_layers)
        self.universal = universal
        self.combine = combine
        self.delta = dict(delta or {"codec": "low_rank", "rank": 1})
        self._check()
        # What was set before there was a dense configuration reaches it now.
        if self._attn_implementation is not None:
            self._attn_implementation = self._attn_implementation

    def __getattr__(self, name: str) -> Any:
        """What the dense model's configuration says; called where this one has no such field."""
        if name.startswith("_") or "dense" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.__dict__["dense"], name)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: the dense model's, which tokens that are added change."""
        return int(self.dense.vocab_size)

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        if "dense" in self.__dict__:
            self.dense.vocab_size = size

    @property
    def deltas(self) -> int:
        """D: deltas of a matrix, one an expert and one of the universal FFN."""
        return self.num_experts + (self.universal == "delta")

    def delta_of(self, layer: int, matrix: str) -> dict[str, Any]:
        """How the deltas of one matrix are stored: ``delta``, with the rank that is its own."""
        found = {key: value for key, value in self.delta.items() if key != "ranks"}
        ranks = self.delta.get("ranks") or {}
        name = f"{layer}.{matrix}"
        return {**found, "rank": ranks[name]} if name in ranks else found

    def _check(self) -> None:
        choices = {
            "universal": (self.universal, ("none", "own", "delta")),
            "combine": (self.combine, ("sum", "normalised")),
            "delta.codec": (self.delta.get("codec"), ("sparse", "quantised", "low_rank")),
        }
        faults = [
            f"{field} = {value!r}: choose {', '.join(known)}"
            for field, (value, known) in choices.items()
            if value not in known
        ]
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            remedy = f"choose 1 to {self.num_experts}, the number of experts"
            faults.append(f"num_experts_per_tok = {self.num_experts_per_tok!r}: {remedy}")
        last = self.dense.num_hidden_layers - 1
        if not set(self.moe_layers) <= set(range(last + 1)):
            faults.append(f"moe_layers = {self.moe_layers!r}: choose from 0 to {last}")
        if faults:
            raise ValueError("\n".join(faults))


def kept_entries(size: int, drop_rate: float) -> int:
    """Entries of ``size`` that remain at a drop rate: an exact count, at least one."""
    return max(1, round((1 - drop_rate) * size))


def index_dtype(size: int) -> torch.dtype:
    """The smallest integer type that holds every position of a matrix with ``size`` entries."""
    for dtype in (torch.uint8, torch.uint16, torch.int32):
        if size - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


def offset(bits: int) -> int:
    """What is added to an integer level to store it: 2^(bits-1) - 1, the largest level."""
    return 2 ** (bits - 1) - 1


def unpack(codes_OB: Tensor, bits: int, columns: int) -> Tensor:
    """Return the codes of packed bytes: ``bits`` each, little end first along a row.

    Args:
        codes_OB: uint8 [O, ceil(columns bits / 8)].
        bits: 8, 4, 2 or 1.
        columns: Codes of a row.

    Returns:
        uint8 [O, columns], each less than 2^bits.
    """
    if bits == 8:
        return codes_OB[:, :columns]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes_OB.device)
    codes = (codes_OB[:, :, None] >> shifts) & (2**bits - 1)
    return codes.flatten(1)[:, :columns]


def write_checksums(folder: Path) -> None:
    """Record the sha256 of every weight file of ``folder`` and of its config.json."""
    files = [*sorted(folder.glob("*.safetensors*")), folder / "config.json"]
    sums = {file.name: _sha256(file) for file in files}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def verify_checksums(folder: Path) -> None:
    """Refuse a directory whose files are not the recorded ones; where none are, do nothing.

    Raises:
        ValueError: All files that are missing or altered.
    """
    record = folder / CHECKSUMS
    if not record.is_file():
        return
    faults = []
    try:
        recorded = dict(json.loads(record.read_text()))
    except (ValueError, TypeError) as error:
        remedy = "write or download the model again"
        raise ValueError(f"{record}: is no list of checksums ({error}); {remedy}") from error
    for name, expected in recorded.items():
        if not (folder / name).is_file():
            faults.append(f"{folder / name}: is missing")
        elif _sha256(folder / name) != expected:
            faults.append(f"{folder / name}: was altered, its sha256 is not the recorded one")
    if faults:
        remedy = f"write or download the model again (its files are recorded in {record})"
        raise ValueError("\n".join([*faults, remedy]))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
