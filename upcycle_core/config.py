"""What the parts of a recipe have in common: frozen dataclasses that are read strictly.

The library knows no pydantic: it only leaves word, where pydantic looks for it, how they are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, dataclass_transform

READ = "__pydantic_config__"
"""Where pydantic looks."""
RULES: Mapping[str, object] = {
    "extra": "forbid",
    "allow_inf_nan": False,
    "use_attribute_docstrings": True,
}
"""No key that nobody knows, no number that compares with none; texts under fields describe them."""
SEEDS = 2**32
"""Seeds of random choices are below it: NumPy takes no larger one."""
Counted = Literal["all", "responses"]
"""Which tokens count: all, or of chats what the assistant says, its end token included."""
Section = TypeVar("Section")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def config(section: type[Section]) -> type[Section]:
    """Make a class a part of a recipe.

    Args:
        section: Its fields are the keys; what stands in their metadata (``{"ge": 1}``), the bounds.

    Returns:
        The same class, a frozen dataclass of keyword arguments.
    """
    setattr(section, READ, dict(RULES))
    return dataclass(frozen=True, kw_only=True)(section)
