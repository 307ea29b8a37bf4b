"""What merging took from an expert, given back to its MLPs in closed form.

A token of domain d meets the merged backbone with expert d's MLPs, and its residual stream drifts
from the expert's own. Layer by layer the drift r is regressed on the MLP's inner activations a of
the domain's calibration text, and the solution added to the down projection:

    dW = argmin sum_t ||r_t - dW a_t||^2 + lambda ||dW||^2 = R A^-1,  A = sum a a^T + lambda I

Each layer sees what the repaired layers before it make. Each layer's lambda is chosen by
cross-validation between two halves of the documents, infinity (no repair) among the candidates. In
the last layer the target may be the state whose logits under the merged head are the expert's under
its own, where that brings logits of unseen text nearer to the expert's than the plain target does.

It is DUME's ridge regression, of another target; no paper of it is known to us.

Shapes: T tokens, S tokens a paragraph, H hidden size, I intermediate size, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upcycle_core.activations.regression import (
    HALVES,
    DriftSums,
    solve_drift,
    unseen_solutions,
)
from upcycle_core.activations.resume import LayersDone
from upcycle_core.activations.stream import LayerStream, Passing, Read
from upcycle_core.allocator import trim
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import LM_HEAD, Family
from upcycle_core.backbone.counts import FLOOR, token_counts
from upcycle_core.backbone.rewrite import read_untied
from upcycle_core.backbone.stitch import stitched_reader
from upcycle_core.backbone.write import Plan, type_faults, weights_type, write_model
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.writer import write_json
from upcycle_core.corpora.batches import Batch
from upcycle_core.dume.calibration import calibration_batches, layers_done
from upcycle_core.dume.checks import check_repairable
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.errors import raise_faults
from upcycle_core.moe.random import keyed_generator
from upcycle_core.precision import chosen
from upcycle_core.precision import weights_type as type_in
from upcycle_core.progress import Progress, Silent
from upcycle_core.training.config import Repair

ROWS_AT_ONCE = 1 << 13
REPORT = "repair.json"
DOWN = "down"
JUDGED_TOKENS = 512
"""Tokens of the calibration text whose logits decide between the last layer's targets."""
LOGITS_AT_ONCE = 64
"""Tokens whose logits are held."""


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
        out: Is written: backbone and repaired FFNs as one checkpoint, and ``repair.json``. Beside
            it lies what each layer has made, until all is written: the same call goes on there.
        repair: ``down``, or with ``head_target`` in the last layer where unseen text is for it.
        config: How much text is read, and in which arithmetic.
        max_shard_bytes: Size of one safetensors file.
        device: Where both models' layers are computed, one after the other.
        progress: Hears of every layer.

    Returns:
        Of each layer ``lambda`` (of the mean diagonal; None: not repaired), ``drift``, the share
        of the drift, judged on text that the regression has not seen, that is left of tokens that
        are not a paragraph's first, ``target``, "stream" or "head", ``tokens`` that the regression
        had, and ``tokens_a_neuron``, for each inner activation.

    Raises:
        InputError: The backbone's type cannot hold the expert's weights; norms stand behind the
            FFNs; there are too few tokens, or activations are not finite.
    """
    shared = CheckpointReader(backbone, field="backbone")
    own = CheckpointReader(expert, field="expert")
    raise_faults(type_faults(own, shared))
    family = family_of(shared.config)
    texts = calibration_batches(corpus, config)
    check_repairable(family, shared.config, sum(int(b.counted.sum()) for b in texts), "tokens")
    stitched = stitched_reader(family, own, shared)
    where: Any = {"dtype": type_in(config.precision, device), "device": device}
    streams = [LayerStream(backbone, stitched, **where), LayerStream(expert, own.tensor, **where)]
    head = HeadTarget(shared, own, corpus) if repair == "down+head_target" else None
    done = layers_done(out, [repair, asdict(config)], streams, [texts])
    layers = _repaired(streams, texts, stitched, family, head=head, done=done, device=device)
    write_model(
        out,
        _plan(shared, family, stitched, layers),
        shared.config,
        source=shared,
        max_shard_bytes=max_shard_bytes,
        what=f"repairing{chosen(config.precision, device)}",
        progress=progress or Silent(),
    )
    write_json(out / REPORT, done.facts)
    done.remove()
    return done.facts


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


def _repaired(
    streams: Sequence[LayerStream],
    batches: Sequence[Batch],
    stitched: Read,
    family: Family,
    *,
    head: "HeadTarget | None",
    done: LayersDone,
    device: str,
) -> Iterator[Tensor]:
    """Layer by layer its repaired down projection [H, I], in the checkpoint's type."""
    begun, layers = len(done.facts), streams[0].layers
    for index in range(begun):
        yield done.made(index, DOWN)
    if begun == layers:
        return
    started = [stream.start([batch.input_ids for batch in batches]) for stream in streams]
    texts = [
        _Text(batch.fold, batch.counted.bool().flatten().nonzero().flatten().to(device), *pair)
        for batch, *pair in zip(batches, *started, strict=True)
    ]
    models = zip(("merged", "own"), started, strict=True)
    passing = {f"{m}.{number}": text for m, own in models for number, text in enumerate(own)}
    done.go_on(passing)
    for index in range(begun, layers):
        down_HI = stitched(family.ffn(index).down)
        last_head = head if index == layers - 1 else None
        sums = _pass(streams, texts, index, head=last_head)
        target, (factor, left, delta_IH) = _solved(sums, texts, index, last_head)
        tokens = sum(half.tokens for half in sums)
        counts = {"tokens": tokens, "tokens_a_neuron": tokens / down_HI.shape[1]}
        fact = {"layer": index, "lambda": factor, "drift": left, "target": target, **counts}
        repaired_HI = (down_HI.double() + delta_IH.T.cpu()).to(down_HI.dtype)
        del sums, delta_IH  # as large as all else, and the next layer has its own
        trim()
        change_HI = (repaired_HI.float() - down_HI.float()).to(device)
        for text in texts:
            if factor is not None:
                change = text.inner_BSI @ change_HI.T.to(text.inner_BSI.dtype)
                text.merged.hidden_BSH = text.merged.hidden_BSH + change
            text.inner_BSI = torch.empty(0)
        done.keep({DOWN: repaired_HI}, passing if index < layers - 1 else {}, fact)
        yield repaired_HI


def _solved(
    sums: Sequence[DriftSums], texts: Sequence[_Text], index: int, head: "HeadTarget | None"
) -> tuple[str, tuple[float | None, float, Tensor]]:
    """The target and its solution; of two targets the one that unseen text's logits are for."""
    if head is None:
        return "stream", solve_drift(sums, index, "experts.repair")
    solutions, unseen = {}, {}
    for number, target in enumerate(("stream", "head")):
        halves = [half.target(number) for half in sums]
        solutions[target] = solve_drift(halves, index, "experts.repair")
        unseen[target] = unseen_solutions(halves, solutions[target][0])
    distances = head.distances(texts, unseen)
    chosen = min(distances, key=distances.__getitem__)
    return chosen, solutions[chosen]


@torch.inference_mode()
def _pass(
    streams: Sequence[LayerStream],
    texts: Sequence[_Text],
    index: int,
    *,
    head: "HeadTarget | None",
) -> list[DriftSums]:
    """Take both models' text through a layer; the sums of each half of it.

    With ``head`` the drift is both targets', side by side: [T, 2 H].
    """
    sums: list[DriftSums] = []
    down: Any = streams[0].model.layers[index].mlp.down_proj
    with streams[0].layer(index), streams[1].layer(index):
        for text in texts:
            inner: list[Tensor] = []
            hook = down.register_forward_pre_hook(lambda _m, given, to=inner: to.append(given[0]))
            text.merged.hidden_BSH = streams[0].through(text.merged)
            hook.remove()
            text.own.hidden_BSH = streams[1].through(text.own)
            (text.inner_BSI,) = inner
            a_TI = text.taken(text.inner_BSI)
            target_TH = text.taken(text.own.hidden_BSH)
            wide = torch.float64 if target_TH.dtype == torch.float64 else torch.float32
            targets = [target_TH.to(wide)]
            targets += [] if head is None else [head.target(targets[0])]
            now_TH = text.taken(text.merged.hidden_BSH).to(wide)
            drift = torch.cat([target - now_TH for target in targets], dim=1)
            if not sums:
                shape = (a_TI.shape[-1], drift.shape[-1], str(a_TI.device))
                count = len(targets)
                sums = [DriftSums.zeros(*shape, targets=count) for _ in range(HALVES)]
            is_first = text.rows % text.inner_BSI.shape[1] == 0
            sums[text.half].add(a_TI, drift, is_first)
    return sums


class HeadTarget:
    """The state before the final norm whose logits under the merged head are the expert's.

    With n the expert's normed state, W its head and M the merged one, both centred over the
    vocabulary (a softmax does not see a constant) and weighed by the tokens' frequency v:

        n* = P n,   P = (M^T V M)^-1 M^T V W

    Args:
        shared: The backbone.
        own: The expert.
        corpus: The split whose tokens are counted.
    """

    def __init__(self, shared: CheckpointReader, own: CheckpointReader, corpus: Path) -> None:
        self._readers = (shared, own)
        merged_VH, own_VH = self._heads()
        counts_V = token_counts(corpus, len(merged_VH))
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
        self._norms = [reader.tensor("model.norm.weight").double() for reader in self._readers]

    def _heads(self) -> list[Tensor]:
        """Both heads' rows of the tokens that both have: a pinned backbone may have fewer."""
        heads = [read_untied(reader)(LM_HEAD) for reader in self._readers]
        size = min(map(len, heads))
        return [head[:size] for head in heads]

    def target(self, hidden_TH: Tensor) -> Tensor:
        """What stands before the merged model's final norm, for the expert's own [T, H]."""
        merged_H, own_H = (norm.to(hidden_TH.device) for norm in self._norms)
        wide_TH = hidden_TH.double()
        size_T1 = _size(wide_TH)
        normed_TH = (wide_TH / size_T1 * own_H) @ self._map_HH.T.to(hidden_TH.device)
        passes_H = merged_H.abs() > 1e-4 * merged_H.abs().max()
        target_TH = normed_TH / torch.where(passes_H, merged_H, 1.0) * size_T1
        return torch.where(passes_H, target_TH, wide_TH).to(hidden_TH.dtype)

    @torch.inference_mode()
    def distances(
        self, texts: Sequence[_Text], solutions: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, float]:
        """KL(expert || repaired) of some tokens' logits, summed, by each way to repair.

        Args:
            texts: Both models' streams behind the last layer, before it is repaired.
            solutions: Way to dW^T [I, H] for each half.
        """
        heads, found = self._heads(), dict.fromkeys(solutions, 0.0)
        share = -(-JUDGED_TOKENS // len(texts))
        for number, text in enumerate(texts):
            rows = judged_rows(text.rows, share, number)
            for some in rows.split(LOGITS_AT_ONCE):
                merged_TH, own_TH, a_TI = (
                    x.reshape(-1, x.shape[-1])[some].float()
                    for x in (text.merged.hidden_BSH, text.own.hidden_BSH, text.inner_BSI)
                )
                own_TV = _log_softmax(own_TH, self._norms[1], heads[1])
                for way, deltas in solutions.items():
                    repaired_TH = merged_TH + a_TI @ deltas[text.half].float()
                    way_TV = _log_softmax(repaired_TH, self._norms[0], heads[0])
                    found[way] += float((own_TV.exp() * (own_TV - way_TV)).sum(dtype=torch.float64))
        return found


def judged_rows(rows_T: Tensor, count: int, number: int) -> Tensor:
    """At most ``count`` of a batch's rows, ascending, drawn by the batch's number.

    Every so many of them would be the same position of each paragraph.
    """
    draw = keyed_generator(0, "judged", number)
    order = torch.randperm(len(rows_T), generator=draw)[:count].sort().values
    return rows_T[order.to(rows_T.device)]


def _size(x: Tensor) -> Tensor:
    """What an RMSNorm divides by, [..., 1]."""
    return x.square().mean(-1, keepdim=True).sqrt()


def _log_softmax(hidden_TH: Tensor, norm_H: Tensor, head_VH: Tensor) -> Tensor:
    """Log-probabilities [T, V] of the next token, from what stands before the final norm."""
    normed_TH = hidden_TH / _size(hidden_TH) * norm_H.to(hidden_TH)
    parts = [normed_TH @ rows.to(normed_TH).T for rows in head_VH.split(ROWS_AT_ONCE)]
    return torch.cat(parts, dim=1).log_softmax(-1)
