"""What a model and its text must be for its experts to be repaired."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from upcycle_core.errors import Fault, InputError

if TYPE_CHECKING:
    from upcycle_core.architectures.family import Family

TOKENS_A_FEATURE = 2
"""Tokens that each inner activation needs at least: each half of the text then has one."""
MANY_A_FEATURE = 26
"""So many repaired experts of a million tokens all but whole (40,960 of 1,536 neurons), where
ten left a point of a hundred (docs/results/closed-form.md)."""
MUCH_DRIFT = 0.5
"""A share of the drift that is much to be left."""


def fewest_tokens(config: Mapping[str, Any]) -> int:
    """Calibration tokens of a domain that a repair needs at least, by config.json."""
    return TOKENS_A_FEATURE * int(config["intermediate_size"])


def more_tokens(layers: Sequence[Mapping[str, Any]]) -> str:
    """That more calibration text might mend more, in a sentence; empty where nothing says so.

    Much of the drift may be left because no regression has it, or because few tokens do not say
    how: more text is worth a word where both are so.

    Args:
        layers: What ``repair_expert`` gave.
    """
    much = sum(layer["drift"] > MUCH_DRIFT for layer in layers)
    tokens, each = (layers[0][name] for name in ("tokens", "tokens_a_neuron"))
    if 2 * much <= len(layers) or each >= MANY_A_FEATURE:
        return ""
    return (
        f"more than half of the drift is left in {much} of {len(layers)} layers, and {each:.0f} "
        "calibration tokens a neuron are few where experts are far apart: "
        f"{MANY_A_FEATURE * round(tokens / each):,} (statistics.tokens) may leave less"
    )


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
