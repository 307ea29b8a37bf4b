"""What a recipe is about, and the stages that all methods share: text, and training."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from infra.recipe.resources import WorkerResources
from infra.recipe.schema import Recipe
from tasks.planning.row import Planned, dividing
from upcycle_core.planning import work
from upcycle_core.planning.estimate import training_bytes
from upcycle_core.planning.rehearsal import trained_parameters
from upcycle_core.planning.shape import Shape
from upcycle_core.training.config import ExpertMethod, ExpertTrainingConfig, TrainingConfig

FP32, MOMENTS = 4, 2
CHECKPOINTS = 3
"""Checkpoints of a training while the third is written: two are kept."""
BYTES_A_TOKEN = 4
"""Of text in a language with a Latin script."""
STORED_TEXT = 0.45
"""Of documents as Parquet, of their text's size."""


@dataclass(frozen=True)
class Subjects:
    """What a recipe is about.

    Args:
        shape: Of the seed and of every expert.
        text: Bytes of each domain's texts, all that is read; 0 where that is not known.
        calibration: Of them, what statistics may read.
        heldout: Of them, what models are judged by.
        vocabulary: Tokens of the union, where models do not share one.
    """

    shape: Shape
    text: Mapping[str, int]
    calibration: Mapping[str, int]
    heldout: Mapping[str, int]
    vocabulary: int = 0

    @property
    def domains(self) -> int:
        """D."""
        return len(self.text)


def text_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    """Reading and tokenising."""
    text, domains = sum(subjects.text.values()), subjects.domains
    each = 2 if subjects.shape.vocabulary <= 1 << 16 else FP32
    common: dict[str, Any] = {"items": domains, "pieces": domains, "kind": "corpora"}
    corpora = recipe.compute.corpora
    kept = int(STORED_TEXT * text)
    yield Planned("documents", kept=kept, read=text, resources=corpora, **common)
    tokens = each * text // BYTES_A_TOKEN
    yield Planned("corpora", kept=tokens, read=kept, resources=corpora, **common)


def seed_row(recipe: Recipe, shape: Shape) -> Planned | None:
    """The seed: trained here, given, or none."""
    compute = recipe.compute
    if recipe.trains_seed:
        trained = training(shape, recipe.seed_model.training, compute.seed)
        return replace(
            trained, stage="seed", kind="seed", resources=compute.seed, read=FP32 * shape.whole
        )
    if recipe.has_seed:
        return Planned("seed", 1, 1, kept=shape.stored, read=shape.stored)
    return None


def experts_row(recipe: Recipe, shape: Shape) -> Planned:
    """Experts that are trained here, and those that are ready."""
    domains = len(recipe.domains)
    given = sum(domain.expert is not None for domain in recipe.domains.values())
    ready = given * shape.stored
    count = domains - given
    if not count:
        return Planned("experts", given, given, kept=ready, read=ready)
    one = training(shape, recipe.experts.training, recipe.compute.experts)
    return replace(
        one,
        stage="experts",
        kind="experts",
        resources=recipe.compute.experts,
        kept=count * one.kept + ready,
        passing=count * one.passing,
        written=count * one.writes + ready,
        read=domains * shape.stored,
        flops=count * (one.flops or 0),
        items=domains,
        pieces=count,
    )


def training(shape: Shape, config: TrainingConfig, resources: WorkerResources) -> Planned:
    """One training: weights in fp32 come out, and the checkpoints that lie beside it meanwhile."""
    method: ExpertMethod = config.method if isinstance(config, ExpertTrainingConfig) else "full"
    trained = trained_parameters(shape, method)
    moment = FP32 if config.optimizer_state == "fp32" else FP32 // 2
    workers = dividing(resources)
    smaller = {
        "full": ["experts.training.method = ffn", "experts.training.method = lora"],
        "layers": ["experts.training.method = ffn", "experts.training.method = lora"],
        "ffn": ["experts.training.method = lora"],
        "lora": [],
    }[method]
    if config.batch_size > 1:
        smaller.append("a smaller experts.training.batch_size, with gradient_accumulation")
    if workers == 1:
        smaller.append("compute.experts.sharding = full, with workers on several machines")
    itemsize = shape.itemsize if method == "lora" else FP32
    # What is frozen is written as well, in its own type.
    whole = itemsize * shape.whole
    checkpoint = whole + moment * MOMENTS * trained
    return Planned(
        "",
        1,
        1,
        kept=itemsize * shape.whole,
        passing=CHECKPOINTS * checkpoint,
        written=itemsize * shape.whole + -(-config.steps // config.checkpoint_steps) * checkpoint,
        memory=training_bytes(shape, config, device=resources.device, workers=workers),
        flops=work.training_flops(shape, config),
        precision=config.precision,
        remedies=smaller,
    )


def joined(recipe: Recipe, shape: Shape) -> Shape:
    """The shape in the type that experts have: fp32 where they are trained whole here.

    A head that is fitted is no longer the embedding.
    """
    if recipe.backbone.merge.head == "fitted":
        shape = shape.with_vocabulary(shape.vocabulary, tied=False)
    trains = any(domain.expert is None for domain in recipe.domains.values())
    if trains and recipe.experts.training.method != "lora":
        return replace(shape, itemsize=FP32)
    return shape


def tokens_of(asked: int | None, texts: Mapping[str, int]) -> int:
    """Tokens of a domain that a pass reads: as many as asked for, or as there are.

    Args:
        asked: By the recipe.
        texts: Bytes of each domain's text.
    """
    there = max(texts.values(), default=0) // BYTES_A_TOKEN
    return min(asked, there) if asked and there else asked or there
