"""Which keys of a recipe decide the bytes of an artifact, and no more than these."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from infra.recipe.schema import Recipe, TuningConfig
from upcycle_core.baselines.config import Baseline
from upcycle_core.dume.config import MoEConfig, RouterConfig
from upcycle_core.evaluation.tasks.config import TaskEvaluationConfig
from upcycle_core.symphony.config import PostTrainingConfig
from upcycle_core.training.config import (
    SAME_WEIGHTS,
    ExpertsConfig,
    ExpertTrainingConfig,
    SeedConfig,
    TrainingConfig,
)

MERGE_KEYS = tuple(f"backbone.merge.{name}" for name in ("embeddings", "head", "attention"))
"""How the backbone is merged; a record names those that are no average."""
NARROWED: Mapping[type, tuple[str, ...]] = {
    TrainingConfig: SAME_WEIGHTS,
    ExpertTrainingConfig: SAME_WEIGHTS,
    Baseline: ("title",),
    TaskEvaluationConfig: (
        *("models", "routing"),
        *("sweep_top_k", "sweep_ridge_lambda", "sweep_window"),
    ),
    ExpertsConfig: (),
    PostTrainingConfig: (),
    SeedConfig: (),
    TuningConfig: (),
}
"""Sections that are named field by field, and their fields that decide no bytes."""
MEASURING = tuple(
    f"evaluation.{name}"
    for name in ("tokens", "sequence_length", "loss", "batch_size", "precision")
)
"""How perplexity is measured, whatever is measured."""


def narrowed(recipe: Recipe, key: str) -> Iterator[str]:
    """``key``, or the keys below it that decide bytes."""
    section = value_at(recipe, key)
    left_out = NARROWED.get(type(section))
    if left_out is None or not is_dataclass(section):
        yield key
        return
    for field in fields(section):
        if field.name not in left_out:
            yield from narrowed(recipe, f"{key}.{field.name}")


def value_at(values: Any, key: str) -> Any:
    """What stands at a dotted key of a recipe, or of its plain values."""
    for part in key.split("."):
        values = values[part] if isinstance(values, Mapping) else getattr(values, part)
    return values


def recorded_setting(params: Mapping[str, Any], key: str) -> Any:
    """What recorded ``params``, which may name a whole section, say at a dotted key.

    Raises:
        KeyError: They do not know it.
    """
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        section = ".".join(parts[:length])
        if section in params:
            value = params[section]
            for part in parts[length:]:
                if not isinstance(value, Mapping):
                    raise KeyError(key)
                value = value[part]
            return value
    raise KeyError(key)


def document_keys(recipe: Recipe, domain: str) -> Iterator[str]:
    """Of a domain's documents. Text that is named for its use is taken whole, in its own order."""
    if draws_text(recipe, domain):
        yield from ("seed", "corpus.calibration_share", "corpus.heldout_share")
    yield "corpus.min_characters"
    for text in ("train", "calibration", "heldout", "elsewhere"):
        yield f"domains.{domain}.{text}"


def draws_text(recipe: Recipe, domain: str) -> bool:
    """Whether the recipe's seed decides which documents a domain's splits hold."""
    own = recipe.domains[domain]
    texts = (own.train, own.calibration, own.heldout, own.elsewhere)
    return own.train is not None or any(text and text.max_bytes is not None for text in texts)


def seed_keys(recipe: Recipe) -> Iterator[str]:
    """Of the seed model, given or trained."""
    yield "seed_model.model"
    if recipe.trains_seed:
        yield from ("seed", "seed_model.shape", "seed_model.training")


def is_trained(recipe: Recipe, domain: str) -> bool:
    """Whether a domain's expert is made here, and not given."""
    return recipe.domains[domain].expert is None


def expert_keys(recipe: Recipe, domain: str) -> Iterator[str]:
    """Of an expert of DUME's: given, trained from the seed, or continued.

    A given one may be written anew, to fit the others; the size of its files came later, and
    decides nothing where it is the default. A given seed keeps its files whatever that size is:
    experts that were trained from it would be trained again, to the same weights.
    """
    yield f"domains.{domain}.expert"
    if is_trained(recipe, domain):
        continued = domain in recipe.parents and recipe.experts.continued is not None
        yield from ("seed", "experts.continued" if continued else "experts.training")
    elif recipe.moe.max_shard_bytes != MoEConfig().max_shard_bytes:
        yield "moe.max_shard_bytes"


def merge_keys(recipe: Recipe) -> Iterator[str]:
    """Of what the backbone's merge is beside an average."""
    for key in MERGE_KEYS:
        if getattr(recipe.backbone.merge, key.rpartition(".")[2]) != "average":
            yield key


def backbone_keys(recipe: Recipe) -> Iterator[str]:
    """Of whose backbones are merged, where the recipe names them: the first gives the tokenizer.
    One that is built upon is as it is, whoever is named."""
    if recipe.backbone.experts is not None and "backbone" not in recipe.pinned:
        yield "backbone.experts"


def regression_keys() -> Iterator[str]:
    """Of the calibration text that weights are regressed on."""
    for name in ("tokens", "sequence_length", "batch_size", "count", "window", "precision"):
        yield f"statistics.{name}"


def repair_keys(recipe: Recipe) -> Iterator[str]:
    """Of the experts' repair, where there is one."""
    if recipe.experts.repair != "none":
        yield "experts.repair"


def routed_repair_keys(recipe: Recipe) -> Iterator[str]:
    """Of the second repair, where there is one."""
    if recipe.experts.repair_tokens != "own":
        yield "experts.repair_tokens"


def router_keys(recipe: Recipe) -> Iterator[str]:
    """Of the ridge regression. What came later decides nothing where it is the default."""
    yield from ("router.ridge_lambda", "router.solve", "router.domain_weights")
    plain = RouterConfig()
    for name in ("rows", "normalise", "scale"):
        if getattr(recipe.router, name) != getattr(plain, name):
            yield f"router.{name}"
    if recipe.router.ridge_lambda == "cross-validate":
        yield "router.lambda_grid"
    if recipe.router.solve == "sequential":
        yield from ("statistics", "moe.top_k", "moe.max_shard_bytes")
        yield from weight_keys(recipe)


def weight_keys(recipe: Recipe) -> Iterator[str]:
    """Of the weights that a token's experts get, where they are not the default."""
    if not recipe.moe.normalise_top_k:
        yield "moe.normalise_top_k"


def dume_keys(recipe: Recipe) -> list[str]:
    """Of a model of DUME's: what has a part in its weights, as its card quotes it."""
    keys = {"name", "moe", "statistics", "corpus.bos", *seed_keys(recipe), *router_keys(recipe)}
    keys |= {*backbone_keys(recipe), *merge_keys(recipe)}
    keys |= {*repair_keys(recipe), *routed_repair_keys(recipe)}
    if recipe.trains_seed:
        keys.add("tokenizer")
    for domain in recipe.domains:
        keys |= {*document_keys(recipe, domain), *expert_keys(recipe, domain)}
        keys.discard(f"domains.{domain}.heldout")
    return without_parts(keys)


def without_parts(keys: set[str]) -> list[str]:
    """``keys`` in order, without those that lie below another."""
    return sorted(k for k in keys if not any(k.startswith(f"{other}.") for other in keys))
