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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import linalg
from torch import Tensor

from upcycle_core.activations.moments import batch_sums, bf16_units
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
from upcycle_core.errors import Fault, InputError
from upcycle_core.precision import chosen
from upcycle_core.precision import weights_type as type_in
from upcycle_core.progress import Progress, Silent
from upcycle_core.training.config import Repair

HALVES = 2
LAMBDAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Candidates of lambda, in mean diagonals of sum a a^T; none of them may be chosen either."""
SKETCH = 32
"""Random directions of the residual stream that lambda is judged on."""
ROWS_AT_ONCE = 1 << 13
REPORT = "repair.json"


@dataclass
class _Sums:
    """What the regression of one layer needs of one half of the text."""

    gram_II: Tensor
    """sum a a^T, fp64."""
    cross_IH: Tensor
    """sum a r^T, fp64."""
    drift: float = 0.0
    """sum ||r||^2."""
    tokens: int = 0

    @classmethod
    def zeros(cls, inner: int, hidden: int, device: str) -> "_Sums":
        gram_II = torch.zeros(inner, inner, dtype=torch.float64, device=device)
        return cls(gram_II, torch.zeros(inner, hidden, dtype=torch.float64, device=device))

    def add(self, a_TI: Tensor, r_TH: Tensor) -> None:
        """Count tokens; products in the features' own precision, as statistics are."""
        self.gram_II += batch_sums(a_TI)[0]
        if a_TI.dtype == torch.bfloat16 and not a_TI.is_cuda:
            with bf16_units():
                self.cross_IH += a_TI.T.float() @ r_TH.to(a_TI.dtype).float()
        else:
            self.cross_IH += a_TI.T.to(r_TH.dtype) @ r_TH
        self.drift += float(r_TH.double().square().sum())
        self.tokens += len(a_TI)

    def __add__(self, other: "_Sums") -> "_Sums":
        gram, cross = self.gram_II + other.gram_II, self.cross_IH + other.cross_IH
        return _Sums(gram, cross, self.drift + other.drift, self.tokens + other.tokens)


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
    texts = _texts(corpus, config)
    check_repairable(family, shared.config, sum(int(b.counted.sum()) for b in texts), "tokens")
    stitched = _reader(family, own, shared)
    streams = [
        LayerStream(backbone, read, dtype=type_in(config.precision, device), device=device)
        for read in (stitched, own.tensor)
    ]
    head = _HeadTarget(shared, own, corpus) if repair == "down+head_target" else None
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


def _reader(family: Family, own: CheckpointReader, shared: CheckpointReader) -> Read:
    return lambda name: (own if family.is_ffn(name) else shared).tensor(name)


def _texts(corpus: Path, config: StatisticsConfig) -> list[Batch]:
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
        factor, left, delta_IH = _solved(sums, index)
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
) -> list[_Sums]:
    """Take both models' text through a layer; the sums of each half of it."""
    sums: list[_Sums] = []
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
                sums = [_Sums.zeros(*shape) for _ in range(HALVES)]
            sums[text.half].add(a_TI, target_TH - text.taken(text.merged.hidden_BSH).to(wide))
    return sums


def _solved(sums: Sequence[_Sums], layer: int) -> tuple[float | None, float, Tensor]:
    """lambda, the share of the drift that it leaves on unseen text, and dW^T [I, H]."""
    whole = sums[0] + sums[1]
    if not (torch.isfinite(whole.gram_II).all() and torch.isfinite(whole.cross_IH).all()):
        remedy = f"layer {layer}'s activations hold NaN or infinity: check the expert's weights"
        raise InputError(Fault("experts.repair", math.nan, remedy))
    errors = [_held_out(sums, factor) for factor in LAMBDAS]
    least = min(errors)
    if not least < 0:  # nothing is to be won, or nothing has drifted
        return None, 1.0, torch.zeros_like(whole.cross_IH)
    factor = LAMBDAS[errors.index(least)]
    solution = _ridge(whole, factor, whole.cross_IH)
    return factor, 1 + least / whole.drift, solution


def _held_out(sums: Sequence[_Sums], factor: float) -> float:
    """Change of the squared drift on each half by the other's solution; infinite if it has none.

    ||r - dW a||^2 - ||r||^2 = tr(dW A dW^T) - 2 tr(dW B), on random directions of the drift, which
    have its expectation.
    """
    hidden = sums[0].cross_IH.shape[1]
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (hidden, SKETCH), generator=generator).double() * 2 - 1
    if hidden <= SKETCH:
        signs = torch.eye(hidden, dtype=torch.float64) * math.sqrt(SKETCH)
    signs = (signs / math.sqrt(SKETCH)).to(sums[0].cross_IH.device)
    change = 0.0
    for seen, unseen in (sums, sums[::-1]):
        try:
            solution = _ridge(seen, factor, seen.cross_IH @ signs)
        except linalg.LinAlgError:
            return math.inf
        quadratic = ((unseen.gram_II @ solution) * solution).sum()
        change += float(quadratic - 2 * ((unseen.cross_IH @ signs) * solution).sum())
    return change


def _ridge(sums: _Sums, factor: float, right: Tensor) -> Tensor:
    """(A + lambda I)^-1 ``right`` by Cholesky in fp64, lambda in mean diagonals of A."""
    matrix = sums.gram_II.cpu().numpy().copy()
    matrix[np.diag_indices(len(matrix))] += factor * matrix.trace() / len(matrix)
    lower = linalg.cholesky(matrix, lower=True, overwrite_a=True, check_finite=False)
    solution = linalg.cho_solve((lower, True), right.cpu().numpy(), check_finite=False)
    return torch.from_numpy(solution).to(right.device)


class _HeadTarget:
    """The state before the final norm whose logits under the merged head are the expert's.

    With n the expert's normed state, W its head and M the merged one, both centred over the
    vocabulary (a softmax does not see a constant) and weighed by the tokens' frequency v:

        n* = P n,   P = (M^T V M)^-1 M^T V W

    Args:
        shared: The backbone.
        own: The expert.
        corpus: Whose tokens weigh the vocabulary.
    """

    def __init__(self, shared: CheckpointReader, own: CheckpointReader, corpus: Path) -> None:
        merged_VH, own_VH = (_head(reader) for reader in (shared, own))
        counts = token_counts(corpus, len(merged_VH)).double()
        weights_V = counts / counts.sum() + FLOOR
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
