"""A model and a copy of it in other coordinates are one model again after alignment."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from tests.upcycle_core.backbone.rewritten import (
    logits,
    pico_reader,
    random_move,
    random_order,
    random_orthogonal,
    rewritten,
)
from upcycle_core.activations.cross import CrossMoments, similarity
from upcycle_core.activations.pairs import (
    PairedBatch,
    collect_pairs,
    head_reader,
    neuron_reader,
    residual_readers,
)
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.average import write_average
from upcycle_core.backbone.heads import (
    HeadPairs,
    match_heads,
    move_heads,
    pairs_from_activations,
)
from upcycle_core.backbone.residual import (
    embedding_moments,
    fold_norms,
    residual_map,
    rotate_residual,
    unit_rows,
)
from upcycle_core.backbone.rewrite import Transform
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.progress import Silent
from upcycle_core.symphony.assignment import assign, permute_neurons

LAYERS, HEADS, GROUPS, SIZE, HIDDEN, NEURONS = (0, 1), 4, 2, 8, 32, 48


@dataclass
class Counted:
    """What one pass over the data says about two models."""

    residual: CrossMoments
    heads: dict[int, CrossMoments]
    neurons: dict[int, CrossMoments]


def folded(reader: CheckpointReader, out: Path) -> CheckpointReader:
    fold = fold_norms(family_of(reader.config), reader.tensor)
    return rewritten(reader, out, [fold], untie=True)


def disguised(reader: CheckpointReader, out: Path) -> CheckpointReader:
    """The folded model rotated, its heads shuffled and turned, its neurons permuted."""
    family = family_of(reader.config)
    changes = [
        rotate_residual(family, random_orthogonal(HIDDEN, 7)),
        move_heads(family, {la: random_move(HEADS, GROUPS, SIZE, la + 1) for la in LAYERS}),
        permute_neurons(family, {la: random_order(NEURONS, la) for la in LAYERS}),
    ]
    return rewritten(reader, out, changes)


def batches() -> list[PairedBatch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(4):
        tokens = torch.randint(96, (8, 24), generator=generator)
        rows = torch.arange(tokens.numel())
        found.append(
            PairedBatch(
                first_ids=tokens,
                first_mask=torch.ones_like(tokens),
                second_ids=tokens,
                second_mask=torch.ones_like(tokens),
                first_rows=rows,
                second_rows=rows,
            )
        )
    return found


def counted(anchor: CheckpointReader, stranger: CheckpointReader) -> Counted:
    """One pass through both models: neither heads nor neurons depend on the residual's basis."""
    family = family_of(anchor.config)
    stream = residual_readers(family, LAYERS)
    found = Counted(
        CrossMoments(HIDDEN),
        {layer: CrossMoments(HEADS * SIZE) for layer in LAYERS},
        {layer: CrossMoments(NEURONS) for layer in LAYERS},
    )
    moments = dict.fromkeys(stream, found.residual)
    moments |= {head_reader(layer): of for layer, of in found.heads.items()}
    moments |= {neuron_reader(family, layer): of for layer, of in found.neurons.items()}
    models = [
        AutoModel.from_pretrained(reader.directory, dtype=torch.float32).eval()
        for reader in (anchor, stranger)
    ]
    collect_pairs(
        *models,
        batches(),
        moments,
        change=lambda path, x: unit_rows(x) if path in stream else x,
        progress=Silent(),
    )
    return found


def alignment(
    anchor: CheckpointReader, stranger: CheckpointReader, *, by_embeddings: bool
) -> list[Transform]:
    """What brings the folded ``stranger`` into the coordinates of the folded ``anchor``."""
    family, data = family_of(anchor.config), counted(anchor, stranger)
    every = torch.arange(96)
    stream = (
        embedding_moments(anchor.tensor, stranger.tensor, (every, every))
        if by_embeddings
        else data.residual
    )
    rotate = rotate_residual(family, residual_map(stream).rotation)

    def pairs(layer: int) -> HeadPairs:
        return pairs_from_activations(data.heads[layer], heads=HEADS, groups=GROUPS)

    orders = {
        layer: assign(similarity(of, "correlation")).order for layer, of in data.neurons.items()
    }
    return [
        rotate,
        move_heads(family, {layer: match_heads(pairs(layer)) for layer in LAYERS}),
        permute_neurons(family, orders),
    ]


@pytest.mark.parametrize("by_embeddings", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "ernie4_5"])
def test_the_average_with_a_disguised_copy_is_the_model_again(
    tmp_path, family, tied, by_embeddings
):
    model = pico_reader(tmp_path / "model", family, tie_word_embeddings=tied)
    expected = logits(model)
    anchor = folded(model, tmp_path / "anchor")
    stranger = disguised(anchor, tmp_path / "stranger")
    assert (logits(stranger) - expected).abs().max() <= 1e-4

    def error_of_average(other: CheckpointReader, name: str) -> float:
        write_average([anchor, other], tmp_path / name, max_shard_bytes=10**9)
        return float((logits(CheckpointReader(tmp_path / name)) - expected).abs().max())

    changes = alignment(anchor, stranger, by_embeddings=by_embeddings)
    assert error_of_average(stranger, "naive") > 1
    assert error_of_average(rewritten(stranger, tmp_path / "back", changes), "together") <= 1e-3


@pytest.mark.parametrize("missing", range(3))
def test_no_part_of_the_alignment_is_superfluous(tmp_path, missing):
    model = pico_reader(tmp_path / "model", "qwen2")
    anchor = folded(model, tmp_path / "anchor")
    stranger = disguised(anchor, tmp_path / "stranger")
    changes = alignment(anchor, stranger, by_embeddings=False)
    del changes[missing]
    back = rewritten(stranger, tmp_path / "back", changes)
    write_average([anchor, back], tmp_path / "average", max_shard_bytes=10**9)
    error = (logits(CheckpointReader(tmp_path / "average")) - logits(model)).abs().max()
    assert error > 0.1
