"""Two models over the same tokens: cross-moments of what chosen modules of either one read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from upcycle_core.activations.cross import CrossMoments, power_sums
from upcycle_core.architectures.family import Family
from upcycle_core.errors import Fault, InputError
from upcycle_core.progress import Progress

Change = Callable[[str, Tensor], Tensor]
Rows = tuple[Tensor | None, Tensor | None]

# A family's tables name modules as a checkpoint does; a base model has no such first part.
BASE = "model."


@dataclass(frozen=True, kw_only=True)
class PairedBatch:
    """The same text in two models' tokens, padded on the right.

    Args:
        first_ids: [B, S] int64 for the first model.
        first_mask: [B, S] int64, 1 on tokens and 0 on padding.
        second_ids: [B, S'] int64 for the second model.
        second_mask: [B, S'] int64.
        first_rows: [P] int64, ascending: which tokens of the flattened ``first_ids`` are counted.
        second_rows: [P] int64, ascending: the tokens of ``second_ids`` that stand opposite.
    """

    first_ids: Tensor
    first_mask: Tensor
    second_ids: Tensor
    second_mask: Tensor
    first_rows: Tensor
    second_rows: Tensor


def neuron_reader(family: Family, layer: int) -> str:
    """The module of ``layer`` that reads act(gate) * up [.., I]: the neurons' activations."""
    return family.ffn(layer).down.removesuffix(".weight")


def head_reader(layer: int) -> str:
    """The module of ``layer`` that reads what its query heads say [.., Q]."""
    return f"model.layers.{layer}.self_attn.o_proj"


def residual_readers(family: Family, layers: Sequence[int], *, final: bool = True) -> list[str]:
    """The modules that read the residual stream [.., H]: both norms of ``layers``, final norm."""
    before = [f"model.layers.{layer}.input_layernorm" for layer in layers]
    last = ["model.norm"] if final else []
    return [*before, *(family.router_norm(layer) for layer in layers), *last]


@contextmanager
def module_inputs(
    model: nn.Module, paths: Sequence[str], consume: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Within this context each forward of ``model`` hands what the modules read to ``consume``.

    Args:
        model: A decoder without lm_head (``LlamaModel``, ...).
        paths: Modules by their names in a checkpoint.
        consume: Called with the path and the module's first input.
    """
    with ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path.removeprefix(BASE))
            hook = module.register_forward_pre_hook(
                lambda _module, inputs, path=path: consume(path, inputs[0])
            )
            stack.callback(hook.remove)
        yield


class _Enough(Exception):
    """Everything that is watched has been seen: the rest of the forward pass is not needed."""


@torch.no_grad()
def collect_pairs(
    first: nn.Module,
    second: nn.Module,
    batches: Iterable[PairedBatch],
    moments: Mapping[str, CrossMoments],
    *,
    change: Change = lambda path, features: features,
    names: tuple[str, str] = ("first", "second"),
    progress: Progress,
) -> None:
    """Forward every batch through both models and count what the same modules read.

    Several paths may share one accumulator. Of the first model one batch of features is held, for
    all paths, until the second has run. Neither runs on behind the last module that is watched.

    Args:
        first: A decoder without lm_head, on the same device as ``second``.
        second: Another of the same architecture.
        batches: Padded on the right; padding is not counted.
        moments: Path to the accumulator that counts it.
        change: What is counted of a path's features (``residual.unit_rows``).
        names: How a fault names either model.
        progress: Hears of every batch, in tokens of the first model.

    Raises:
        InputError: What a module reads is not finite, at the first batch where it is not.
    """
    held: dict[str, Tensor] = {}
    rows: list[Rows] = []

    def hold(path: str, x: Tensor) -> None:
        held[path] = change(path, x)
        if len(held) == len(moments):
            raise _Enough

    def count(path: str, y: Tensor) -> None:
        ours, theirs = rows[-1]
        moments[path].update(held.pop(path), change(path, y), rows=ours, second_rows=theirs)
        if not held:
            raise _Enough

    paths, device = tuple(moments), next(first.parameters()).device
    distinct = list({id(counted): counted for counted in moments.values()}.values())
    for pairs in batches:
        rows[:] = [_counted_rows(pairs, device)]
        for model, ids, consume in (
            (first, pairs.first_ids, hold),
            (second, pairs.second_ids, count),
        ):
            with module_inputs(model, paths, consume), suppress(_Enough):
                # Causal attention hides padding on the right from every counted token.
                model(input_ids=ids.to(device), use_cache=False)
        if not torch.stack([counted.squares.sum() for counted in distinct]).isfinite().all():
            ids_of = (pairs.first_ids.to(device), pairs.second_ids.to(device))
            sides = zip(names, (first, second), ids_of, rows[-1], strict=True)
            raise InputError(*(fault for side in sides for fault in _faults(*side, paths, change)))
        progress.advance(int(pairs.first_mask.sum()))


def _counted_rows(pairs: PairedBatch, device: torch.device) -> Rows:
    """Rows of either model on ``device``; None, which copies nothing, where every token counts."""
    sides = (pairs.first_ids, pairs.first_rows), (pairs.second_ids, pairs.second_rows)
    if all(len(rows) == ids.numel() for ids, rows in sides):
        return None, None
    return pairs.first_rows.to(device), pairs.second_rows.to(device)


def _faults(
    name: str,
    model: nn.Module,
    ids: Tensor,
    rows: Tensor | None,
    paths: Sequence[str],
    change: Change,
) -> list[Fault]:
    """A fault for the first of ``paths`` that reads what is not finite, if any does."""
    found: list[str] = []

    def look(path: str, x: Tensor) -> None:
        features = change(path, x).reshape(-1, x.shape[-1])
        counted = features if rows is None else features.index_select(0, rows)
        if not power_sums(counted)[1].isfinite().all():
            found.append(path)

    with module_inputs(model, paths, look):
        model(input_ids=ids, use_cache=False)
    remedy = (
        "what this module reads is not finite on calibration text: look at the weights of this "
    )
    remedy += "layer and those before it, or forward in fp32"
    return [Fault(name, path, remedy) for path in found[:1]]
