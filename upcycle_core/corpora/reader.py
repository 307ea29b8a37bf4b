"""Read what the corpus writers left on disk: the documents of a split, and its tokens."""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from upcycle_core.corpora.conversations import Conversation
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
        self.unmarked: int | None = facts.get("unmarked")
        self.prefix: int = facts.get("prefix", 0)
        self.ends: list[int] | None = facts.get("ends")
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

    @cached_property
    def responses(self) -> np.ndarray:
        """Which tokens are responses, ``[T]`` bool, memory-mapped.

        Raises:
            InputError: It holds documents that do not say.
        """
        if self.unmarked != 0:
            count = len(self) if self.unmarked is None else self.unmarked
            remedy = (
                f"{count} of its {len(self)} documents do not say which of their tokens are "
                "responses: they are no chats, or the chat template writes earlier turns anew; "
                "split those into records of one response each, mark the assistant's text in the "
                "template with {% generation %}, or use all tokens"
            )
            raise InputError(Fault("corpus", str(self.directory), remedy))
        if not self.offsets[-1]:
            return np.empty(0, bool)
        return np.memmap(self.directory / "responses.bin", dtype=bool, mode="r")

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return int(self.byte_offsets[-1])

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1

    def document(self, index: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Token ids ``start`` to ``stop`` of one document, ``[tokens]``, a view into the file."""
        return self.tokens[self._place(index)][start:stop]

    def marked(self, index: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The same as int64, ``~id`` where it is no response."""
        ids = self.document(index, start, stop).astype(np.int64)
        return np.where(self.responses[self._place(index)][start:stop], ids, ~ids)

    def _place(self, index: int) -> slice:
        return slice(self.offsets[index], self.offsets[index + 1])

    def ends_response(self, index: int) -> bool:
        """Whether what packing puts after a document ends its last response, which has no end token
        of its own."""
        last = int(self.offsets[index + 1]) - 1
        if self.ends is None or last < self.offsets[index]:
            return False
        return bool(self.responses[last]) and int(self.tokens[last]) not in self.ends

    def __reduce__(self):  # workers map the file themselves instead of receiving its content
        return type(self), (self.directory,)


def read_documents(path: Path) -> Iterator[str]:
    """The texts of one split's Parquet file, in order; of a chat, what is said in it."""
    return (text for (text,) in _rows(path, ["text"]))


def read_chats(path: Path) -> Iterator[str | Conversation]:
    """What is tokenised of one split's Parquet file, in order: texts, or chats as they are."""
    import pyarrow.parquet as parquet

    if "messages" not in parquet.read_schema(path).names:
        yield from read_documents(path)
        return
    for number, (messages,) in enumerate(_rows(path, ["messages"]), start=1):
        yield Conversation(json.loads(messages), f"{path.name}, chat {number}")


def _rows(path: Path, columns: list[str]) -> Iterator[tuple]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=columns, batch_size=256):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
