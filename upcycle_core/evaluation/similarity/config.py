"""What a recipe says about comparing experts with each other."""

from dataclasses import field
from typing import Literal, get_args

from upcycle_core.config import config

Representation = Literal["neurons", "outputs"]
REPRESENTATIONS: tuple[Representation, ...] = get_args(Representation)


@config
class SimilarityConfig:
    """Which text experts are compared on, and how."""

    tokens: int = field(default=20_000, metadata={"ge": 1})
    """Tokens a domain. CKA of few tokens is too high: take many times the neurons of a layer."""
    sequence_length: int = field(default=1024, metadata={"ge": 8})
    """Longest sequence in one forward pass."""
    batch_size: int = field(default=16, metadata={"ge": 1, "le": 1_000_000})
    """Sequences a forward pass."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass; sums over batches are fp64."""
    representations: tuple[Representation, ...] = ("neurons", "outputs")
    """`neurons`: act(gate) * up; `outputs`: what the FFN adds to the residual stream."""
    best: bool = True
    """Whether the best matching of neurons is found for every pair; slow from 4096 neurons on."""
