"""The statistics pass layer by layer: one layer's weights and sums at a time.

The sums are those of the pass that holds the model, bit for bit: every layer sees the same batches
in the same order.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from upcycle_core.activations.moments import Moments, save_sums
from upcycle_core.activations.stream import LayerStream
from upcycle_core.activations.walk import Text, Through, Walk
from upcycle_core.checkpoints.tensor_file import stream_atomically
from upcycle_core.checkpoints.writer import TensorSpec
from upcycle_core.corpora.batches import Batch
from upcycle_core.dume.collect import Layout, counted_tokens
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.progress import Progress

KIND = "statistics"


def stream_statistics(
    stream: LayerStream,
    batches: Sequence[Batch],
    out: Path,
    *,
    config: StatisticsConfig,
    folder: Path,
    progress: Progress,
    what: str,
) -> None:
    """Write what ``statistics.domain_statistics`` writes.

    Args:
        stream: The backbone with the domain's expert's FFNs.
        batches: Of one shard.
        out: File; appears when it is complete.
        config: What is kept apart.
        folder: Where hidden states and each layer's sums lie meanwhile. A call that was killed goes
            on at its layer.
        progress: Hears of every batch, in tokens through a layer.
        what: How progress names this.
    """
    size, layers = stream.model.config.hidden_size, tuple(range(stream.layers))
    layout = Layout(size, layers, config.parts, config.position_buckets)
    tokens = [int(batch.attention_mask.sum()) for batch in batches]
    progress.start(f"{what}, layer by layer", stream.layers * sum(tokens), "tokens of a layer")

    def visit(index: int, layer: nn.Module, through: Through) -> None:
        moments = Moments(size, cells=layout.cell_count, device=stream.device)
        reads: Any = _cut(layer) if index == stream.layers - 1 else layer.mlp
        for number, batch in enumerate(batches):
            of_batch = counted_tokens(batch.counted, batch.fold, layout)
            counted = [cell.to(stream.device) for cell in of_batch]

            def count(_mlp: nn.Module, given: Any, counted: Any = counted) -> None:
                for cell, rows in counted:
                    moments.update(given[0], rows=rows, cell=cell)

            hook = reads.register_forward_pre_hook(count)
            through(number)
            hook.remove()
            progress.advance(tokens[number])
        save_sums(_sums(folder, index), {str(index): moments}, kind=KIND, header={})

    passing = [Text(batch.input_ids) for batch in batches]
    walk = Walk(
        stream, passing, folder, key=[str(out), asdict(layout), config.count], needs_end=False
    )
    walk.go(visit)
    _join(folder, layout, out)
    walk.close()


def _cut(layer: nn.Module) -> nn.Module:
    """Leave out the last layer's FFN, behind which nothing is counted."""
    layer.mlp = nn.Identity()
    return layer.mlp


def _sums(folder: Path, layer: int) -> Path:
    return folder / f"{layer}.sums"


def _join(folder: Path, layout: Layout, out: Path) -> None:
    """One file of all layers' sums."""
    parts = Moments.layout(layout.hidden_size, cells=layout.cell_count).items()
    specs = [
        TensorSpec(f"{layer}.{part}", shape, dtype)
        for layer in layout.layers
        for part, (shape, dtype) in parts
    ]

    def read(name: str) -> Tensor:
        with safe_open(_sums(folder, int(name.partition(".")[0])), "pt") as file:
            return file.get_tensor(name)

    stream_atomically(out, specs, read, kind=KIND, header=asdict(layout))
