"""What a model and its text must be for its experts to be repaired."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from upcycle_core.errors import Fault, InputError

if TYPE_CHECKING:
    from upcycle_core.architectures.family import Family

TOKENS_A_FEATURE = 2
"""Tokens that each inner activation needs at least: each half of the text then has one."""


def fewest_tokens(config: Mapping[str, Any]) -> int:
    """Calibration tokens of a domain that a repair needs at least, by config.json."""
    return TOKENS_A_FEATURE * int(config["intermediate_size"])


def check_repairable(family: "Family", config: Mapping[str, Any], tokens: int, field: str) -> None:
    """Raise unless a model's FFNs can be repaired with so many calibration tokens.

    Args:
        family: Of the model.
        config: The content of its config.json.
        tokens: Of a domain.
        field: How the error names their number.

    Raises:
        InputError: Norms stand behind the FFNs, or there are too few tokens.
    """
    if not family.norms_first:
        remedy = f"{family.model_type} has norms behind its FFNs, which no down projection passes; "
        raise InputError(Fault("experts.repair", "down", f"{remedy}use none"))
    needed = fewest_tokens(config)
    if tokens < needed:
        remedy = f"a repair regresses on {needed // TOKENS_A_FEATURE} activations a layer: give at "
        remedy += f"least {needed:,} calibration tokens a domain, or use experts.repair = none"
        raise InputError(Fault(field, tokens, remedy))
