"""Rows of a training or validation set as batches of a causal language model.

S tokens a row, B rows a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from upcycle_core.errors import Fault, InputError
from upcycle_core.training import workers
from upcycle_core.training.config import TrainingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_LOSS = -100
"""A label that is not to be predicted."""
Row = Tensor | Mapping[str, Tensor]


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Stack rows: ``input_ids`` [B, S], and ``labels`` and ``attention_mask`` where rows have them.

    Columns at the end that no row attends to are left out: padding costs no time beyond what the
    longest row of a batch needs.

    Args:
        rows: LongTensors [S], or mappings of LongTensors [S] or scalars.
    """
    named = [{"input_ids": row} if isinstance(row, Tensor) else row for row in rows]
    batch = {name: torch.stack([row[name] for row in named]) for name in named[0]}
    if "attention_mask" in batch:
        attended_S = batch["attention_mask"].any(0)
        used = int(attended_S.nonzero().max()) + 1
        batch = {name: own[:, :used] if own.dim() > 1 else own for name, own in batch.items()}
    return batch


def tokens_read(dataset: Dataset, config: TrainingConfig) -> int:
    """Tokens of a whole training; padding is left out where the dataset counts its ``tokens``.

    A dataset may have more rows than are read: of its tokens, their share.
    """
    tokens = getattr(dataset, "tokens", None)
    if not isinstance(tokens, int):
        return config.tokens
    read = config.tokens // config.sequence_length
    return tokens * read // len(dataset)  # type: ignore[arg-type]  # one that counts them


def targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens of a batch that are predicted, a scalar; the first of a row never is."""
    if "labels" not in batch:
        ids_BS = batch["input_ids"]
        return torch.tensor(ids_BS[:, 1:].numel(), device=ids_BS.device)
    return (batch["labels"][:, 1:] != NO_LOSS).sum()


@torch.no_grad()
def mean_loss(
    network: "PreTrainedModel",
    dataset: Dataset,
    *,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager],
    options: Mapping[str, Any],
    is_divided: bool = False,
) -> float:
    """Mean loss over every target token of ``dataset``, nats a token, the same on every worker.

    It leaves no trace in the training that it interrupts: evaluation mode, no dropout, no random
    number drawn, no load counted. Batches are dealt to the workers in turn; their sums are added in
    fp64.

    Args:
        network: The model, not wrapped; left in the mode that it was in.
        dataset: Map-style rows as in training.
        batch_size: Rows in one forward pass.
        autocast: Makes the context of a forward pass: its arithmetic.
        options: What the model is called with beside the batch.
        is_divided: Whether workers hold parts of the model, and so must compute together.

    Raises:
        InputError: There is no target.
    """
    training = network.training
    network.eval()
    total = torch.zeros(2, dtype=torch.float64, device=network.device)
    rows = len(cast(Sized, dataset))
    for together in range(0, rows, workers.count() * batch_size):
        first = together + workers.rank() * batch_size
        has_rows = first < rows
        if not has_rows and not is_divided:
            continue
        # Who has no more rows still computes where all must, on the first: it counts for nothing.
        indices = range(first, min(first + batch_size, rows)) if has_rows else range(1)
        batch = {
            name: values.to(network.device)
            for name, values in collate([dataset[index] for index in indices]).items()
        }
        count = targets(batch)
        with autocast():
            loss: Tensor = network(**{"labels": batch["input_ids"]} | batch, **options).loss
        if has_rows and count:  # without a target the mean is 0 / 0
            total += torch.stack([loss.double() * count, count.double()])
    network.train(training)
    loss_sum, tokens = workers.total(total).tolist()
    if not tokens:
        remedy = "no label to predict; give some that have one, or leave evaluation_steps out"
        raise InputError(Fault("validation", f"{rows} rows", remedy))
    return loss_sum / tokens


def row_faults(
    dataset: Dataset, *, rows: int, sequence_length: int, field: str = "dataset"
) -> Iterator[Fault]:
    """Too few rows, or rows of another length; one row is looked at."""
    assert isinstance(dataset, Sized), "a map-style dataset has a length"
    if len(dataset) < rows:
        remedy = f"the training reads {rows} rows; give more, or lower steps or batch_size"
        yield Fault(field, f"{len(dataset)} rows", remedy)
        return
    row = dataset[0]
    if not isinstance(row, Tensor) and not {"input_ids", "labels"} <= set(row):
        remedy = f"a row that is a mapping holds input_ids and labels; these have {sorted(row)}"
        yield Fault(field, "rows", remedy)
        return
    length = len(row if isinstance(row, Tensor) else row["input_ids"])
    if length != sequence_length:
        remedy = f"the rows of {field} have {length} tokens; both must be the same"
        yield Fault("training.sequence_length", sequence_length, remedy)
