"""What is wrong in a recipe that tunes on instructions, without reading any file."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from infra.recipe.checks import warmup_faults
from infra.recipe.schema import Recipe, TuningConfig
from tasks.data.lengths import answer_faults
from tasks.simoe.rows import section
from upcycle_core.baselines.config import Baseline
from upcycle_core.corpora.tuning.config import InstructionsConfig
from upcycle_core.dume.config import MoEConfig
from upcycle_core.errors import Fault
from upcycle_core.simoe.checks import division_faults, fit_faults
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.training.checks import training_faults
from upcycle_core.training.config import TrainingConfig

METHODS = ("full-finetune", "sparse-upcycling", "drop-upcycling", "btx", "simoe")
"""Rows that can be tuned on instructions."""
FIGURES = ("exact_match_unseen", "rouge_l_unseen", "exact_match_seen", "rouge_l_seen")
"""Figures of the gate that every run with instructions measures, in percent."""


def simoe_faults(recipe: Recipe) -> Iterator[Fault]:
    """Every fault of the fields that SIMoE adds."""
    if recipe.simoe is None:
        remedy = "says how experts are found; add it, {} for the defaults"
        yield Fault("simoe", None, remedy)
    yield from section(recipe).faults("simoe")
    yield from fit_faults(section(recipe), recipe.tuning.training, "simoe")
    yield from _head_faults(recipe)
    yield from recipe.instructions.faults("instructions")
    if recipe.instructions.sources and recipe.instructions.unseen == ():
        remedy = "models are compared on categories that training never sees; name one or more"
        yield Fault("instructions.unseen", [], remedy)
    yield from _excluded(recipe)
    yield from _worker_faults(recipe)
    yield from _length_faults("tuning.training", recipe.tuning.training, recipe)
    if recipe.seed_model.model is None and not recipe.domains:
        remedy = "name a model, or give domains with text to train one on"
        yield Fault("seed_model.model", None, remedy)
    for name, row in recipe.baselines.items():
        where = f"baselines.{name}"
        if row.method not in METHODS:
            remedy = f"cannot be tuned on instructions here; use one of {', '.join(METHODS)}"
            yield Fault(f"{where}.method", row.method, remedy)
        if row.method == "drop-upcycling" and row.start == "experts":
            remedy = "instructions are tuned on from the seed, there are no experts: use seed"
            yield Fault(f"{where}.start", row.start, remedy)
        elif row.method in ("sparse-upcycling", "drop-upcycling") and row.copies is None:
            remedy = "say how many experts are made of the seed's FFN, e.g. 4"
            yield Fault(f"{where}.copies", None, remedy)
        if row.method == "simoe":
            own = row.simoe or SimoeUpcyclingConfig()
            if row.top_k != Baseline(method="simoe").top_k:
                remedy = "SIMoE mixes all experts, a token passes through none alone: remove it"
                yield Fault(f"{where}.top_k", row.top_k, remedy)
            yield from own.faults(f"{where}.simoe")
            yield from fit_faults(own, row.training, f"{where}.simoe")
        if row.objective.domain_weights:
            remedy = "every instruction is read once an epoch; remove them"
            given = dict(row.objective.domain_weights)
            yield Fault(f"{where}.objective.domain_weights", given, remedy)
        yield from _length_faults(f"{where}.training", row.training, recipe)
    if any(row.method == "btx" for row in recipe.baselines.values()):
        yield from _length_faults("experts.training", recipe.experts.training, recipe)


def unused_faults(recipe: Recipe) -> Iterator[Fault]:
    """Fields that say nothing without SIMoE."""
    remedy = "is for instruction tuning; add a `simoe` section, or remove it"
    if recipe.instructions != InstructionsConfig():
        yield Fault("instructions", "given", remedy)
    if recipe.tuning != TuningConfig():
        given = [f.name for f in fields(TuningConfig)]
        yield Fault("tuning", given, remedy)
    for name, row in recipe.baselines.items():
        if row.method == "simoe":
            yield Fault(f"baselines.{name}.method", row.method, remedy)


def _excluded(recipe: Recipe) -> Iterator[Fault]:
    """Sections of other methods."""
    given = {
        "symphony": recipe.symphony,
        "compression": recipe.compression,
        "post_training": recipe.post_training,
        "similarity": recipe.similarity,
        "outside": recipe.outside or None,
        "comparison.tokens": recipe.comparison.tokens,
        "backbone.experts": recipe.backbone.experts,
    }
    for field, value in given.items():
        if value is not None:
            yield Fault(field, "given", "has no part in a recipe with `simoe`; remove one of them")
    for field, said in _said_of_mixtures(recipe).items():
        remedy = "is about routers that choose, and SIMoE mixes all experts: remove it"
        yield Fault(field, said, remedy)
    for name, domain in recipe.domains.items():
        if domain.expert is not None or domain.origin is not None:
            remedy = "a recipe with `simoe` has one model, the seed; name it in seed_model.model"
            yield Fault(f"domains.{name}", "expert or origin", remedy)


def _said_of_mixtures(recipe: Recipe) -> dict[str, object]:
    """Values of ``moe`` that are not the default: SIMoE reads none but the size of shards.

    Other sections that it does not read may hold defaults of the time when a version was made.
    """
    given = {f.name: getattr(recipe.moe, f.name) for f in fields(MoEConfig)}
    return {
        f"moe.{name}": value
        for name, value in given.items()
        if value != getattr(MoEConfig(), name) and name != "max_shard_bytes"
    }


def _head_faults(recipe: Recipe) -> Iterator[Fault]:
    """Experts of a head that a seed which is trained here does not have."""
    if recipe.trains_seed and recipe.seed_model.shape.tie_embeddings:
        yield from tied_heads(recipe)


def tied_heads(recipe: Recipe) -> Iterator[Fault]:
    """Faults of all that ask for experts of a head, where the seed's is its embedding."""
    rows = {f"baselines.{name}.simoe": row.simoe for name, row in recipe.baselines.items()}
    for where, own in {"simoe": recipe.simoe, **rows}.items():
        if own is not None and own.lm_head:
            yield tied_head(where)


def tied_head(where: str) -> Fault:
    """The fault of a head that is asked to grow experts and is the embedding."""
    remedy = "the seed's head is its embedding, which stays as it is; leave it out, or use a seed "
    remedy += "whose head is its own (tie_word_embeddings: false)"
    return Fault(f"{where}.lm_head", True, remedy)


def is_tied(model: Path) -> bool:
    """Whether a checkpoint's head is its embedding."""
    from transformers import AutoConfig  # a second

    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    return bool(config.tie_word_embeddings)


def _worker_faults(recipe: Recipe) -> Iterator[Fault]:
    """Batches that the workers cannot share, and a model that they cannot divide."""
    compute, tuned = recipe.compute, recipe.tuning.training.gradient_accumulation
    workers = compute.post_training.workers
    if tuned % workers:
        remedy = f"must be a multiple of compute.post_training.workers = {workers}"
        yield Fault("tuning.training.gradient_accumulation", tuned, remedy)
    if compute.post_training.sharding != "none":
        yield from division_faults(section(recipe), is_encoder_decoder=False)
    if compute.baselines.sharding != "none":
        for name, row in recipe.baselines.items():
            if row.method == "simoe":
                own = row.simoe or SimoeUpcyclingConfig()
                where = f"baselines.{name}.simoe"
                yield from division_faults(own, is_encoder_decoder=False, field=where)


def lengths(recipe: Recipe) -> Iterator[str]:
    """Sections whose ``sequence_length`` models must have positions for."""
    yield "seed_model.training"
    if any(row.method == "btx" for row in recipe.baselines.values()):
        yield "experts.training"


def _length_faults(where: str, config: TrainingConfig, recipe: Recipe) -> Iterator[Fault]:
    if where == "tuning.training":
        yield from training_faults(config, where)
        yield from warmup_faults(where, config)
    if config.evaluation_steps is not None:
        remedy = "no validation rows are set aside from the instructions; remove it"
        yield Fault(f"{where}.evaluation_steps", config.evaluation_steps, remedy)
    longest = recipe.seed_model.shape.max_positions
    if where == "tuning.training" and recipe.trains_seed:
        limit = f"seed_model.shape.max_positions = {longest}; shorten one or raise that"
        yield from answer_faults(recipe, longest, limit)
