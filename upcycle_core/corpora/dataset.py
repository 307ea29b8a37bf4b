"""Hugging Face datasets as streams of rows: of the hub, of local files, or saved to disk."""

from pathlib import Path

SAVED = "state.json"
"""In the directory of one saved dataset."""
SAVED_SPLITS = "dataset_dict.json"
"""In the directory of a saved dictionary of datasets, one a split."""


def open_dataset(reference: str, *, subset: str | None, split: str, revision: str | None):
    """Return the rows of a dataset as an ``IterableDataset``; nothing is read of them yet.

    Args:
        reference: Hub id, a directory of data files, or one that ``save_to_disk`` wrote.
        subset: Which configuration of it; what was saved has none.
        split: Which part. One saved dataset is read as ``train``, or by the name of its own.
        revision: Of the hub; what was saved has none.

    Raises:
        ValueError: There is no such split, subset or revision, or the data are not understood.
    """
    import datasets

    saved = Path(reference) / SAVED
    if not saved.is_file() and not (Path(reference) / SAVED_SPLITS).is_file():
        return datasets.load_dataset(
            reference, subset, split=split, revision=revision, streaming=True
        )
    if subset is not None or revision is not None:
        raise ValueError("what save_to_disk wrote has no subset and no revision; leave them out")
    rows = datasets.load_from_disk(reference)
    splits = rows if isinstance(rows, datasets.DatasetDict) else {str(rows.split): rows}
    if split == "train" and isinstance(rows, datasets.Dataset):
        return rows.to_iterable_dataset()
    if split not in splits:
        raise ValueError(f"it has no split {split}; choose of {', '.join(sorted(splits))}")
    return splits[split].to_iterable_dataset()
