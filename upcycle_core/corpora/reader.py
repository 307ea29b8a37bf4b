"""Read what the corpus writers left on disk: the documents of a split, and its tokens."""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from upcycle_core.errors import Fault, InputError


class TokenCorpus:
    """The token ids of one split, read from disk as they are needed.

    Args:
        directory: ``corpora/<domain>/<split>``.

    Raises:
        InputError: The files are missing or do not fit together.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        try:
            facts = json.loads((self.directory / "split.json").read_text(encoding="utf-8"))
            self.offsets: np.ndarray = np.load(self.directory / "offsets.npy")
            self.byte_offsets: np.ndarray = np.load(self.directory / "bytes.npy")
            size = (self.directory / "tokens.bin").stat().st_size
        except OSError as error:
            remedy = f"it is no tokenised split ({error}); run the corpus stage again"
            raise InputError(Fault("corpus", str(directory), remedy)) from None
        self.dtype = np.dtype(facts["dtype"])
        self.eos_id: int = facts["eos_id"]
        self.vocabulary_size: int = facts["vocabulary_size"]
        if size != self.offsets[-1] * self.dtype.itemsize:
            remedy = f"tokens.bin has {size} bytes for {self.offsets[-1]} tokens of {self.dtype}"
            raise InputError(
                Fault("corpus", str(directory), f"{remedy}; run the corpus stage again")
            )

    @cached_property
    def tokens(self) -> np.ndarray:
        """All token ids, ``[T]`` uint16 or uint32, memory-mapped, documents one after another."""
        if not self.offsets[-1]:
            return np.empty(0, self.dtype)
        return np.memmap(self.directory / "tokens.bin", dtype=self.dtype, mode="r")

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return int(self.byte_offsets[-1])

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """Token ids of one document, ``[tokens]``, a view into the file."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __reduce__(self):  # workers map the file themselves instead of receiving its content
        return type(self), (self.directory,)


def read_documents(path: Path) -> Iterator[str]:
    """The texts of one split's Parquet file, in order."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["text"], batch_size=1024):
            yield from batch.column(0).to_pylist()
