"""What the stages of Symphony-MoE will need."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from infra.recipe.schema import Recipe
from tasks.planning.joined import mixture_row, scoring_row
from tasks.planning.parts import (
    FP32,
    Subjects,
    experts_row,
    joined,
    parents_row,
    statistics_flops,
    statistics_pass,
    text_rows,
    tokens_of,
)
from tasks.planning.row import Planned
from tasks.symphony.compared import looked_at
from tasks.symphony.variants import (
    SYMPHONY,
    chosen_of,
    pairings,
    section,
    starts,
    variants,
)
from tasks.training import trained_rows
from upcycle_core.baselines.config import Baseline
from upcycle_core.planning import alignment, memory, work
from upcycle_core.planning.shape import Shape
from upcycle_core.symphony.config import CalibrationConfig, SymphonyConfig


def symphony_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    """A row a stage, in the order in which they run."""
    own, union = joined(recipe, subjects.shape), _union(recipe, subjects)
    yield from text_rows(recipe, subjects)
    yield parents_row(recipe, subjects.shape)
    yield experts_row(recipe, subjects.shape)
    copies = subjects.domains * union.stored
    yield Planned(
        "united",
        1,
        subjects.domains,
        kept=copies,
        passing=union.stored,
        read=2 * subjects.domains * own.stored,
        memory=alignment.merging_bytes(union, subjects.domains),
        resources=recipe.compute.assembly,
    )
    yield from _pairs_rows(recipe, subjects, own)
    yield _starts_row(recipe, subjects, own, union)
    if names := trained_rows(recipe):
        yield variants_row(recipe, subjects, names)
    yield _model_row(recipe, union)
    yield scoring_row("report", recipe, subjects, _joined_shape(recipe, SYMPHONY, union))
    if recipe.similarity is not None:
        yield _similarity_row(recipe, subjects, own, union)


def variants_row(recipe: Recipe, subjects: Subjects, names: Collection[str]) -> Planned:
    """Trainings of some rivals and ablations."""
    rows, union = {name: recipe.baselines[name] for name in names}, _union(recipe, subjects)
    shapes = {name: _joined_shape(recipe, name, union) for name in rows}
    return mixture_row("baselines", recipe, rows, shapes, kind="baselines")


def _union(recipe: Recipe, subjects: Subjects) -> Shape:
    """Of every model once all share one vocabulary."""
    own = joined(recipe, subjects.shape)
    return own.with_vocabulary(subjects.vocabulary or own.vocabulary)


def _pairs_rows(recipe: Recipe, subjects: Subjects, shape: Shape) -> Iterator[Planned]:
    """Of all pairings together: a row, as the stage is one."""
    every, ways = variants(recipe), set(pairings(recipe).values())
    found = [_pair(recipe, subjects, shape, every[name]) for name in sorted(ways)]
    if found:
        yield replace(_together(found), items=len(found))


def _together(rows: Collection[Planned]) -> Planned:
    """One row of several of a kind, of which one is at work at a time."""
    is_known = all(row.flops is not None for row in rows)
    return replace(
        max(rows, key=lambda row: row.memory),
        pieces=sum(row.pieces for row in rows),
        kept=sum(row.kept for row in rows),
        read=sum(row.read for row in rows),
        flops=sum(row.flops or 0 for row in rows) if is_known else None,
    )


def _pair(recipe: Recipe, subjects: Subjects, shape: Shape, variant: SymphonyConfig) -> Planned:
    """The anchor beside every other model, a group of layers a piece."""
    config, others = variant.calibration, subjects.domains - 1
    groups = -(-shape.layers // config.layers)
    tokens = _texts(recipe, variant) * tokens_of(config.tokens, subjects.calibration)
    each = work.pairs_flops(shape, tokens, config.sequence_length, groups=groups)
    resources = recipe.compute.alignment
    smaller = []
    if config.layers > 1:
        smaller.append(_fewer(recipe, shape, config, device=resources.device))
    if config.batch_size > 1:
        smaller.append("a smaller symphony.calibration.batch_size")
    return Planned(
        "pairs",
        1,
        others * groups,
        kept=others * alignment.pairs_file_bytes(shape, config),
        read=2 * others * groups * shape.stored,
        flops=others * each or None,
        precision=config.precision,
        memory=alignment.pairs_bytes(shape, config, device=resources.device),
        kind="alignment",
        resources=resources,
        remedies=smaller,
    )


def _fewer(recipe: Recipe, shape: Shape, config: CalibrationConfig, *, device: str) -> str:
    """The setting with the least memory, and what it needs."""
    least = alignment.pairs_bytes(shape, replace(config, layers=1), device=device)
    return f"symphony.calibration.layers = 1 (then {least / 1e9:.1f} GB a piece)"


def _texts(recipe: Recipe, variant: SymphonyConfig) -> int:
    """Domains whose calibration text is read."""
    chosen = variant.calibration.domains
    return 1 if chosen == "anchor" else len(chosen or recipe.domains)


def _joined_shape(recipe: Recipe, name: str, union: Shape) -> Shape:
    """Of the dense part of a row: rotation into another basis unties the head."""
    variant = variants(recipe).get(name)
    if variant is None or variant.alignment.residual == "none":
        return union
    return union.with_vocabulary(union.vocabulary, tied=False)


def _experts_of(recipe: Recipe, name: str) -> int:
    """How many a row has; 0 for the dense anchor."""
    if name == SYMPHONY:
        return len(chosen_of(recipe, section(recipe)))
    return recipe.baselines[name].experts(len(recipe.domains))


def _starts_row(recipe: Recipe, subjects: Subjects, own: Shape, union: Shape) -> Planned:
    """Every way of joining: alignment, backbone, routers, assembly."""
    kept, most, needed, flops = 0, 0, 0, 0
    solving = _solving(recipe, subjects, union)
    for name in starts(recipe):
        shape = _joined_shape(recipe, name, union)
        kept += joined_bytes(shape, recipe.baselines.get(name), _experts_of(recipe, name))
        variant = variants(recipe).get(name)
        needed = max(needed, alignment.merging_bytes(union, subjects.domains))
        if variant is None:
            continue
        aligned = _joined_shape(recipe, name, own)
        moved = subjects.domains if variant.alignment.residual != "none" else subjects.domains - 1
        sums = solving[name].writes if name in solving else 0
        most = max(most, moved * aligned.stored + union.stored + sums)
        needed = max(needed, alignment.aligning_bytes(own, variant.alignment))
        flops += moved * own.layers * _assigning(own, variant)
    count = len(starts(recipe))
    return Planned(
        "starts",
        count,
        count * max(1, (subjects.domains - 1) * own.layers),
        kept=kept,
        passing=most,
        read=count * 3 * subjects.domains * own.stored,
        flops=flops,
        memory=needed,
        kind="alignment",
        resources=recipe.compute.alignment,
        also=_sums(solving.values()),
    )


def _solving(recipe: Recipe, subjects: Subjects, union: Shape) -> dict[str, Planned]:
    """{way of joining: statistics from which its routers are solved}"""
    config, found = recipe.statistics, {}
    read = tokens_of(config.tokens, subjects.calibration)
    for name, variant in variants(recipe).items():
        if variant.router != "ridge" or name not in starts(recipe):
            continue
        shape, texts = _joined_shape(recipe, name, union), subjects.domains
        found[name] = Planned(
            "starts: statistics",
            1,
            texts * config.shards,
            written=texts * (config.shards + 1) * memory.statistics_file_bytes(shape, config),
            read=texts * config.shards * shape.stored,
            flops=texts * statistics_flops(recipe, shape, read) or None,
            **statistics_pass(recipe, shape, texts * read),
        )
    return found


def _sums(solving: Collection[Planned]) -> Planned | None:
    """All statistics together, one way of joining after the other."""
    if not solving:
        return None
    written = sum(row.writes for row in solving)
    return replace(_together(solving), rounds=len(solving), written=written)


def _assigning(shape: Shape, variant: SymphonyConfig) -> int:
    """Of a layer: what a rotation multiplies; assignments are no products."""
    return 4 * shape.hidden**3 if variant.alignment.residual != "none" else 0


def joined_bytes(shape: Shape, row: Baseline | None, experts: int) -> int:
    """Of a joined checkpoint."""
    if not experts:
        return shape.stored
    size = shape.mixture(experts)
    if row is not None and row.method == "bam":
        size += (experts - 1) * 2 * shape.layers * shape.hidden * shape.heads_width
    return shape.itemsize * size


def _model_row(recipe: Recipe, union: Shape) -> Planned:
    shape, experts = _joined_shape(recipe, SYMPHONY, union), _experts_of(recipe, SYMPHONY)
    if recipe.post_training is None:
        size = shape.itemsize * shape.mixture(experts)
        return Planned("model", 1, 1, kept=size, registered=size, read=size)
    post = recipe.post_training
    row = Baseline(
        method="symphony",
        training=post.training,
        objective=post.objective,
        symphony=section(recipe),
        top_k=recipe.moe.top_k,
    )
    trained = mixture_row("model", recipe, {SYMPHONY: row}, {SYMPHONY: shape}, kind="post_training")
    return replace(trained, registered=FP32 * shape.mixture(experts))


def _similarity_row(recipe: Recipe, subjects: Subjects, own: Shape, union: Shape) -> Planned:
    config, resources = recipe.similarity, recipe.compute.evaluation
    assert config is not None
    domains = subjects.domains
    common: dict[str, Any] = {"device": resources.device}
    dense = alignment.similarity_bytes(own, config, 2, **common)
    mixed = alignment.similarity_bytes(union, config, domains, experts=domains, **common)
    pairs = domains * (domains - 1) // 2
    merged = sum(1 for _ in looked_at(recipe))
    widths = [{"neurons": own.inner, "outputs": own.hidden}[r] for r in config.representations]
    tokens = domains * tokens_of(config.tokens, subjects.calibration)
    flops = [
        work.similarity_flops(own, tokens, config.sequence_length, streams=n, widths=widths)
        for n in (2, domains)
    ]
    smaller = []
    if "neurons" in config.representations:
        least = replace(config, representations=("outputs",))
        size = alignment.similarity_bytes(union, least, domains, experts=domains, **common)
        smaller.append(f"similarity.representations = [outputs] (then {size / 1e9:.1f} GB)")
    return Planned(
        "similarity",
        1,
        pairs + merged,
        read=2 * pairs * own.stored + merged * union.itemsize * union.mixture(domains),
        flops=pairs * flops[0] + merged * flops[1] or None,
        precision=config.precision,
        memory=max(dense, mixed),
        kind="evaluation",
        resources=resources,
        remedies=[*smaller, "similarity = null"],
    )
