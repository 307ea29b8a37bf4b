"""Stage ``compression``: quality against size, and the smallest model that is good enough."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from infra.recipe.schema import Recipe, recipe_yaml
from tasks.ders.section import section
from tasks.ders.sweeps import artifact_of, base_of, sweep_inputs
from tasks.engine.artifacts import ORIGINAL, SWEEP
from tasks.engine.params import dume_keys
from tasks.engine.stage import StageRun, stage
from tasks.scoring.evaluation import perplexities
from upcycle_core.checkpoints.card import write_model_card
from upcycle_core.ders.config import CodecConfig, CompressionConfig
from upcycle_core.evaluation.compression.report import write_compression_report
from upcycle_core.evaluation.compression.results import Point, Sweep, smallest_within
from upcycle_core.evaluation.text.results import expert_row, title_of
from upcycle_core.progress import Progress

REPORT, MODEL = "report", "model"
"""Folders below the artifact; the chosen checkpoint's is not there if no way is good enough."""


def _inputs(recipe: Recipe, item: str) -> list[str]:
    first = sweep_inputs(recipe, section(recipe).models[0])
    return [*first, *(f"sweeps/{row}" for row in section(recipe).models), "report"]


def _params(recipe: Recipe, _item: str) -> Iterator[str]:
    """Of baselines those that are compressed, and what tables call them."""
    yield from (*dume_keys(recipe), "compression")
    for row in section(recipe).models:
        if row in recipe.baselines:
            yield from (f"baselines.{row}", f"baselines.{row}.title")


@stage("compression", _inputs, params=_params)
def compression(run: StageRun) -> None:
    """Write ``report/``, and in ``model/`` the smallest checkpoint within the tolerance."""
    recipe, how = run.recipe, section(run.recipe)
    report = json.loads((run.path("report") / "metrics.json").read_text())
    experts = {d: report["perplexity"][expert_row(d)][d] for d in recipe.domains}
    found = {row: json.loads((run.path(f"sweeps/{row}") / SWEEP).read_text()) for row in how.models}
    sweeps = [_sweep(recipe, row, values, experts) for row, values in found.items()]
    chosen = smallest_within(sweeps[0], how.tolerance)
    if chosen is not None:
        run.run_one(
            chosen_piece,
            "assembly",
            model=run.path(artifact_of(recipe, how.models[0])),
            base=base_of(run),
            codec=how.codecs[chosen],
            compression=how,
            max_shard_bytes=recipe.moe.max_shard_bytes,
            title=f"{recipe.name}, {chosen}",
            card=card_of(recipe, how.models[0]),
        )
    write_compression_report(
        run.out / REPORT,
        sweeps,
        {row_title(recipe, row): values[ORIGINAL]["cosines"] for row, values in found.items()},
        model=recipe.name,
        tolerance=how.tolerance,
    )


def card_of(recipe: Recipe, row: str) -> dict[str, Any]:
    """What the card of a compressed row says of it, by arguments of ``write_model_card``."""
    keys, rival = [*dume_keys(recipe), "compression"], recipe.baselines.get(row)
    experts, origin, title = list(recipe.domains), None, "DUME"
    if rival is not None:
        keys.append(f"baselines.{row}")
        title, whole = row_title(recipe, row), rival.uses_experts and not rival.seed_expert
        if not whole:
            experts, made = [], "of dense models and their seed"
            made = made if rival.uses_experts else "of copies of one dense model"
            origin = f"A Mixture-of-Experts {made}, by {title}, DeRS with Upcycle."
    return {
        "recipe_text": recipe_yaml(recipe, keys),
        "method": f"{title}, DeRS",
        "experts": experts,
        "origin": origin,
    }


def row_title(recipe: Recipe, row: str) -> str:
    """What people call a row that is compressed."""
    baseline = recipe.baselines.get(row)
    return title_of(row, ()) if baseline is None else baseline.title or row


def _sweep(
    recipe: Recipe, row: str, found: Mapping[str, Any], experts: Mapping[str, float]
) -> Sweep:
    reports = {name: values["report"] for name, values in found.items() if name != ORIGINAL}
    original = found[ORIGINAL]
    return Sweep(
        source=row_title(recipe, row),
        domains=tuple(recipe.domains),
        experts=experts,
        original=perplexities(original["scores"]),
        original_bytes=next(iter(reports.values()))["bytes_of_original"],
        original_expert_bytes=original["expert_bytes"],
        points={
            name: Point(
                codec=found[name]["codec"],
                bytes=report["bytes_on_disk"],
                perplexity=perplexities(found[name]["scores"]),
                formula_bytes=report["bytes_by_formula"],
                relative_error=mean(report["relative_errors"].values()),
            )
            for name, report in reports.items()
        },
    )


def chosen_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    base: Path | None,
    codec: CodecConfig,
    compression: CompressionConfig,
    max_shard_bytes: int,
    title: str,
    card: Mapping[str, Any],
) -> dict[str, Any]:
    """The piece: the checkpoint that is kept."""
    from upcycle_core.ders.compress import compress  # imports models of transformers

    report = compress(
        model,
        out / MODEL,
        config=codec,
        base=base,
        minimum_cosine=compression.minimum_cosine,
        seed=compression.seed,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
    write_model_card(out / MODEL, title=title, **card)
    return asdict(report)
