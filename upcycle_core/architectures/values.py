"""Values of a config.json that transformers does not look at until a model computes with them."""

from collections.abc import Iterator, Mapping

from upcycle_core.errors import Fault


def value_faults(full: Mapping, field: str) -> Iterator[Fault]:
    """Activation and rope that no model can compute.

    Args:
        full: A resolved config.json, with ``rope_theta`` among its ``rope_parameters``.
        field: The recipe's, of the model.
    """
    from transformers.activations import ACT2CLS  # a second
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    act = full.get("hidden_act", "silu")
    if not isinstance(act, str) or act not in ACT2CLS:
        remedy = "transformers has no such activation (silu, gelu, relu ...); mend config.json"
        yield Fault(f"{field}.config.hidden_act", act, remedy)
    rope = full["rope_parameters"]
    kinds = ("default", *ROPE_INIT_FUNCTIONS)
    if rope.get("rope_type", "default") not in kinds:
        remedy = f"transformers has no such rope; it has {', '.join(kinds)}: mend config.json"
        yield Fault(f"{field}.config.rope_parameters.rope_type", rope["rope_type"], remedy)
    if not _is_positive(rope["rope_theta"]):
        remedy = "must be a number above 0: rotary frequencies are its powers; mend config.json"
        yield Fault(f"{field}.config.rope_theta", rope["rope_theta"], remedy)
    if rope.get("factor") is not None and not _is_positive(rope["factor"]):
        remedy = "must be a number above 0, by which positions are stretched; mend config.json"
        yield Fault(f"{field}.config.rope_parameters.factor", rope["factor"], remedy)
    yield from _length_faults(full, f"{field}.config.rope_parameters")


def _length_faults(full: Mapping, field: str) -> Iterator[Fault]:
    """Factors of a ``longrope`` that are not one a rotary frequency."""
    rope, heads = full["rope_parameters"], full["num_attention_heads"]
    size = full.get("head_dim") or full["hidden_size"] // heads
    count = int(size * (full.get("partial_rotary_factor") or 1.0)) // 2
    for name in ("short_factor", "long_factor") if rope.get("rope_type") == "longrope" else ():
        found = rope.get(name)
        if not isinstance(found, list) or len(found) != count or not all(map(_is_positive, found)):
            remedy = f"must be {count} numbers above 0, one a rotary frequency; mend config.json"
            yield Fault(f"{field}.{name}", found, remedy)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
