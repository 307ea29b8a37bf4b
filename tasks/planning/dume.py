"""What DUME's stages will need."""

from collections.abc import Iterator
from typing import Any

from infra.recipe.schema import Recipe
from tasks.planning.parts import (
    FP32,
    Subjects,
    experts_row,
    joined,
    seed_row,
    text_rows,
    tokens_of,
)
from tasks.planning.row import Planned
from upcycle_core.planning import memory, work
from upcycle_core.planning.shape import Shape


def dume_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    """A row a stage, in the order in which they run."""
    yield from text_rows(recipe, subjects)
    yield from _training_rows(recipe, subjects)
    yield from _joining_rows(recipe, subjects)


def _training_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    seed = seed_row(recipe, subjects.shape)
    if seed is not None:
        yield seed
    yield experts_row(recipe, subjects.shape)


def _joining_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    shape, compute, domains = joined(recipe, subjects.shape), recipe.compute, subjects.domains
    backbone = shape.itemsize * (shape.whole - shape.ffns)
    yield _backbone_row(recipe, subjects, shape, backbone)
    passes: dict[str, Any] = {
        "kind": "statistics",
        "resources": compute.statistics,
        "items": domains,
    }
    config, device = recipe.statistics, compute.statistics.device
    smaller = ["a smaller statistics.batch_size"]
    read, length = tokens_of(config.tokens, subjects.calibration), config.sequence_length
    if recipe.experts.repair != "none":
        yield _repaired_row(recipe, subjects, shape, passes)
    file = memory.statistics_file_bytes(shape, config)
    yield Planned(
        "statistics",
        pieces=domains * config.shards,
        kept=domains * file,
        each=config.shards * file,  # until they are added up
        read=domains * config.shards * shape.stored,
        flops=domains * work.statistics_flops(shape, read, length) or None,
        precision=config.precision,
        memory=memory.statistics_bytes(shape, config, device=device),
        streamed=memory.streamed_statistics_bytes(shape, config, device=device),
        remedies=smaller,
        **passes,
    )
    routers = FP32 * shape.layers * domains * shape.hidden
    yield Planned(
        "router",
        1,
        1,
        kept=routers,
        read=domains * file,
        flops=shape.layers * shape.hidden**3,
        memory=memory.solving_bytes(shape, domains),
    )
    model = shape.itemsize * shape.mixture(domains)
    yield Planned(
        "model",
        1,
        1,
        kept=model,
        read=backbone + domains * shape.itemsize * shape.ffns,
        registered=model,
    )
    yield report_row(recipe, subjects, shape)


def _backbone_row(recipe: Recipe, subjects: Subjects, shape: Shape, kept: int) -> Planned:
    needed, fitting = memory.averaging_bytes(shape), 0
    if recipe.backbone.merge.head == "fitted":
        counts: dict[str, Any] = {"experts": subjects.domains}
        tokens = tokens_of(recipe.statistics.tokens, subjects.calibration)
        needed = memory.fitted_head_bytes(shape, recipe.statistics, tokens, **counts)
        fitting = work.fitted_head_flops(shape, **counts)
    read = subjects.domains * kept
    return Planned("backbone", 1, 1, kept=kept, read=read, flops=fitting, memory=needed)


def _repaired_row(
    recipe: Recipe, subjects: Subjects, shape: Shape, passes: dict[str, Any]
) -> Planned:
    config, device, domains = recipe.statistics, recipe.compute.statistics.device, subjects.domains
    tokens = tokens_of(recipe.statistics.tokens, subjects.calibration)
    head = recipe.experts.repair == "down+head_target"
    flops = work.forward_flops(shape, tokens, config.sequence_length, head=False)
    return Planned(
        "repaired",
        pieces=domains,
        kept=domains * shape.stored,
        read=2 * domains * shape.stored,
        flops=2 * domains * flops,
        precision=config.precision,
        memory=memory.repair_bytes(shape, config, tokens, head=head, device=device),
        remedies=["fewer statistics.tokens", "experts.repair = none"],
        **passes,
    )


def report_row(recipe: Recipe, subjects: Subjects, shape: Shape) -> Planned:
    """Every row of the report: experts, seed, and the model with one router or another."""
    compute, domains = recipe.compute, subjects.domains
    scoring: dict[str, Any] = {"experts": domains, "device": compute.evaluation.device}
    scored = memory.evaluation_bytes(shape, recipe.evaluation, **scoring)
    rows, swept = set(recipe.evaluation.rows), recipe.evaluation.sweep_top_k
    drawn = recipe.evaluation.drawn_seeds(domains) if "random_routing" in rows else ()
    seeds = recipe.has_seed and "seed" in rows
    dense = domains + seeds + ("model_averaging" in rows)
    merged = 1 + ("oracle" in rows) + len(drawn) + len(swept)
    crossed = sum(len(recipe.evaluation.scored_on(d, recipe.domains)) for d in recipe.domains)
    loaded = 1 + ("oracle" in rows)  # the MoE, and what the oracle puts together
    read = domains * tokens_of(recipe.evaluation.tokens, subjects.heldout)
    length = recipe.evaluation.sequence_length
    forwards = [work.forward_flops(shape, read, length, top_k=k) for k in (1, recipe.moe.top_k)]
    own = crossed * forwards[0] // domains
    others = (dense - domains) * forwards[0] + merged * forwards[1]
    return Planned(
        "report",
        1,
        dense + loaded,
        passing=shape.stored,
        read=dense * shape.stored + loaded * shape.itemsize * shape.mixture(domains),
        flops=own + others or None,
        precision=recipe.evaluation.precision,
        memory=scored,
        streamed=memory.streamed_evaluation_bytes(shape, recipe.evaluation, **scoring),
        kind="evaluation",
        resources=compute.evaluation,
        remedies=["evaluation.precision = bf16"] if recipe.evaluation.precision == "fp32" else [],
    )
