"""Faults of training settings across fields, found without importing torch or reading a file."""

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from upcycle_core.errors import Fault
from upcycle_core.training.config import (
    ExpertTrainingConfig,
    Group,
    LlamaShape,
    MoEObjective,
    TrainingConfig,
)

RENORMALISING = frozenset({"mixtral", "ernie4_5_moe", "bam"})
"""Model types whose routers always make a token's k weights sum to one."""
LARGEST_BF16_BETA = 0.99
"""Decay of a moment that rounding to 8 bits leaves alive, with some room."""
ON_EXPERTS = ("router", "experts", "expert_gates", "shared_base")
"""Groups that only a Mixture-of-Experts has."""


def shape_faults(shape: LlamaShape, field: str) -> Iterator[Fault]:
    """Sizes that do not fit each other in ``shape``, which the recipe gave at ``field``."""
    if shape.hidden_size % (2 * shape.attention_heads):
        remedy = f"must be a multiple of 2 x attention_heads = {2 * shape.attention_heads}"
        yield Fault(f"{field}.hidden_size", shape.hidden_size, remedy)
    if shape.attention_heads % shape.key_value_heads:
        remedy = f"must divide attention_heads = {shape.attention_heads}"
        yield Fault(f"{field}.key_value_heads", shape.key_value_heads, remedy)


def training_faults(config: TrainingConfig, field: str = "training") -> Iterator[Fault]:
    """Settings that leave nothing to train on, or that do not fit each other."""
    if config.steps < 1:
        yield Fault(f"{field}.steps", config.steps, "trains on no token; give at least one step")
    if config.optimizer_state == "bf16":
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(config, name)
            if value > LARGEST_BF16_BETA:
                remedy = "a moment in bf16 does not move by less than 1 / 256 of itself; at most "
                remedy += f"{LARGEST_BF16_BETA}, or optimizer_state: fp32"
                yield Fault(f"{field}.{name}", value, remedy)
    if isinstance(config, ExpertTrainingConfig):
        yield from _method_faults(config, field)
    if config.keep == "best" and config.evaluation_steps is None:
        remedy = "the best weights are those of the lowest validation loss; set evaluation_steps"
        yield Fault(f"{field}.keep", config.keep, remedy)
    if config.evaluation_steps is not None and config.evaluation_steps % config.checkpoint_steps:
        remedy = f"must be a multiple of checkpoint_steps = {config.checkpoint_steps}"
        yield Fault(f"{field}.evaluation_steps", config.evaluation_steps, remedy)


def _method_faults(config: ExpertTrainingConfig, field: str) -> Iterator[Fault]:
    if config.lora is not None and config.method != "lora":
        remedy = f"is only trained with method: lora, and method is {config.method}; set it"
        yield Fault(f"{field}.lora", f"rank {config.lora.rank}", remedy)
    if config.lora is not None and not config.lora.modules:
        yield Fault(f"{field}.lora.modules", [], "trains nothing; name linear layers")


def objective_faults(objective: MoEObjective, field: str = "objective") -> Iterator[Fault]:
    """Groups that are not there, or none at all."""
    known = get_args(Group)
    if not objective.trainable:
        yield Fault(f"{field}.trainable", [], f"trains nothing; choose among {', '.join(known)}")
    for group in objective.trainable:
        if group not in known:
            yield Fault(f"{field}.trainable", group, f"no such group; choose {', '.join(known)}")


def weight_faults(
    weights: Mapping[str, float], names: Iterable[str], field: str
) -> Iterator[Fault]:
    """Weights of ``names``, each 1 where ``weights`` has none, that take away or leave nothing."""
    given = [weights.get(name, 1.0) for name in names]
    if any(weight < 0 for weight in given) or (given and not any(given)):
        yield Fault(field, dict(weights), "must be at least 0, and one of them more")


def routing_faults(model: object, objective: MoEObjective | None) -> Iterator[Fault]:
    """What a model's configuration cannot be trained with.

    Args:
        model: A model configuration of transformers: its attributes are all that is looked at.
        objective: What is to be trained of it; None trains everything.
    """
    experts = experts_of(model)
    if not experts:
        if objective is not None:
            yield from _dense_faults(objective)
        return
    k = getattr(model, "num_experts_per_tok", 1)
    if not 1 <= k <= experts:
        remedy = f"choose 1 to {experts}, the number of experts"
        yield Fault("model.num_experts_per_tok", k, remedy)
    groups = objective.trainable if objective else ("all",)
    if k == 1 and {"router", "all"} & set(groups) and _renormalises(model):
        remedy = (
            "trains the routers, but with top_k = 1 and renormalised weights a token's one weight "
            "is always 1: the routers get no gradient from the text; give the model top_k >= 2, "
            "or train experts and backbone only"
        )
        yield Fault("objective.trainable", list(groups), remedy)


def experts_of(model: object) -> int:
    """Experts of a layer, by a model's configuration; 0 if it is dense."""
    return getattr(model, "num_local_experts", None) or getattr(model, "num_experts", None) or 0


def _dense_faults(objective: MoEObjective) -> Iterator[Fault]:
    for group in objective.trainable:
        if group in ON_EXPERTS:
            remedy = "the model is dense; give a Mixture-of-Experts, or train backbone or all"
            yield Fault("objective.trainable", group, remedy)
    for name in ("balance_coefficient", "z_coefficient"):
        if getattr(objective, name):
            remedy = "the model is dense and has no routers; set it to 0"
            yield Fault(f"objective.{name}", getattr(objective, name), remedy)


def _renormalises(model: object) -> bool:
    if getattr(model, "model_type", None) in RENORMALISING:
        return True
    if getattr(model, "model_type", None) == "ders":  # beside a universal FFN they stay as they are
        chosen = getattr(model, "combine", None), getattr(model, "universal", None)
        return chosen == ("normalised", "none")
    return bool(getattr(model, "norm_topk_prob", False))
