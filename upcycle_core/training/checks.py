"""Faults of training settings across fields, found without importing torch or reading a file."""

from collections.abc import Iterator

from upcycle_core.errors import Fault
from upcycle_core.training.config import LlamaShape


def shape_faults(shape: LlamaShape, field: str) -> Iterator[Fault]:
    """Sizes that do not fit each other in ``shape``, which the recipe gave at ``field``."""
    if shape.hidden_size % (2 * shape.attention_heads):
        remedy = f"must be a multiple of 2 x attention_heads = {2 * shape.attention_heads}"
        yield Fault(f"{field}.hidden_size", shape.hidden_size, remedy)
    if shape.attention_heads % shape.key_value_heads:
        remedy = f"must divide attention_heads = {shape.attention_heads}"
        yield Fault(f"{field}.key_value_heads", shape.key_value_heads, remedy)
