"""Say everything that a config.json leaves to defaults, as the stock classes of transformers do.

Done here, with the defaults as data, because importing the stock classes costs more CPU time than
assembling a small model; tests hold the two together, and ``stock_faults`` asks the stock class
where time does not matter.
"""

from collections.abc import Mapping
from copy import deepcopy

from upcycle_core.errors import Fault, raise_faults

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
MOST, MOST_LAYERS = 10**7, 10**4
"""Beyond all models: lists of layers and sizes of tensors are made of these numbers."""
# Types of rope whose frequencies depend on the length that the model was first trained on.
_LENGTH_AWARE_ROPE = ("llama3", "yarn", "longrope")
_ROPE_THETA = 10_000.0
FIRST_LENGTH = "original_max_position_embeddings"
"""Of a rope: that length; some say it beside the rope."""

VOCABULARY = ("vocab_size", "tie_word_embeddings")


def resolve_config(config: Mapping, defaults: Mapping[str, object], *, field: str) -> dict:
    """Return ``config`` with every default filled in, rope and windows standardised.

    Args:
        config: The content of config.json, of transformers 4 or 5.
        defaults: Attribute to value where config.json says nothing.
        field: How errors name the configuration.

    Raises:
        InputError: A size that is missing or no positive number; a rope that is no object.
    """
    full = {**defaults, **config}
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = full.get("num_attention_heads")
    raise_faults(_size_faults(full, field))
    if full.get("head_dim") is None:
        full["head_dim"] = full["hidden_size"] // full["num_attention_heads"]
    full["dtype"] = full.pop("torch_dtype", None) or full.get("dtype")
    full["rope_parameters"] = _rope(full)
    if "use_sliding_window" in defaults:
        full |= _windows(full)
    return full


def stock_faults(config: Mapping, field: str) -> list[Fault]:
    """What the stock class of transformers has to say against ``config``."""
    # Slow to import, and not needed where a configuration has been checked before.
    from transformers import CONFIG_MAPPING

    try:
        CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(dict(config)))
    except Exception as error:  # whatever a value of any type makes of it
        return [Fault(field, config.get("model_type"), f"is not valid: {error}; mend config.json")]
    return []


def _size_faults(full: Mapping, field: str) -> list[Fault]:
    sizes = SIZES if full.get("head_dim") is None else (*SIZES, "head_dim")
    faults = [
        Fault(f"{field}.{name}", full.get(name), "must be a positive whole number")
        for name in sizes
        if type(full.get(name)) is not int or full[name] < 1
    ]
    for name in (name for name in sizes if type(full.get(name)) is int):
        most = MOST_LAYERS if name == "num_hidden_layers" else MOST
        if full[name] > most:
            remedy = f"is more than any model has ({most:,} at most); mend config.json"
            faults.append(Fault(f"{field}.{name}", full[name], remedy))
    return faults + [
        Fault(f"{field}.{name}", full[name], "must be an object, or null; mend config.json")
        for name in ("rope_parameters", "rope_scaling")
        if not isinstance(full.get(name) or {}, Mapping)
    ]


def _rope(full: dict) -> dict:
    """``rope_parameters`` of transformers 5, from either generation's fields."""
    theta = full.pop("rope_theta", None)
    theta = _ROPE_THETA if theta is None else theta
    rope = dict(full.pop("rope_scaling", None) or full.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        return rope  # one a layer type: no target holds that, and the family says so
    rope.setdefault("rope_theta", theta)
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if "partial_rotary_factor" in rope:  # which the family judges; 1 is all of each head
        full["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    first_length = full.pop(FIRST_LENGTH, None)
    if rope["rope_type"] in _LENGTH_AWARE_ROPE:
        if (
            first_length is not None
        ):  # beside the rope, where Phi-3 has it, it counts before its own
            rope[FIRST_LENGTH] = first_length
        rope.setdefault(FIRST_LENGTH, full["max_position_embeddings"])
    return rope


def stretched(longest: int, rope: Mapping) -> int:
    """Tokens that a model with this rope was made for.

    Some ropes are stretched beyond what ``max_position_embeddings`` says: by a factor of it, or of
    the length before. Others' number is the stretched one already.

    Args:
        longest: ``max_position_embeddings``.
        rope: ``rope_parameters``.
    """
    factor, before = rope.get("factor"), rope.get(FIRST_LENGTH)
    if not isinstance(factor, int | float):
        return longest
    return max(longest, int(factor * (before if isinstance(before, int) else longest)))


def _windows(full: Mapping) -> dict:
    """Qwen's sliding windows: none unless switched on, then from layer ``max_window_layers`` on."""
    window = full["sliding_window"] if full["use_sliding_window"] else None
    layers = range(full["num_hidden_layers"])
    kinds = [
        "sliding_attention"
        if window is not None and layer >= full["max_window_layers"]
        else "full_attention"
        for layer in layers
    ]
    return {"sliding_window": window, "layer_types": full.get("layer_types") or kinds}


def with_vocabulary_of(config: Mapping, other: Mapping) -> dict:
    """``config`` with the vocabulary of ``other``: its size, and whether its embedding is its head.

    What a checkpoint must hold if its FFNs alone are to fit ``config``.
    """
    own = {name: other[name] for name in VOCABULARY if name in other}
    return {**{k: v for k, v in config.items() if k not in VOCABULARY}, **own}
