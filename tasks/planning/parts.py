"""What a recipe is about, and the stages that all methods share: text, and training."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from infra.recipe.resources import WorkerResources
from infra.recipe.schema import Recipe
from tasks.data.given import given_type
from tasks.planning.lighter import Lighter, lighter_pass, method_of, worker_bytes
from tasks.planning.row import FP32, Planned
from upcycle_core.checkpoints.load import DTYPES
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.planning import memory, work
from upcycle_core.planning.rehearsal import trained_parameters
from upcycle_core.planning.shape import Shape
from upcycle_core.training.config import ExpertTrainingConfig, TrainingConfig

MOMENTS = 2
CHECKPOINTS = 3
"""Checkpoints of a training while the third is written: two are kept, and the one that it would end
with where that is an older one."""
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
    # What is read lies in a file until it is deduplicated.
    spool = max(subjects.text.values(), default=0)
    yield Planned("documents", kept=kept, each=spool, read=text, resources=corpora, **common)
    tokens = each * text // BYTES_A_TOKEN
    yield Planned("corpora", kept=tokens, read=kept, resources=corpora, **common)


def seed_row(recipe: Recipe, shape: Shape) -> Planned | None:
    """The seed: trained here, given, or none."""
    compute = recipe.compute
    if recipe.trains_seed:
        trained = training(
            shape, recipe.seed_model.training, compute.seed, "seed_model.training", kind="seed"
        )
        return replace(
            trained, stage="seed", kind="seed", resources=compute.seed, read=FP32 * shape.whole
        )
    if recipe.has_seed:
        return Planned("seed", 1, 1, kept=as_given(recipe, shape).stored, read=shape.stored)
    return None


def parents_row(recipe: Recipe, shape: Shape) -> Planned:
    """Copies of the experts that others are continued from."""
    count = len(recipe.parents)
    kept = count * joined(recipe, shape).stored
    return Planned("parents", count, count, kept=kept, read=kept)


def experts_row(recipe: Recipe, shape: Shape, of: Collection[str] | None = None) -> Planned:
    """Experts that are trained here, and those that are ready.

    Args:
        recipe: The recipe.
        shape: Of every expert.
        of: Which domains'; all by default.
    """
    names = recipe.domains if of is None else of
    domains, form = len(names), as_given(recipe, shape)
    configs = [found for name, found in trainings(recipe).items() if name in names]
    counts, count = Counter(where for where, _ in configs), len(configs)
    ready = (domains - count) * form.stored
    if not count:
        return Planned("experts", domains, domains, kept=ready, read=domains * shape.stored)
    rows = {
        where: training(form, config, recipe.compute.experts, where) for where, config in configs
    }
    largest = max(rows.values(), key=lambda row: row.memory)
    return replace(
        largest,
        stage="experts",
        kind="experts",
        resources=recipe.compute.experts,
        kept=sum(n * rows[where].kept for where, n in counts.items()) + ready,
        each=max(row.each for row in rows.values()),
        written=sum(n * rows[where].writes for where, n in counts.items()) + ready,
        read=domains * shape.stored,
        flops=sum(n * (rows[where].flops or 0) for where, n in counts.items()),
        items=domains,
        pieces=count,
    )


def trainings(recipe: Recipe) -> dict[str, tuple[str, ExpertTrainingConfig]]:
    """{domain whose expert is trained here: the recipe's section that says how, and that}"""
    usual, own = ("experts.training", recipe.experts.training), recipe.experts.continued
    later = usual if own is None else ("experts.continued", own)
    return {
        name: later if name in recipe.parents else usual
        for name, domain in recipe.domains.items()
        if domain.expert is None
    }


def training(
    shape: Shape,
    config: TrainingConfig,
    resources: WorkerResources,
    where: str = "experts.training",
    *,
    kind: str = "experts",
) -> Planned:
    """One training: weights in fp32 come out, and the checkpoints that lie beside it meanwhile.

    Args:
        shape: What is trained.
        config: How.
        resources: Of a worker.
        where: The section of a recipe that says how.
        kind: The section of ``compute`` that says with what.
    """
    method = method_of(config) or "full"
    trained = trained_parameters(shape, method)
    itemsize = shape.itemsize if method == "lora" else FP32
    # What is frozen is written as well, in its own type.
    whole = itemsize * shape.whole
    checkpoint = whole + moments_bytes(config) * trained
    return Planned(
        "",
        1,
        1,
        kept=itemsize * shape.whole,
        each=checkpoints_at_once(config) * checkpoint,
        written=itemsize * shape.whole + checkpoints_in_all(config) * checkpoint,
        memory=worker_bytes(shape, config, resources),
        flops=work.training_flops(shape, config),
        precision=config.precision,
        lighter=Lighter(shape, config, resources, where, kind),
    )


def moments_bytes(config: TrainingConfig) -> int:
    """What a checkpoint holds of a trained parameter beside itself."""
    return MOMENTS * (FP32 if config.optimizer_state == "fp32" else FP32 // 2)


def checkpoints_at_once(config: TrainingConfig, *, may_end_before: bool = False) -> int:
    """How many checkpoints of a training lie on the disk together, at most.

    Args:
        config: Of the training.
        may_end_before: Whether it may end with one that is not the last, whatever the loss.
    """
    most = CHECKPOINTS + (config.keep == "best" or may_end_before)
    return min(most, checkpoints_in_all(config))


def checkpoints_in_all(config: TrainingConfig) -> int:
    """How many checkpoints a training writes, one after the other."""
    return -(-config.steps // config.checkpoint_steps)


def joined(recipe: Recipe, shape: Shape) -> Shape:
    """The shape in the type that experts have: fp32 where they are trained whole here.

    A head that is fitted is no longer the embedding.
    """
    shape = as_given(recipe, shape)
    if recipe.backbone.merge.head == "fitted":
        shape = shape.with_vocabulary(shape.vocabulary, tied=False)
    # What is continued was trained before, by the same settings.
    configs = dict(trainings(recipe).values())
    if configs:
        configs["experts.training"] = recipe.experts.training
    if any(config.method != "lora" for config in configs.values()):
        return in_type(shape, torch.float32)
    return shape


def as_given(recipe: Recipe, shape: Shape) -> Shape:
    """The shape in the type that given models get."""
    dtype = given_type(recipe)
    return shape if dtype == "auto" else in_type(shape, DTYPES[dtype])


def in_type(shape: Shape, dtype: torch.dtype) -> Shape:
    """The shape of the same weights in another type."""
    return replace(shape, itemsize=dtype.itemsize, dtype=dtype)


def statistics_pass(recipe: Recipe, shape: Shape, read: int) -> dict[str, Any]:
    """What pieces of statistics hold and reserve, as fields of a row.

    Args:
        recipe: The recipe.
        shape: The dense model that is passed through.
        read: Tokens that an item reads; where it goes layer by layer its files hold hidden states
            of them, but for those behind ``statistics.window``.
    """
    read = read * forwarded(recipe.statistics).sequence_length // recipe.statistics.sequence_length
    config, resources = forwarded(recipe.statistics), recipe.compute.statistics
    device = resources.device
    return {
        "kind": "statistics",
        "resources": resources,
        "precision": config.precision,
        "memory": memory.statistics_bytes(shape, config, device=device),
        "streamed": memory.streamed_statistics_bytes(shape, config, device=device),
        "states": memory.streamed_states_bytes(shape, config.precision, read, device=device),
        "lighter": lighter_pass(
            "statistics",
            config,
            resources,
            partial(memory.statistics_bytes, shape, device=device),
            partial(memory.streamed_statistics_bytes, shape, device=device),
        ),
    }


def statistics_flops(recipe: Recipe, shape: Shape, tokens: int) -> int:
    """Of the statistics of a text of so many tokens; those behind the window are not computed."""
    whole, length = recipe.statistics.sequence_length, forwarded(recipe.statistics).sequence_length
    return work.statistics_flops(shape, tokens * length // whole, length)


def forwarded(config: StatisticsConfig) -> StatisticsConfig:
    """With the length that is forwarded of each paragraph, in place of all of it."""
    window = config.window or config.sequence_length
    return replace(config, sequence_length=min(window, config.sequence_length))


def tokens_of(asked: int | None, texts: Mapping[str, int]) -> int:
    """Tokens of a domain that a pass reads: as many as asked for, or as there are.

    Args:
        asked: By the recipe.
        texts: Bytes of each domain's text.
    """
    there = max(texts.values(), default=0) // BYTES_A_TOKEN
    return min(asked, there) if asked and there else asked or there
