"""What DUME's stages will need."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from infra.recipe.schema import Recipe
from tasks.dume.files import calibration_splits, repairs_routed, splits
from tasks.dume.variants import is_loaded_for_each, sweeps
from tasks.planning.lighter import lighter_pass
from tasks.planning.parts import (
    FP32,
    Subjects,
    experts_row,
    joined,
    parents_row,
    seed_row,
    statistics_flops,
    statistics_pass,
    text_rows,
    tokens_of,
)
from tasks.planning.row import Planned
from upcycle_core.dume.checks import fewest_tokens
from upcycle_core.dume.config import StatisticsConfig
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
    yield parents_row(recipe, subjects.shape)
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
    if recipe.experts.repair != "none":
        yield _repaired_row(recipe, subjects, shape, passes)
    yield _statistics_row(recipe, subjects, shape)
    yield _router_row(recipe, subjects, shape)
    if repairs_routed(recipe):
        yield _routed_row(recipe, subjects, shape)
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
    merge, config, domains = recipe.backbone.merge, recipe.statistics, subjects.domains
    tokens = tokens_of(config.tokens, subjects.calibration)
    row = Planned(
        "backbone",
        1,
        1,
        kept=kept,
        read=domains * kept,
        memory=memory.averaging_bytes(shape),
        resources=recipe.compute.assembly,
    )
    if merge.head == "fitted":
        row = _with_fitted_head(recipe, row, shape, tokens, domains)
    if merge.attention == "average":
        return row
    of: dict[str, Any] = {"experts": domains, "distils": merge.attention == "distilled"}
    resources = recipe.compute.statistics
    device, streams = resources.device, domains * (1 + of["distils"])
    held = memory.merged_attention_bytes(shape, config, tokens, device=device, **of)
    passes = work.merged_attention_flops(shape, tokens, config.sequence_length, **of)
    return replace(
        row,
        # The average that it begins with; states, and what each layer has made.
        passing=kept
        + memory.streamed_states_bytes(shape, config.precision, streams * tokens, device=device)
        + shape.itemsize * (shape.whole - shape.ends - shape.ffns),
        read=(row.read if row.alone else 0) + domains * shape.stored + kept,
        flops=(row.flops or 0) + passes or None,
        precision=config.precision,
        # Where pieces for a head came before, this one runs by itself.
        memory=row.memory if row.alone and not resources.gpus else max(row.memory, held),
        alone=max(row.alone, held) if row.alone and not resources.gpus else row.alone,
        alone_remedies=["backbone.merge.attention = average"] if held > row.alone else (),
        kind="statistics",
        resources=resources,
        remedies=[*_fewer_tokens(recipe, shape, tokens), "backbone.merge.attention = average"],
    )


def _with_fitted_head(
    recipe: Recipe, row: Planned, shape: Shape, tokens: int, domains: int
) -> Planned:
    """The backbone with a piece a domain for the states that its head is fitted on."""
    config, resources = recipe.statistics, recipe.compute.statistics
    passes = work.forward_flops(shape, tokens, config.sequence_length, head=False)
    return replace(
        row,
        pieces=domains,
        read=row.read + domains * shape.stored,
        flops=domains * passes or None,
        precision=config.precision,
        memory=memory.final_states_bytes(shape, config, tokens, device=resources.device),
        alone=memory.fitted_head_bytes(shape, experts=domains),
        alone_flops=work.fitted_head_flops(shape, experts=domains),
        kind="statistics",
        resources=resources,
        remedies=[*_fewer_tokens(recipe, shape, tokens), "backbone.merge.head = counts"],
    )


def _statistics_row(recipe: Recipe, subjects: Subjects, shape: Shape) -> Planned:
    config, domains = recipe.statistics, subjects.domains
    read = tokens_of(config.tokens, subjects.calibration)
    counts = [len(calibration_splits(recipe, domain)) for domain in recipe.domains]
    texts, file = sum(counts), memory.statistics_file_bytes(shape, config)
    return Planned(
        "statistics",
        domains,
        pieces=texts * config.shards,
        kept=texts * file,
        each=max(counts) * config.shards * file,  # until they are added up
        read=texts * config.shards * shape.stored,
        flops=texts * statistics_flops(recipe, shape, read) or None,
        **statistics_pass(recipe, shape, max(counts) * read),
    )


def _router_row(recipe: Recipe, subjects: Subjects, shape: Shape) -> Planned:
    domains, config, texts = subjects.domains, recipe.statistics, len(splits(recipe))
    file = memory.statistics_file_bytes(shape, config)
    cross_validates = recipe.router.ridge_lambda == "cross-validate"
    # Each lambda without each fold, and the one that is chosen with all.
    solved = 1 + cross_validates * config.parts * len(recipe.router.lambda_grid)
    row = Planned(
        "router",
        1,
        texts,
        kept=texts * FP32 * shape.layers * domains * shape.hidden,
        # Every fold is added up of the others, and by itself.
        read=texts * domains * file * (1 + cross_validates * config.parts),
        flops=texts * solved * shape.layers * shape.hidden**3,
        precision="fp64",
        memory=memory.solving_bytes(shape, config, cross_validates=cross_validates),
        resources=recipe.compute.assembly,
    )
    if recipe.router.solve != "sequential":
        return row
    resources, model = recipe.compute.statistics, shape.itemsize * shape.mixture(domains)
    tokens, length = tokens_of(config.tokens, subjects.calibration), config.sequence_length
    through = work.forward_flops(shape, tokens, length, head=False, top_k=recipe.moe.top_k)
    pieces, rounds = texts * shape.layers * domains * config.shards, texts * shape.layers
    needed = memory.sequential_bytes(shape, config, experts=domains, device=resources.device)
    return replace(
        row,
        pieces=pieces,
        rounds=rounds,
        passing=texts * (model + (config.shards + 1) * domains * file),
        read=row.read + pieces * model,
        # A layer's router is solved from a pass that ends there.
        flops=texts * domains * (shape.layers + 1) * through // 2 or None,
        precision=config.precision,
        memory=max(row.memory, needed),
        kind="statistics",
        resources=resources,
        remedies=["router.solve = joint"],
    )


def _routed_row(recipe: Recipe, subjects: Subjects, shape: Shape) -> Planned:
    """Of the second repair: all experts are one piece."""
    config, resources, domains = recipe.statistics, recipe.compute.statistics, subjects.domains
    tokens = tokens_of(config.tokens, subjects.calibration)
    head = recipe.experts.repair == "down+head_target"
    # teachers once, the routed model twice
    flops = work.repair_flops(shape, tokens, config.sequence_length, passes=3)
    return Planned(
        "routed",
        1,
        1,
        kept=domains * shape.stored,
        passing=domains * _layers_bytes(shape, config, tokens, device=resources.device),
        read=3 * domains * shape.stored,
        flops=domains * flops or None,
        precision=config.precision,
        memory=memory.routed_repair_bytes(
            shape, config, tokens, experts=domains, head=head, device=resources.device
        ),
        kind="statistics",
        resources=resources,
        remedies=[*_fewer_tokens(recipe, shape, tokens), "experts.repair_tokens = own"],
    )


def _repaired_row(
    recipe: Recipe, subjects: Subjects, shape: Shape, passes: dict[str, Any]
) -> Planned:
    config, device, domains = recipe.statistics, recipe.compute.statistics.device, subjects.domains
    tokens = tokens_of(recipe.statistics.tokens, subjects.calibration)
    head = recipe.experts.repair == "down+head_target"
    flops = work.repair_flops(shape, tokens, config.sequence_length)
    without = ["experts.repair = none"]  # and what asks for a repair
    if repairs_routed(recipe):
        without.append("experts.repair_tokens = own")
    if recipe.backbone.merge.head == "fitted":
        without.append("backbone.merge.head = average")
    return Planned(
        "repaired",
        pieces=domains,
        kept=domains * shape.stored,
        each=_layers_bytes(shape, config, tokens, device=device),
        read=2 * domains * shape.stored,
        flops=domains * flops,
        precision=config.precision,
        memory=memory.repair_bytes(shape, config, tokens, head=head, device=device),
        remedies=[*_fewer_tokens(recipe, shape, tokens), " and ".join(without)],
        **passes,
    )


def _fewer_tokens(recipe: Recipe, shape: Shape, tokens: int) -> list[str]:
    """The setting with which less text is read, where a repair can do with less."""
    fewest = fewest_tokens({"intermediate_size": shape.inner})
    if recipe.experts.repair == "none":
        return ["fewer statistics.tokens"]
    return [f"fewer statistics.tokens (at least {fewest:,})"] if tokens > fewest else []


def _layers_bytes(shape: Shape, config: StatisticsConfig, tokens: int, *, device: str) -> int:
    """Of one expert's repair until it is written: two models' states, and down projections."""
    states = memory.streamed_states_bytes(shape, config.precision, 2 * tokens, device=device)
    return states + shape.itemsize * shape.ffns // 3


def report_row(recipe: Recipe, subjects: Subjects, shape: Shape) -> Planned:
    """Every row of the report: experts, seed, and the model with one router or another."""
    compute, domains = recipe.compute, subjects.domains
    scoring: dict[str, Any] = {"experts": domains, "device": compute.evaluation.device}
    scored = memory.evaluation_bytes(shape, recipe.evaluation, **scoring)
    rows, texts = set(recipe.evaluation.rows), len(splits(recipe))
    drawn = recipe.evaluation.drawn_seeds(domains) if "random_routing" in rows else ()
    seeds = recipe.has_seed and "seed" in rows
    dense = domains + seeds + ("model_averaging" in rows)
    solved = len(recipe.evaluation.sweep_ridge_lambda) + len(recipe.evaluation.sweep_window)
    merged = texts * (1 + solved) + ("oracle" in rows) + len(drawn)
    crossed = sum(len(recipe.evaluation.scored_on(d, recipe.domains)) for d in recipe.domains)
    mixture = shape.itemsize * shape.mixture(domains)
    loaded = 1 + ("oracle" in rows)  # the MoE, and what the oracle puts together
    if is_loaded_for_each(compute.evaluation, mixture):
        loaded += sum(map(bool, (drawn, *sweeps(recipe.evaluation).values())))
    read = domains * tokens_of(recipe.evaluation.tokens, subjects.heldout)
    length = recipe.evaluation.sequence_length
    swept = recipe.evaluation.sweep_top_k
    one, routed, *wider = (
        work.forward_flops(shape, read, length, top_k=k) for k in (1, recipe.moe.top_k, *swept)
    )
    own = crossed * one // domains
    others = (dense - domains) * one + merged * routed + texts * sum(wider)
    return Planned(
        "report",
        1,
        dense + loaded,
        passing=shape.stored,
        read=dense * shape.stored + loaded * mixture,
        flops=own + others or None,
        precision=recipe.evaluation.precision,
        memory=scored,
        streamed=memory.streamed_evaluation_bytes(shape, recipe.evaluation, **scoring),
        states=memory.streamed_states_bytes(
            shape,
            recipe.evaluation.precision,
            (merged + texts * len(swept)) * read,  # all rows of the MoE, which is read once
            device=compute.evaluation.device,
        ),
        kind="evaluation",
        resources=compute.evaluation,
        lighter=lighter_pass(
            "evaluation",
            recipe.evaluation,
            compute.evaluation,
            partial(memory.evaluation_bytes, shape, **scoring),
            partial(memory.streamed_evaluation_bytes, shape, **scoring),
        ),
    )
