"""Statistics files: a domain's (A_d, s_d, n_d) per layer, in folds and position buckets.

Everything DUME's router needs (Eq. 7) is in these sums, so lambda, the subset of domains, their
weights and the token window can change without another forward pass.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from upcycle_core.activations.moments import Moments, save_sums
from upcycle_core.activations.stream import LayerStream
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.stitch import load_stitched, open_stitched, stitched_reader
from upcycle_core.checkpoints.tensor_file import read_header, stream_atomically
from upcycle_core.checkpoints.writer import TensorSpec
from upcycle_core.dume.collect import Layout, collect_shard, shard_batches
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.streamed import KIND, stream_statistics
from upcycle_core.errors import Fault, InputError
from upcycle_core.precision import chosen, weights_type
from upcycle_core.progress import Progress, Silent


@dataclass(frozen=True)
class Statistics:
    """A statistics file, read layer by layer when asked."""

    path: Path
    layout: Layout

    @classmethod
    def load(cls, path: Path) -> "Statistics":
        """Read the header of ``path``.

        Raises:
            InputError: it is no statistics file.
        """
        fields = read_header(path, kind=KIND)
        lists = {key: tuple(fields[key]) for key in ("layers", "position_buckets")}
        return cls(Path(path), Layout(**{**fields, **lists}))

    def moments(
        self, layer: int, *, folds: Sequence[int] | None = None, window: int | None = None
    ) -> Moments:
        """What was counted at ``layer``: (A_d, s_d, n_d), cell by cell.

        Args:
            layer: Which; every layer counts the same tokens.
            folds: Only these folds; all by default.
            window: Only positions below it (one of the position buckets); all by default.
        """
        prefix, cells = f"{layer}.", self.layout.cells(folds=folds, window=window)
        with safe_open(self.path, "pt") as file:
            tensors = {prefix + part: file.get_tensor(prefix + part) for part in Moments.parts}
        if len(cells) < self.layout.cell_count:
            tensors = {name: tensor[cells] for name, tensor in tensors.items()}
        return Moments.from_tensors(tensors, prefix)

    def count(
        self, layer: int, *, folds: Sequence[int] | None = None, window: int | None = None
    ) -> int:
        """The tokens of ``moments`` alone: n_d."""
        cells = self.layout.cells(folds=folds, window=window)
        with safe_open(self.path, "pt") as file:
            return int(file.get_tensor(f"{layer}.counts")[cells].sum())


def save_statistics(path: Path, layout: Layout, moments: Mapping[int, Moments]) -> None:
    """Write a statistics file, whole or not at all; equal numbers give equal bytes."""
    sums = {str(layer): moments[layer] for layer in layout.layers}
    save_sums(path, sums, kind=KIND, header=asdict(layout))


def merge_statistics(files: Sequence[Path], out: Path) -> None:
    """Add up the files of a domain's shards in the order given, one tensor at a time.

    Raises:
        InputError: they keep different things apart.
    """
    parts = [Statistics.load(file) for file in files]
    layout = parts[0].layout
    for part in parts:
        if part.layout != layout:
            remedy = f"was computed with {part.layout}, the first with {layout}: compute it again"
            raise InputError(Fault("statistics", str(part.path), remedy))
    with ExitStack() as opened:
        sources = [opened.enter_context(safe_open(file, "pt")) for file in files]

        def total(name: str) -> Tensor:
            first, *others = (source.get_tensor(name) for source in sources)
            summed = first.clone()
            for other in others:
                summed += other
            return summed

        specs = [
            TensorSpec(f"{layer}.{part}", shape, dtype)
            for layer in layout.layers
            for part, (shape, dtype) in Moments.layout(
                layout.hidden_size, cells=layout.cell_count
            ).items()
        ]
        stream_atomically(out, specs, total, kind=KIND, header=asdict(layout))


def domain_statistics(
    backbone: Path,
    expert: Path,
    corpus: Path,
    out: Path,
    *,
    config: StatisticsConfig,
    shard: int,
    device: str = "cpu",
    streamed: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """One (domain, shard) piece of the pass that every router is solved from (Eq. 7).

    Every token of domain d passes through expert d, so the model is a dense one: the averaged
    backbone with that expert's MLPs. All layers are counted in the same forward pass.

    Args:
        backbone: Averaged non-MLP weights.
        expert: The domain's expert.
        corpus: A split's directory: the domain's calibration tokens.
        out: File; appears when the piece is complete.
        config: What is forwarded, and what is kept apart.
        shard: Which of ``config.shards`` pieces.
        device: Where the model runs.
        streamed: Where hidden states lie while the text goes through the model layer by layer; by
            default the model is held whole.
        progress: Hears of every batch, in tokens.
    """
    dtype = weights_type(config.precision, device)
    progress = progress or Silent()
    what = f"statistics{chosen(config.precision, device)}"
    if streamed is not None:
        shared, own = open_stitched(backbone, expert)
        read = stitched_reader(family_of(shared.config), own, shared)
        stream = LayerStream(backbone, read, dtype=dtype, device=device, beside=[expert])
        batches, _ = shard_batches(corpus, config, shard)
        common: dict[str, Any] = {"folder": streamed, "progress": progress, "what": what}
        stream_statistics(stream, list(batches), out, config=config, **common)
        return
    model = load_stitched(backbone, expert, headless=True, dtype=dtype, device=device)
    layout, moments = collect_shard(
        model,
        corpus,
        range(model.config.num_hidden_layers),
        config=config,
        shard=shard,
        progress=progress,
        what=what,
    )
    save_statistics(out, layout, moments)
