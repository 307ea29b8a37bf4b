"""Rows of a training set as batches of a causal language model.

S tokens a row, B rows a batch.
"""

from collections.abc import Iterator, Mapping, Sequence, Sized

import torch
from torch import Tensor
from torch.utils.data import Dataset

from upcycle_core.errors import Fault

NO_LOSS = -100
"""A label that is not to be predicted."""
Row = Tensor | Mapping[str, Tensor]


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Stack rows: ``input_ids`` [B, S], and ``labels`` and ``attention_mask`` where rows have them.

    Args:
        rows: LongTensors [S], or mappings of LongTensors [S].
    """
    named = [{"input_ids": row} if isinstance(row, Tensor) else row for row in rows]
    return {name: torch.stack([row[name] for row in named]) for name in named[0]}


def targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens of a batch that are predicted, a scalar; the first of a row never is."""
    if "labels" not in batch:
        ids_BS = batch["input_ids"]
        return torch.tensor(ids_BS[:, 1:].numel(), device=ids_BS.device)
    return (batch["labels"][:, 1:] != NO_LOSS).sum()


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
