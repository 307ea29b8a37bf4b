"""Stage ``backbone``: everything that is not an MLP, merged (DUME, section 2.2: averaged)."""

import shutil
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from infra.cluster.pieces import Piece
from infra.recipe.schema import Recipe
from tasks.engine.params import backbone_keys, merge_keys, regression_keys
from tasks.engine.stage import StageRun, stage
from upcycle_core.architectures.family import LM_HEAD
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.config import MergeConfig
from upcycle_core.backbone.counts import frequencies, token_counts
from upcycle_core.backbone.rewrite import read_untied
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tensor_file import save_atomically
from upcycle_core.dume.attention import merge_attention
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.shared_head import final_moments, fitted_head
from upcycle_core.progress import Progress


def averaged(recipe: Recipe) -> tuple[str, ...]:
    """Domains whose experts' backbones are averaged."""
    if recipe.lineage is not None and "backbone" in recipe.lineage.pinned:
        return recipe.lineage.backbone
    return recipe.backbone.experts or tuple(recipe.domains)


def _counted(recipe: Recipe) -> list[str]:
    """Texts whose tokens are counted, in the order of the experts; none where nothing asks."""
    merge = recipe.backbone.merge
    if merge.embeddings != "counts" and merge.head == "average":
        return []
    has_none = {name for name, domain in recipe.domains.items() if domain.train is None}
    return [
        f"corpora/{name}/{'calibration' if name in has_none else 'train'}"
        for name in averaged(recipe)
    ]


def regressed(recipe: Recipe) -> list[str]:
    """Texts that attention or head is fitted on, in the order of the experts."""
    merge = recipe.backbone.merge
    if merge.attention == "average" and merge.head != "fitted":
        return []
    return [f"corpora/{name}/calibration" for name in averaged(recipe)]


def _inputs(recipe: Recipe, item: str) -> list[str]:
    experts = [f"experts/{name}" for name in averaged(recipe)]
    return list(dict.fromkeys([*experts, *_counted(recipe), *regressed(recipe)]))


def _params(recipe: Recipe, item: str) -> list[str]:
    regression = regression_keys() if regressed(recipe) else ()
    return ["moe.max_shard_bytes", *backbone_keys(recipe), *merge_keys(recipe), *regression]


@stage("backbone", _inputs, params=_params)
def backbone(run: StageRun) -> None:
    """Write the merged tensors."""
    recipe = run.recipe
    common = {"config": recipe.statistics, "device": run.device("statistics")}
    read = [
        Piece.of(
            f"states-{name}",
            states_piece,
            expert=run.path(f"experts/{name}"),
            corpus=run.path(f"corpora/{name}/calibration"),
            **common,
        )
        for name in (averaged(recipe) if recipe.backbone.merge.head == "fitted" else ())
    ]
    states = run.run(read, "statistics") if read else {}
    added: int = run.run_one(
        merge_piece,
        "statistics" if regressed(recipe) else "assembly",
        uses_gpu=recipe.backbone.merge.attention != "average",  # a head is fitted on the CPU
        experts=[run.path(f"experts/{name}") for name in averaged(recipe)],
        merge=recipe.backbone.merge,
        counted=[run.path(text) for text in _counted(recipe)],
        regressed=[run.path(text) for text in regressed(recipe)],
        moments=[states[piece.name].path for piece in read],
        max_shard_bytes=recipe.moe.max_shard_bytes,
        **common,
    )
    if added:
        run.session.log(f"the head is no longer the embedding: {added:,} parameters more")


def states_piece(*, out: Path, **arguments: Any) -> None:
    """A domain's piece of a fitted head: the second moment of what its expert's head reads."""
    moments = {"moments": final_moments(**arguments)}
    save_atomically(out, moments, kind="final_moments", header={})


def merge_piece(
    *,
    out: Path,
    progress: Progress,
    experts: Sequence[Path],
    merge: MergeConfig,
    counted: Sequence[Path],
    regressed: Sequence[Path],
    moments: Sequence[Path],
    config: StatisticsConfig,
    max_shard_bytes: int,
    device: str,
) -> int:
    """The piece.

    Returns:
        Parameters that a tied model has more for a head of its own.
    """
    readers = [CheckpointReader(path) for path in experts]

    def average(directory: Path) -> None:
        size = readers[0].config["vocab_size"]
        counts = [token_counts(text, size) for text in counted]
        head = None
        if moments:
            heads = [read_untied(reader)(LM_HEAD) for reader in readers]
            seconds = [load_file(file, device="cpu")["moments"] for file in moments]
            head = fitted_head(heads, frequencies(counts), seconds, progress=progress)
        progress.start("merging the backbone", 1, "models")
        write = partial(write_backbone, readers, merge=merge, counts=counts, head=head)
        write(directory, max_shard_bytes=max_shard_bytes)
        progress.advance()

    if merge.attention == "average":
        average(out)
    else:
        averaged_out = out.with_suffix(".averaged")
        config_file = averaged_out / "config.json"
        if not config_file.exists():  # written anew it would be another to what a kill left
            shutil.rmtree(averaged_out, ignore_errors=True)
            average(out)
            out.rename(averaged_out)
        merge_attention(
            experts,
            averaged_out,
            regressed,
            out,
            way=merge.attention,
            config=config,
            max_shard_bytes=max_shard_bytes,
            device=device,
            progress=progress,
        )
        config_file.unlink()  # first: a kill may leave the rest
        shutil.rmtree(averaged_out)
    if not moments or LM_HEAD in readers[0].tensors:
        return 0
    return prod(CheckpointReader(out).tensors[LM_HEAD].shape)
