"""Stage ``similarity``: how alike experts are, layer by layer, before and after they are joined."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from infra.cluster.pieces import Piece
from infra.recipe.schema import Recipe
from tasks.engine.stage import StageRun, each, stage
from tasks.symphony.compared import looked_at
from upcycle_core.corpora.config import Bos
from upcycle_core.evaluation.similarity.config import SimilarityConfig
from upcycle_core.evaluation.similarity.measure import (
    PairSimilarity,
    dense_similarity,
    moe_similarity,
)
from upcycle_core.evaluation.similarity.report import write_report
from upcycle_core.evaluation.similarity.results import Stage
from upcycle_core.progress import Progress
from upcycle_core.symphony.config import CalibrationConfig
from upcycle_core.symphony.texts import paired_texts


def _inputs(recipe: Recipe, item: str) -> Iterator[str]:
    calibration = ("documents/{domain}/calibration.parquet", "corpora/{domain}/calibration")
    for pattern in ("experts/{domain}", *calibration):
        yield from each(recipe, pattern)
    yield from (artifact for _, _, artifact in looked_at(recipe))


@stage(
    "similarity",
    _inputs,
    params=("similarity", "symphony", "baselines", "post_training", "corpus.bos"),
    each=lambda recipe: [""] if recipe.similarity is not None else [],
)
def similarity(run: StageRun) -> None:
    """Write ``similarity.{json,csv,md,png}`` and a picture a representation."""
    recipe = run.recipe
    common = {"config": recipe.similarity, "device": run.device("evaluation")}
    texts = {n: run.path(f"documents/{n}/calibration.parquet") for n in recipe.domains}
    models = {name: run.path(f"experts/{name}") for name in recipe.domains}
    pieces = [
        Piece.of(
            f"{first}.{second}",
            dense_piece,
            models={name: models[name] for name in (first, second)},
            texts=texts,
            bos=recipe.corpus.bos,
            **common,
        )
        for first, second in combinations(recipe.domains, 2)
    ]
    corpora = [run.path(f"corpora/{name}/calibration") for name in recipe.domains]
    moe = {"corpora": corpora, "names": list(recipe.domains), **common}
    pieces += [
        Piece.of(key, moe_piece, model=run.path(artifact), **moe)
        for key, _, artifact in looked_at(recipe)
    ]
    done = {name: _pairs(piece.result) for name, piece in run.run(pieces, "evaluation").items()}
    dense = [pair for name in combinations(recipe.domains, 2) for pair in done[".".join(name)]]
    stages = {"dense": Stage(title="original dense models", inputs="own", pairs=dense)}
    for key, title, _ in looked_at(recipe):
        stages[key] = Stage(title=title, inputs="shared", pairs=done[key])
    write_report(stages, run.out)


def dense_piece(
    *,
    out: Path,
    progress: Progress,
    models: Mapping[str, Path],
    texts: Mapping[str, Path],
    bos: Bos,
    config: SimilarityConfig,
    device: str,
) -> list[dict[str, Any]]:
    """The piece: two dense models on the same text, each with its own tokenizer."""
    read = CalibrationConfig(
        tokens=config.tokens, sequence_length=config.sequence_length, batch_size=config.batch_size
    )
    paired = paired_texts(texts, *models.values(), config=read, bos=bos)
    progress.start("comparing dense models", sum(paired.pairs.values()), "tokens")
    found = dense_similarity(
        models, paired.batches(), config=config, device=device, progress=progress
    )
    return [asdict(pair) for pair in found]


def moe_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    corpora: Sequence[Path],
    names: Sequence[str],
    config: SimilarityConfig,
    device: str,
) -> list[dict[str, Any]]:
    """The piece: the experts of one MoE, all on the input of their layer."""
    found = moe_similarity(model, corpora, names, config=config, device=device, progress=progress)
    return [asdict(pair) for pair in found]


def _pairs(values: Sequence[Mapping[str, Any]]) -> list[PairSimilarity]:
    return [PairSimilarity(**value) for value in values]
