"""What DUME's stages will need."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from infra.recipe.schema import Recipe
from tasks.planning.row import Planned
from upcycle_core.planning import memory
from upcycle_core.planning.rehearsal import training_bytes
from upcycle_core.planning.shape import Shape
from upcycle_core.training.config import ExpertTrainingConfig, TrainingConfig

FP32, MOMENTS = 4, 2
CHECKPOINTS = 3
"""Checkpoints of a training while the third is written: two are kept."""
BYTES_A_TOKEN = 4
"""Of text in a language with a Latin script."""
STORED_TEXT = 0.45
"""Of documents as Parquet, of their text's size."""
SHARDS_AND_SUM = 2
"""Times that a domain's statistics lie on the disk while their shards are added up."""


@dataclass(frozen=True)
class Subjects:
    """What a recipe is about.

    Args:
        shape: Of the seed and of every expert.
        text: Bytes of each domain's text that is trained on, 0 where that is not known.
    """

    shape: Shape
    text: dict[str, int]

    @property
    def domains(self) -> int:
        """D."""
        return len(self.text)


def dume_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    """A row a stage, in the order in which they run."""
    yield from _text_rows(recipe, subjects)
    yield from _training_rows(recipe, subjects)
    yield from _joining_rows(recipe, subjects)


def _text_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    text, domains = sum(subjects.text.values()), subjects.domains
    each = 2 if subjects.shape.vocabulary <= 1 << 16 else FP32
    common: dict[str, Any] = {"items": domains, "pieces": domains, "kind": "corpora"}
    corpora = recipe.compute.corpora
    yield Planned("documents", kept=int(STORED_TEXT * text), resources=corpora, **common)
    tokens = each * text // BYTES_A_TOKEN
    yield Planned("corpora", kept=tokens, resources=corpora, **common)


def _training_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    shape, compute = subjects.shape, recipe.compute
    if recipe.trains_seed:
        trained = _training(shape, recipe.seed_model.training, device=compute.seed.device)
        yield replace(trained, stage="seed", kind="seed", resources=compute.seed)
    elif recipe.has_seed:
        yield Planned("seed", 1, 1, kept=_stored(shape))
    given = sum(domain.expert is not None for domain in recipe.domains.values())
    if count := subjects.domains - given:
        one = _training(shape, recipe.experts.training, device=compute.experts.device)
        yield replace(
            one,
            stage="experts",
            kind="experts",
            resources=compute.experts,
            kept=count * one.kept + given * _stored(shape),
            passing=count * one.passing,
            items=subjects.domains,
            pieces=count,
        )
    else:
        yield Planned("experts", given, given, kept=given * _stored(shape))


def _training(shape: Shape, config: TrainingConfig, *, device: str) -> Planned:
    """One training: weights in fp32 come out, and the checkpoints that lie beside it meanwhile."""
    method = config.method if isinstance(config, ExpertTrainingConfig) else "full"
    trained = {
        "full": shape.whole,
        "layers": shape.whole - shape.ends,
        "ffn": shape.ffns,
        "lora": 0,
    }[method]
    smaller = {
        "full": ["experts.training.method = ffn", "experts.training.method = lora"],
        "layers": ["experts.training.method = ffn", "experts.training.method = lora"],
        "ffn": ["experts.training.method = lora"],
        "lora": [],
    }[method]
    if config.batch_size > 1:
        smaller.append("a smaller experts.training.batch_size, with gradient_accumulation")
    itemsize = shape.itemsize if method == "lora" else FP32
    whole = FP32 * (shape.whole if method != "lora" else 0)
    return Planned(
        "",
        1,
        1,
        kept=itemsize * shape.whole,
        passing=CHECKPOINTS * (whole + FP32 * MOMENTS * trained),
        memory=training_bytes(shape, config, device=device),
        remedies=smaller,
    )


def _joining_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    shape, compute, domains = _joined(recipe, subjects.shape), recipe.compute, subjects.domains
    backbone = shape.itemsize * (shape.whole - shape.ffns)
    yield Planned("backbone", 1, 1, kept=backbone, memory=memory.averaging_bytes(shape))
    passes: dict[str, Any] = {
        "kind": "statistics",
        "resources": compute.statistics,
        "items": domains,
    }
    config, device = recipe.statistics, compute.statistics.device
    smaller = ["a smaller statistics.batch_size"]
    if recipe.experts.repair != "none":
        tokens = config.tokens or max(subjects.text.values()) // BYTES_A_TOKEN
        head = recipe.experts.repair == "down+head_target"
        yield Planned(
            "repaired",
            pieces=domains,
            kept=domains * _stored(shape),
            memory=memory.repair_bytes(shape, config, tokens, head=head, device=device),
            remedies=["fewer statistics.tokens", "experts.repair = none"],
            **passes,
        )
    file = memory.statistics_file_bytes(shape, config)
    yield Planned(
        "statistics",
        pieces=domains * config.shards,
        kept=domains * file,
        passing=SHARDS_AND_SUM * file,
        memory=memory.statistics_bytes(shape, config, device=device),
        streamed=memory.streamed_statistics_bytes(shape, config, device=device),
        remedies=smaller,
        **passes,
    )
    routers = FP32 * shape.layers * domains * shape.hidden
    yield Planned("router", 1, 1, kept=routers, memory=memory.solving_bytes(shape, domains))
    model = shape.itemsize * shape.mixture(domains)
    yield Planned("model", 1, 1, kept=model, registered=model)
    scoring: dict[str, Any] = {"experts": domains, "device": compute.evaluation.device}
    scored = memory.evaluation_bytes(shape, recipe.evaluation, **scoring)
    drawn, swept = len(recipe.evaluation.random_routing_seeds), recipe.evaluation.sweep_top_k
    yield Planned(
        "report",
        1,
        domains + recipe.has_seed + 3 + drawn + len(swept),
        passing=_stored(shape),
        memory=scored,
        streamed=memory.streamed_evaluation_bytes(shape, recipe.evaluation, **scoring),
        kind="evaluation",
        resources=compute.evaluation,
        remedies=["evaluation.precision = bf16"] if recipe.evaluation.precision == "fp32" else [],
    )


def _joined(recipe: Recipe, shape: Shape) -> Shape:
    """The shape in the type that experts have: fp32 where they are trained whole here."""
    trains = any(domain.expert is None for domain in recipe.domains.values())
    if trains and recipe.experts.training.method != "lora":
        return replace(shape, itemsize=FP32)
    return shape


def _stored(shape: Shape) -> int:
    return shape.itemsize * shape.whole
