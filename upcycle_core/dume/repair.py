"""What merging took from an expert, given back to its MLPs in closed form.

A token of domain d meets the merged backbone with expert d's MLPs, and its residual stream drifts
from the expert's own. Layer by layer the drift r is regressed on the MLP's inner activations a of
the domain's calibration text, and the solution added to the down projection:

    dW = argmin sum_t ||r_t - dW a_t||^2 + lambda ||dW||^2 = R A^-1,  A = sum a a^T + lambda I

Each layer sees what the repaired layers before it make. Each layer's lambda is chosen by
cross-validation between two halves of the documents, infinity (no repair) among the candidates. In
the last layer the target may be the state whose logits under the merged head are the expert's under
its own.

It is DUME's ridge regression, of another target; no paper of it is known to us.

Shapes: T tokens, S tokens a paragraph, H hidden size, I intermediate size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upcycle_core.activations.regression import HALVES, DriftSums, solve_drift
from upcycle_core.activations.stream import LayerStream, Passing, Read
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD, Family
from upcycle_core.backbone.counts import FLOOR, token_counts
from upcycle_core.backbone.write import Plan, weights_type, write_model
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.writer import write_json
from upcycle_core.corpora.batches import Batch, paragraph_batches, paragraphs
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.dume.checks import check_repairable
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.precision import chosen
from upcycle_core.precision import weights_type as type_in
from upcycle_core.progress import Progress, Silent
from upcycle_core.training.config import Repair

ROWS_AT_ONCE = 1 << 13
REPORT = "repair.json"
DIFFERENT_TOKENS = 2
"""A hidden dimension, that a text must have for the head's target."""


@dataclass
class _Text:
    """A batch on its way through both models."""

    half: int
    rows: Tensor
    """Rows of the flattened batch that count."""
    merged: Passing
    own: Passing
    inner_BSI: Tensor = field(default_factory=lambda: torch.empty(0))

    def taken(self, x: Tensor) -> Tensor:
        """The counted rows of a batch."""
        return x.reshape(-1, x.shape[-1]).index_select(0, self.rows)


def repair_expert(
    backbone: Path,
    expert: Path,
    corpus: Path,
    out: Path,
    *,
    repair: Repair,
    config: StatisticsConfig,
    max_shard_bytes: int,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Write the dense model that the MoE is where it follows this expert, its MLPs repaired.

    Args:
        backbone: What ``write_backbone`` wrote.
        expert: The domain's dense checkpoint.
        corpus: A split's directory: the domain's calibration tokens.
        out: The directory that is written: backbone and repaired FFNs as one checkpoint, and
            ``repair.json``.
        repair: ``down``, or with ``head_target`` in the last layer.
        config: How much text is read, and in which arithmetic.
        max_shard_bytes: Size of one safetensors file.
        device: Where both models' layers are computed, one after the other.
        progress: Hears of every layer.

    Returns:
        Of each layer ``lambda`` (of the mean diagonal; None: not repaired) and ``drift``, the share
        of the drift, judged on text that the regression has not seen, that is left.

    Raises:
        InputError: Norms stand behind the FFNs; there are too few tokens, or activations are not
            finite.
    """
    shared = CheckpointReader(backbone, field="backbone")
    own = CheckpointReader(expert, field="expert")
    family = family_of(shared.config)
    texts = calibration_batches(corpus, config)
    check_repairable(family, shared.config, sum(int(b.counted.sum()) for b in texts), "tokens")
    stitched = stitched_reader(family, own, shared)
    streams = [
        LayerStream(backbone, read, dtype=type_in(config.precision, device), device=device)
        for read in (stitched, own.tensor)
    ]
    head = _HeadTarget.of(shared, own, corpus) if repair == "down+head_target" else None
    said: list[dict[str, Any]] = []
    layers = _repaired(streams, texts, stitched, family, head=head, said=said, device=device)
    write_model(
        out,
        _plan(shared, family, stitched, layers),
        shared.config,
        source=shared,
        max_shard_bytes=max_shard_bytes,
        what=f"repairing{chosen(config.precision, device)}",
        progress=progress or Silent(),
    )
    write_json(out / REPORT, said)
    return said


def _plan(
    shared: CheckpointReader, family: Family, stitched: Read, downs: Iterator[Tensor]
) -> Plan:
    """The stitched model's tensors; each down projection is computed when it is to be written."""
    layers, dtype = range(shared.config["num_hidden_layers"]), weights_type(shared)
    repaired = {family.ffn(layer).down for layer in layers}
    return {
        name: (shape, dtype, partial(next, downs) if name in repaired else partial(stitched, name))
        for name, shape in family.tensors(shared.config).items()
    }


def stitched_reader(family: Family, own: CheckpointReader, shared: CheckpointReader) -> Read:
    """Tensors of the backbone with an expert's FFNs."""
    return lambda name: (own if family.is_ffn(name) else shared).tensor(name)


def calibration_batches(corpus: Path, config: StatisticsConfig) -> list[Batch]:
    """What ``config`` reads of a split; each batch is of one half of its documents."""
    tokens = TokenCorpus(corpus)
    pieces = paragraphs(
        tokens,
        sequence_length=config.sequence_length,
        max_tokens=config.tokens,
        window=config.window,
    )
    size, count = config.batch_size, config.count
    return list(paragraph_batches(tokens, pieces, size, folds=HALVES, count=count))


def _repaired(
    streams: Sequence[LayerStream],
    batches: Sequence[Batch],
    stitched: Read,
    family: Family,
    *,
    head: "_HeadTarget | None",
    said: list[dict[str, Any]],
    device: str,
) -> Iterator[Tensor]:
    """Layer by layer its repaired down projection [H, I], in the checkpoint's type."""
    started = [stream.start([batch.input_ids for batch in batches]) for stream in streams]
    texts = [
        _Text(batch.fold, batch.counted.bool().flatten().nonzero().flatten().to(device), *pair)
        for batch, *pair in zip(batches, *started, strict=True)
    ]
    layers = streams[0].model.config.num_hidden_layers
    for index in range(layers):
        down_HI = stitched(family.ffn(index).down)
        sums = _pass(streams, texts, index, head=head if index == layers - 1 else None)
        factor, left, delta_IH = solve_drift(sums, index, "experts.repair")
        said.append({"layer": index, "lambda": factor, "drift": left})
        repaired_HI = (down_HI.double() + delta_IH.T.cpu()).to(down_HI.dtype)
        change_HI = (repaired_HI.float() - down_HI.float()).to(device)
        for text in texts:
            if factor is not None:
                change = text.inner_BSI @ change_HI.T.to(text.inner_BSI.dtype)
                text.merged.hidden_BSH = text.merged.hidden_BSH + change
            text.inner_BSI = torch.empty(0)
        yield repaired_HI


@torch.inference_mode()
def _pass(
    streams: Sequence[LayerStream],
    texts: Sequence[_Text],
    index: int,
    *,
    head: "_HeadTarget | None",
) -> list[DriftSums]:
    """Take both models' text through a layer; the sums of each half of it."""
    sums: list[DriftSums] = []
    down: Any = streams[0].model.layers[index].mlp.down_proj
    with streams[0].layer(index) as merged, streams[1].layer(index) as own:
        for text in texts:
            inner: list[Tensor] = []
            hook = down.register_forward_pre_hook(lambda _m, given, to=inner: to.append(given[0]))
            text.merged.hidden_BSH = streams[0].through(index, merged, text.merged)
            hook.remove()
            text.own.hidden_BSH = streams[1].through(index, own, text.own)
            (text.inner_BSI,) = inner
            a_TI = text.taken(text.inner_BSI)
            target_TH = text.taken(text.own.hidden_BSH)
            wide = torch.float64 if target_TH.dtype == torch.float64 else torch.float32
            target_TH = target_TH.to(wide) if head is None else head.target(target_TH.to(wide))
            if not sums:
                shape = (a_TI.shape[-1], target_TH.shape[-1], str(a_TI.device))
                sums = [DriftSums.zeros(*shape) for _ in range(HALVES)]
            sums[text.half].add(a_TI, target_TH - text.taken(text.merged.hidden_BSH).to(wide))
    return sums


class _HeadTarget:
    """The state before the final norm whose logits under the merged head are the expert's.

    With n the expert's normed state, W its head and M the merged one, both centred over the
    vocabulary (a softmax does not see a constant) and weighed by the tokens' frequency v:

        n* = P n,   P = (M^T V M)^-1 M^T V W

    Args:
        shared: The backbone.
        own: The expert.
        counts_V: How often the text has each token.
    """

    def __init__(self, shared: CheckpointReader, own: CheckpointReader, counts_V: Tensor) -> None:
        merged_VH, own_VH = (_head(reader) for reader in (shared, own))
        weights_V = counts_V.double() / counts_V.sum() + FLOOR
        size = merged_VH.shape[1]
        gram, cross = (torch.zeros(size, size, dtype=torch.float64) for _ in range(2))
        sum_m, sum_w = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
        for start in range(0, len(merged_VH), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            m, w, weights = merged_VH[rows].double(), own_VH[rows].double(), weights_V[rows]
            weighed = (m * weights[:, None]).T
            gram += weighed @ m
            cross += weighed @ w
            sum_m += weights @ m
            sum_w += weights @ w
        gram -= torch.outer(sum_m, sum_m) / weights_V.sum()
        cross -= torch.outer(sum_m, sum_w) / weights_V.sum()
        gram += 1e-11 * gram.trace() / size * torch.eye(size, dtype=torch.float64)
        self._map_HH = torch.linalg.solve(gram, cross)
        self._norms = [reader.tensor("model.norm.weight").double() for reader in (shared, own)]

    @classmethod
    def of(
        cls, shared: CheckpointReader, own: CheckpointReader, corpus: Path
    ) -> "_HeadTarget | None":
        """The target that a split's tokens determine; none where it has too few different ones.

        H unknowns a column are then fitted to hardly more logits, at the cost of all other tokens'.
        """
        vocabulary_size, size = _head(shared).shape
        counts_V = token_counts(corpus, vocabulary_size)
        if int((counts_V > 0).sum()) < DIFFERENT_TOKENS * size:
            return None
        return cls(shared, own, counts_V)

    def target(self, hidden_TH: Tensor) -> Tensor:
        """What stands before the merged model's final norm, for the expert's own [T, H]."""
        merged_H, own_H = (norm.to(hidden_TH.device) for norm in self._norms)
        wide_TH = hidden_TH.double()
        size_T1 = wide_TH.square().mean(-1, keepdim=True).sqrt()
        normed_TH = (wide_TH / size_T1 * own_H) @ self._map_HH.T.to(hidden_TH.device)
        passes_H = merged_H.abs() > 1e-4 * merged_H.abs().max()
        target_TH = normed_TH / torch.where(passes_H, merged_H, 1.0) * size_T1
        return torch.where(passes_H, target_TH, wide_TH).to(hidden_TH.dtype)


def _head(reader: CheckpointReader) -> Tensor:
    """The matrix [V, H] that makes logits: a tied model's embedding."""
    return reader.tensor(LM_HEAD if LM_HEAD in reader.tensors else EMBEDDING)
