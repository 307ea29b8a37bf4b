"""Harmonising strangers: alignment, backbone, router and assembly, piece by piece."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from infra.cluster.pieces import Piece
from tasks.dume.router import solve_piece
from tasks.dume.statistics import in_shards, statistics_piece
from tasks.engine.artifacts import ALIGNMENT
from tasks.engine.stage import StageRun
from tasks.scoring.room import room_of
from tasks.symphony.pairs import groups_of, moment_files, strangers_of
from tasks.symphony.variants import anchor_of, chosen_of, pairings
from tasks.symphony.vocabulary import merged_backbone, union_arguments, union_of
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.residual import residual_map
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.dume.router_reader import load_routers
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers
from upcycle_core.progress import Progress
from upcycle_core.symphony.align import (
    Alignment,
    LayerAlignment,
    align_layer,
    alignment_facts,
    embedding_rotation,
    load_alignment,
    save_alignment,
    write_aligned,
    write_folded,
)
from upcycle_core.symphony.config import AlignmentConfig, SymphonyConfig
from upcycle_core.symphony.moments import layer_moments, residual_moments
from upcycle_core.symphony.unite import shared_tokens


def harmonise(run: StageRun, config: SymphonyConfig, *, top_k: int) -> Path:
    """Join the strangers as ``config`` says; returns where the checkpoint lies."""
    recipe = run.recipe
    chosen, anchor = chosen_of(recipe, config), anchor_of(recipe, config)
    aligned, facts = _aligned(run, config, anchor)
    everyone = {name: aligned.get(name, run.path(f"experts/{name}")) for name in recipe.domains}
    weights = {name: config.merge.weights.get(name, 1.0) for name in recipe.domains}
    # A model that is no expert has no part in the mean, but for tokens that nobody else has.
    weights = {name: weight if name in chosen else 0.0 for name, weight in weights.items()}
    merge = replace(config.merge, weights=weights)
    backbone = merged_backbone(run, "backbone", everyone, config=merge, anchor=anchor)
    experts = {name: everyone[name] for name in chosen}
    routers: Mapping[int, Tensor]
    if config.router == "random":
        shape = CheckpointReader(backbone).config
        layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
        routers = random_routers(layers, hidden, len(experts), seed=recipe.seed)
    else:
        routers = _ridge_routers(run, backbone, experts)
    path = run.done(
        "assembled",
        assemble,
        "assembly",
        experts=experts,
        backbone=backbone,
        routers=routers,
        top_k=top_k,
        max_shard_bytes=recipe.moe.max_shard_bytes,
    ).path
    (path / ALIGNMENT).write_text(json.dumps(facts, indent=1) + "\n")
    return path


def _aligned(
    run: StageRun, config: SymphonyConfig, anchor: str
) -> tuple[dict[str, Path], dict[str, Any]]:
    """Checkpoints in the anchor's coordinates, of those that change, and what was found."""
    recipe, alignment = run.recipe, config.alignment
    others = strangers_of(recipe, config)
    folded = alignment.residual != "none"
    if not folded and alignment.neurons == "none" and alignment.heads == "none":
        return {}, {}
    layers = groups_of(run.path(f"experts/{anchor}"), config.calibration)
    files = {}
    if alignment.uses_activations:
        pairs = run.path(f"pairs/{pairings(recipe)[run.item]}")
        files = {name: moment_files(pairs, name, layers) for name in others}
    shape = {"anchor": run.path(f"experts/{anchor}"), "config": alignment}
    pieces = {
        (name, layer): Piece.of(
            f"align-{name}-{layer:04d}", align_piece, file=file, layer=layer, **shape
        )
        for name in files
        for file, group in zip(files[name], layers, strict=True)
        for layer in group
        if alignment.neurons != "none" or alignment.heads == "match"
    }
    done = run.run(list(pieces.values()), "alignment", uses_gpu=False)
    written = {
        name: Piece.of(
            f"aligned-{name}",
            write_piece,
            name=name,
            parts=[done[p.name].path for (n, _), p in pieces.items() if n == name],
            files=files.get(name, []),
            max_shard_bytes=recipe.moe.max_shard_bytes,
            **shape,
            **union_arguments(run),
        )
        for name in ([anchor, *others] if folded else others)
    }
    made = run.run(list(written.values()), "assembly")
    found = {name: made[piece.name] for name, piece in written.items()}
    facts = {name: piece.result for name, piece in found.items() if name != anchor}
    return {name: piece.path for name, piece in found.items()}, facts


def align_piece(
    *,
    out: Path,
    progress: Progress,
    anchor: Path,
    file: Path,
    layer: int,
    config: AlignmentConfig,
) -> None:
    """The piece: one layer of one model, one assignment problem."""
    progress.start("assignment", 1, "layers")
    config_of = CheckpointReader(anchor).config
    shape = family_of(config_of).resolve(config_of)  # older ones say no number of key-value heads
    found = align_layer(
        layer_moments(file, "neurons", layer) if config.neurons != "none" else None,
        layer_moments(file, "heads", layer) if config.heads == "match" else None,
        config=config,
        heads_count=shape["num_attention_heads"],
        groups=shape["num_key_value_heads"],
    )
    save_alignment(out, Alignment(layers={layer: found}, residual=None))
    progress.advance()


def write_piece(
    *,
    out: Path,
    progress: Progress,
    anchor: Path,
    name: str,
    parts: Sequence[Path],
    files: Sequence[Path],
    config: AlignmentConfig,
    max_shard_bytes: int,
    models: Mapping[str, Path],
    segmentation: str | None,
) -> dict[str, Any]:
    """The piece: one model written anew in the anchor's coordinates."""
    progress.start("writing in the anchor's coordinates", 1, "models")
    if models[name] == anchor:
        write_folded(anchor, out, max_shard_bytes=max_shard_bytes)
        progress.advance()
        return {}
    layers: dict[int, LayerAlignment] = {}
    for part in parts:
        layers |= load_alignment(part).layers
    residual = None
    if config.residual == "procrustes":
        residual = residual_map(residual_moments(files))
    elif config.residual == "embeddings":
        names, union = list(models), union_of(models, segmentation)
        first = next(index for index, path in enumerate(models.values()) if path == anchor)
        tokens = shared_tokens(union, first, names.index(name))
        residual = embedding_rotation(anchor, models[name], tokens)
    alignment = Alignment(layers=layers, residual=residual)
    write_aligned(models[name], alignment, out, max_shard_bytes=max_shard_bytes)
    progress.advance()
    return alignment_facts(alignment)


def _ridge_routers(
    run: StageRun, backbone: Path, experts: Mapping[str, Path]
) -> Mapping[int, Tensor]:
    """DUME's routers on the harmonised model: layer to W [H, D]."""
    texts: dict[str, dict[str, Any]] = {
        f"statistics-{name}": {
            "room": room_of(run.recipe.compute, "statistics"),
            "backbone": backbone,
            "expert": expert,
            "corpus": run.path(f"corpora/{name}/calibration"),
        }
        for name, expert in experts.items()
    }
    files = in_shards(run, statistics_piece, texts).values()
    solved = run.done(
        "routers",
        solve_piece,
        "assembly",
        statistics=dict(zip(experts, files, strict=True)),
        config=run.recipe.router,
    )
    return load_routers(solved.path).weights
