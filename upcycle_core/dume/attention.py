"""The merged backbone's attention by regression: RegMean, or distilled from the experts' outputs.

Layer by layer, first queries, keys and values, then the output projection; W_d and x_d are expert
d's weight and what it reads, of the domain's calibration text:

    regmean    W = (sum_d W_d G_d) (sum_d G_d)^-1,  G_d = alpha sum x_d x_d^T + (1 - alpha) diagonal
    distilled  W = mean_d W_d + argmin_V sum_d ||y_d - y - V x||^2 + lambda ||V||^2

RegMean (arXiv 2212.09849, equation 2) solves sum_d ||W_d x_d - W x_d||^2, each expert on inputs of
its own. ``distilled`` takes what the merged model itself reads, x, what its averaged weight makes
of it, y, and what the expert makes of the same token, y_d: inputs and targets that will meet.
alpha and lambda are chosen a matrix by cross-validation between two halves of the documents.

Shapes: X inputs of a matrix, Y its outputs, S tokens a paragraph.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import torch
from scipy import linalg
from torch import Tensor, nn

from upcycle_core.activations.moments import add_gram, mirror
from upcycle_core.activations.regression import HALVES, DriftSums, check_finite, solve_drift
from upcycle_core.activations.resume import LayersDone
from upcycle_core.activations.stream import LAYER, LayerStream, Passing
from upcycle_core.allocator import trim
from upcycle_core.architectures.families import family_of
from upcycle_core.backbone.stitch import stitched_reader
from upcycle_core.backbone.write import Plan, weights_type, write_model
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.batches import Batch
from upcycle_core.dume.calibration import calibration_batches, layers_done
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.precision import chosen
from upcycle_core.precision import weights_type as type_in
from upcycle_core.progress import Progress, Silent

Way = Literal["regmean", "distilled"]
FIELD = "backbone.merge.attention"
PARTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",))
"""What one regression gives; what comes later reads what the earlier ones made."""
ALPHAS = (0.0, 0.5, 0.9, 0.99)
"""Candidates of alpha; below 1, so that every system can be solved."""


@dataclass
class _Text:
    """A batch of a domain on its way through its expert, and, if that is read, through the merged
    model."""

    half: int
    rows: Tensor
    own: Passing
    merged: Passing | None

    def taken(self, x: Tensor) -> Tensor:
        """The counted rows of a batch."""
        return x.reshape(-1, x.shape[-1]).index_select(0, self.rows)


@dataclass
class _Domain:
    """A domain's expert, the merged model with its FFNs, and its text."""

    expert: CheckpointReader
    own: LayerStream
    merged: LayerStream
    texts: list[_Text]


def merge_attention(
    experts: Sequence[Path],
    backbone: Path,
    corpora: Sequence[Path],
    out: Path,
    *,
    way: Way,
    config: StatisticsConfig,
    max_shard_bytes: int,
    device: str = "cpu",
    progress: Progress | None = None,
) -> None:
    """Write a backbone again, its attention matrices merged by regression.

    Args:
        experts: Dense checkpoints of one architecture.
        backbone: What ``write_backbone`` made of them.
        corpora: Of each expert's domain a split: calibration tokens.
        out: The directory that is written. Beside it lies what each layer has made, until all is
            written: the same call goes on there.
        way: ``regmean`` or ``distilled``.
        config: How much text is read, and in which arithmetic.
        max_shard_bytes: Size of one safetensors file.
        device: Where layers are computed, one after the other.
        progress: Hears of every tensor.

    Raises:
        InputError: Activations are not finite.
    """
    shared = CheckpointReader(backbone, field="backbone")
    texts = [calibration_batches(corpus, config) for corpus in corpora]
    domains = [
        _opened(shared, path, batches, way, config, device)
        for path, batches in zip(experts, texts, strict=True)
    ]
    streams = [stream for d in domains for stream in (d.own, d.merged)]
    done = layers_done(out, [way, asdict(config)], streams, texts)
    write_model(
        out,
        _plan(shared, _merged(shared, domains, way, done), done),
        shared.config,
        source=shared,
        max_shard_bytes=max_shard_bytes,
        what=f"merging attention{chosen(config.precision, device)}",
        progress=progress or Silent(),
    )
    done.remove()


def _plan(shared: CheckpointReader, layers: Iterator[None], done: LayersDone) -> Plan:
    """The backbone's tensors; a layer is regressed when the first of it is to be written."""

    def regressed(name: str) -> Tensor:
        layer = int(name.split(".")[2])
        while layer >= len(done.facts):
            next(layers)
        return done.made(layer, name)

    matrices, dtype = _names(shared.config["num_hidden_layers"]), weights_type(shared)
    shapes = family_of(shared.config).tensors(shared.config, ffn=False)
    return {
        name: (shape, dtype, partial(regressed if name in matrices else shared.tensor, name))
        for name, shape in shapes.items()
    }


def _names(layers: int) -> set[str]:
    """What is regressed."""
    return {
        f"{LAYER.format(layer=layer)}self_attn.{matrix}.weight"
        for layer in range(layers)
        for part in PARTS
        for matrix in part
    }


def _opened(
    shared: CheckpointReader,
    path: Path,
    batches: Sequence[Batch],
    way: Way,
    config: StatisticsConfig,
    device: str,
) -> _Domain:
    expert = CheckpointReader(path, field="expert")
    dtype = type_in(config.precision, device)
    read = stitched_reader(family_of(shared.config), expert, shared)
    own, merged = (
        LayerStream(shared.directory, tensor, dtype=dtype, device=device, beside=[path])
        for tensor in (expert.tensor, read)
    )
    ids = [batch.input_ids for batch in batches]
    begun = merged.start(ids) if way == "distilled" else [None] * len(ids)
    texts = [
        _Text(batch.fold, batch.counted.bool().flatten().nonzero().flatten().to(device), one, other)
        for batch, one, other in zip(batches, own.start(ids), begun, strict=True)
    ]
    return _Domain(expert, own, merged, texts)


def _merged(
    shared: CheckpointReader, domains: Sequence[_Domain], way: Way, done: LayersDone
) -> Iterator[None]:
    """Layer by layer keep its attention matrices [Y, X] by name, in the checkpoint's type."""
    layers = shared.config["num_hidden_layers"]
    done.go_on(_passing(domains))
    for index in range(len(done.facts), layers):
        prefix = f"{LAYER.format(layer=index)}self_attn."
        made: dict[str, Tensor] = {}
        for part in PARTS:
            names = {matrix: f"{prefix}{matrix}.weight" for matrix in part}
            if way == "regmean":
                made |= _regmean(domains, index, names)
            else:
                made |= _distilled(shared, domains, index, names, made)
        for domain in domains:
            for text, hidden in zip(domain.texts, _pass(domain, index, "own", {}), strict=True):
                text.own.hidden_BSH = hidden
            if way == "distilled":
                new = _pass(domain, index, "merged", made)
                for text, hidden in zip(domain.texts, new, strict=True):
                    text.merged = Passing(hidden)
        done.keep(made, _passing(domains) if index < layers - 1 else {}, None)
        trim()  # the sums of a layer; the next one has its own
        yield


def _passing(domains: Sequence[_Domain]) -> dict[str, Passing]:
    """What goes from layer to layer, by the domain's place, the batch and the model."""
    return {
        f"{place}.{number}.{model}": passing
        for place, domain in enumerate(domains)
        for number, text in enumerate(domain.texts)
        for model, passing in (("own", text.own), ("merged", text.merged))
        if passing is not None
    }


@torch.inference_mode()
def _pass(
    domain: _Domain,
    index: int,
    which: Literal["own", "merged"],
    made: Mapping[str, Tensor],
    watched: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """Take a domain's text through a layer of one of its models; what it leaves.

    Args:
        domain: The domain.
        index: The layer.
        which: The expert, or the merged model, in which ``made`` matrices have been replaced.
        made: By their names.
        watched: {matrix: called with the text's number, and what the matrix read and gave}
    """
    stream: LayerStream = getattr(domain, which)
    left = []
    with stream.layer(index) as layer:
        attention: Any = layer.self_attn
        prefix = f"{LAYER.format(layer=index)}self_attn."
        for name, weight in made.items():
            module = attention.get_submodule(name.removeprefix(prefix).removesuffix(".weight"))
            like = module.weight
            module.weight = nn.Parameter(weight.to(like.device, like.dtype), requires_grad=False)
        for number, text in enumerate(domain.texts):
            with ExitStack() as stack:
                for matrix, take in (watched or {}).items():
                    hook = getattr(attention, matrix).register_forward_hook(
                        lambda _m, given, gave, take=take, n=number: take(n, given[0], gave)
                    )
                    stack.callback(hook.remove)
                left.append(stream.through(getattr(text, which)))
    return left


def _regmean(domains: Sequence[_Domain], index: int, names: Mapping[str, str]) -> dict[str, Tensor]:
    """RegMean of matrices that read the same."""
    first = next(iter(names))
    grams: list[list[Tensor]] = []
    for domain in domains:
        size = domain.expert.tensors[names[first]].shape[1]
        device = domain.texts[0].rows.device
        halves = [torch.zeros(size, size).double().to(device) for _ in range(HALVES)]

        def count(number: int, x_BSX: Tensor, _y: Tensor, domain=domain, halves=halves) -> None:
            text = domain.texts[number]
            add_gram(halves[text.half], text.taken(x_BSX))

        _pass(domain, index, "own", {}, {first: count})
        for half in halves:
            mirror(half)
        check_finite(halves, index, FIELD)
        grams.append([half.cpu() for half in halves])
    return {
        name: _combined([domain.expert.tensor(name) for domain in domains], grams)
        for name in names.values()
    }


def _combined(weights: Sequence[Tensor], grams: Sequence[Sequence[Tensor]]) -> Tensor:
    """RegMean with the alpha whose solutions of each half are best on the other."""
    wide = [weight.double() for weight in weights]

    def solved(own: Iterable[Tensor], alpha: float) -> Tensor:
        total_XX, right_YX = torch.zeros_like(grams[0][0]), torch.zeros_like(wide[0])
        for gram, weight in zip(own, wide, strict=True):
            shrunk = alpha * gram
            shrunk.diagonal().add_((1 - alpha) * gram.diagonal())
            total_XX += shrunk
            right_YX += weight @ shrunk
        total_XX.diagonal().add_(1e-10 * total_XX.trace() / len(total_XX))
        return torch.from_numpy(
            linalg.solve(
                *(total_XX.numpy().T, right_YX.numpy().T),  # in the order of Fortran: no copies
                assume_a="pos",
                overwrite_a=True,
                overwrite_b=True,
            )
        ).T

    def missed(alpha: float) -> float:
        error = 0.0
        for half in range(HALVES):
            found = solved([halves[half] for halves in grams], alpha)
            for weight, halves in zip(wide, grams, strict=True):
                apart = found - weight
                error += float(((apart @ halves[1 - half]) * apart).sum())
        return error

    alpha = min(ALPHAS, key=missed)
    dtype = reduce(torch.promote_types, (weight.dtype for weight in weights))
    return solved((halves[0] + halves[1] for halves in grams), alpha).to(dtype)


def _distilled(
    shared: CheckpointReader,
    domains: Sequence[_Domain],
    index: int,
    names: Mapping[str, str],
    made: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """What the average lacks of each expert's outputs, regressed on what the merged model reads."""
    sums: dict[str, list[DriftSums]] = {}
    for domain in domains:
        wanted: dict[tuple[str, int], Tensor] = {}

        def want(matrix: str, n: int, _x: Tensor, y_BSY: Tensor, wanted=wanted) -> None:
            wanted[matrix, n] = y_BSY

        def count(matrix: str, n: int, x: Tensor, y: Tensor, domain=domain, wanted=wanted) -> None:
            text = domain.texts[n]
            x_TX = text.taken(x)
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            drift_TY = text.taken(wanted.pop((matrix, n))).to(wide) - text.taken(y).to(wide)
            if matrix not in sums:
                shape = (x_TX.shape[-1], drift_TY.shape[-1], str(x_TX.device))
                sums[matrix] = [DriftSums.zeros(*shape) for _ in range(HALVES)]
            sums[matrix][text.half].add(x_TX, drift_TY)

        _pass(domain, index, "own", {}, {matrix: partial(want, matrix) for matrix in names})
        watched = {matrix: partial(count, matrix) for matrix in names}
        _pass(domain, index, "merged", made, watched)
    found = {}
    for matrix, name in names.items():
        average = shared.tensor(name)
        _, _, change_XY = solve_drift(sums[matrix], index, FIELD)
        found[name] = (average.double() + change_XY.T.cpu()).to(average.dtype)
    return found
