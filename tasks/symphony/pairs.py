"""Stage ``pairs``: the anchor and each other model over the same text (Symphony-MoE, step 1).

Pieces are (model, group of layers): one set of sums each, to which every domain's text is added in
place. Variants that compare the same models on the same text share them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.cluster.pieces import Piece
from infra.recipe.schema import Recipe
from tasks.engine.stage import StageRun, each, stage
from tasks.engine.workspace import take
from tasks.symphony.variants import SYMPHONY, anchor_of, pairings, variants
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.symphony.config import CalibrationConfig, SymphonyConfig
from upcycle_core.symphony.moments import collect_moments, layer_groups


def config_key(recipe: Recipe, variant: str, *parts: str) -> list[str]:
    """Dotted keys of a variant's settings, or of parts of them; a row may have none at all."""
    key = SYMPHONY if variant == SYMPHONY else f"baselines.{variant}.symphony"
    written = variant == SYMPHONY or recipe.baselines[variant].symphony is not None
    return [f"{key}.{part}" for part in parts] if parts and written else [key]


def calibrated(recipe: Recipe, config: SymphonyConfig) -> tuple[str, ...]:
    """The domains whose calibration text is read."""
    chosen = config.calibration.domains
    return (anchor_of(recipe, config),) if chosen == "anchor" else chosen or tuple(recipe.domains)


def strangers_of(recipe: Recipe, config: SymphonyConfig) -> list[str]:
    """The models that are compared with the anchor."""
    return [name for name in recipe.domains if name != anchor_of(recipe, config)]


def moment_files(directory: Path, model: str, layers: Sequence[tuple[int, ...]]) -> list[Path]:
    """Where the sums of a model lie, a file a group of layers."""
    return [directory / model / f"{group[0]:04d}.safetensors" for group in layers]


def groups_of(model: Path, config: CalibrationConfig) -> list[tuple[int, ...]]:
    """The layers of each piece."""
    return layer_groups(CheckpointReader(model).config["num_hidden_layers"], config.layers)


def _inputs(recipe: Recipe, pairing: str) -> Iterator[str]:
    config = variants(recipe)[pairing]
    yield from each(recipe, "experts/{domain}")
    yield from (f"documents/{name}/calibration.parquet" for name in calibrated(recipe, config))


@stage(
    "pairs/{pairing}",
    _inputs,
    params=lambda recipe, name: [
        *config_key(recipe, name, "anchor", "models", "calibration"),
        "corpus.bos",
    ],
    each=lambda recipe: dict.fromkeys(pairings(recipe).values()),
)
def pairs(run: StageRun) -> None:
    """Write one file of sums a model and group of layers."""
    recipe = run.recipe
    config = variants(recipe)[run.item]
    anchor = anchor_of(recipe, config)
    groups = groups_of(run.path(f"experts/{anchor}"), config.calibration)
    texts = {
        name: run.path(f"documents/{name}/calibration.parquet")
        for name in calibrated(recipe, config)
    }
    common = {
        "anchor": run.path(f"experts/{anchor}"),
        "texts": texts,
        "config": config.calibration,
        "bos": recipe.corpus.bos,
        "device": run.device("alignment"),
    }
    pieces = [
        Piece.of(
            f"{name}-{group[0]:04d}",
            collect_moments,
            model=run.path(f"experts/{name}"),
            names=(anchor, name),
            layers=group,
            **common,
        )
        for name in strangers_of(recipe, config)
        for group in groups
    ]
    done = run.run(pieces, "alignment")
    for said in _lacking(config.calibration.tokens, [found.result for found in done.values()]):
        run.session.log(f"{run.stage.label(run.item)}: {said}")
    for name in strangers_of(recipe, config):
        (run.out / name).mkdir()
        for group, target in zip(groups, moment_files(run.out, name, groups), strict=True):
            piece = done[f"{name}-{group[0]:04d}"].path
            take(piece, run.out / name)
            (run.out / name / piece.name).rename(target)


def _lacking(asked: int, found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What to say where the shortest text has fewer tokens than are asked for.

    Args:
        asked: Of each text.
        found: What pieces returned: ``tokens`` by text.
    """
    read = min(count for counts in found for count in counts["tokens"].values())
    if read < asked:
        texts = ", ".join(found[0]["tokens"])
        yield (
            f"symphony.calibration.tokens asks for {asked:,} of each text, and the shortest has "
            f"{read:,}: so many are read of each ({texts})"
        )
