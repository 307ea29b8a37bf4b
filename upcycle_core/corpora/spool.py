"""Documents on disk while they are sorted into splits: memory holds where each of them lies."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from upcycle_core.corpora.conversations import Message
from upcycle_core.corpora.distinct import Document

Item = TypeVar("Item")


class Spool:
    """A nameless temporary file of documents, gone with the last of them.

    Args:
        folder: Where it lies; the system's by default, which may be memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (open as long as the spool)
        self._end = 0

    def keep(self, document: Document) -> "Kept":
        """Write a document; what is given back reads it again."""
        text = document.text.encode()
        messages = b""
        if document.messages is not None:
            messages = json.dumps(document.messages, ensure_ascii=False).encode()
        self._file.write(text + messages)
        start, self._end = self._end, self._end + len(text) + len(messages)
        return Kept(self, document.file, start, len(text), len(messages))

    def read(self, start: int, size: int) -> bytes:
        """What lies there."""
        self._file.flush()
        return os.pread(self._file.fileno(), size, start)


class Kept:
    """A document of a spool, with the attributes of ``Document``."""

    __slots__ = ("_more", "_spool", "_start", "file", "size")

    def __init__(self, spool: Spool, file: str, start: int, size: int, more: int) -> None:
        self._spool, self._start, self._more = spool, start, more
        self.file, self.size = file, size

    @property
    def text(self) -> str:
        """As it was read."""
        return self._spool.read(self._start, self.size).decode()

    @property
    def messages(self) -> list[Message] | None:
        """Of a chat."""
        if not self._more:
            return None
        return json.loads(self._spool.read(self._start + self.size, self._more))


def in_groups(
    items: Iterable[Item], size: Callable[[Item], int], *, count: int, limit: int
) -> Iterator[list[Item]]:
    """Lists of ``count`` items at most, each over when its sizes reach ``limit``."""
    group: list[Item] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if len(group) == count or total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group
