"""What is known of files: hashes, and what was found in them, remembered until the files change.

A file is known again by device, inode, size, and times of change of content and inode, so that a
flow with nothing to do reads no weights. The memory is no more than that: where it is absent,
damaged, or in the way, files are read.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

FILE = ".known-files.sqlite"
"""Its name, in the folder where models are kept."""
Verify = Literal["changed", "always"]
SMALLEST = 4096
"""Files of fewer bytes are read as fast as looked up."""
SETTLED_NS = 2 * 10**9
"""Coarsest step of the times that a file system keeps (FAT's): a file that was changed less than
this before it was read may change again, and look the same."""
SECOND_NS = 10**9
WAIT_SECONDS = 10.0
TABLE = "CREATE TABLE IF NOT EXISTS known (key TEXT PRIMARY KEY, value TEXT, seal TEXT)"


class KnownFiles:
    """A memory that processes share.

    Args:
        path: Its file, of SQLite; None remembers nothing. One that fails is not asked again.
        verify: ``changed`` believes it of files that look unchanged; ``always`` reads every file
            each time: for storage that lies about times, or to find bits that a disk flipped.
        near: Calls a module-level function that reads a file of ``SMALLEST`` bytes or more with
            what it is given, on a machine nearer to it than this one; here by default.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        verify: Verify = "changed",
        near: Callable[..., Any] | None = None,
    ) -> None:
        self.path, self.verify = path, verify
        self._near = near

    def near(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """What a module-level ``function`` makes of files, called where they are read."""
        return function(*args) if self._near is None else self._near(function, *args)

    def sha256(
        self, file: Path, *, own: bool = False, read: Callable[[], str] | None = None
    ) -> str:
        """Return the hexadecimal sha256 of a file's content.

        Args:
            file: Which.
            own: Whether it was just written by who asks, and nobody else writes to it: it is
                remembered at once where the file system keeps fine times.
            read: Reads a file that is not known, and returns its sha256.
        """
        status, began = file.stat(), time.time_ns()
        known = self._recalled(status)
        if known is not None:
            return known
        digest = read() if read else self._digest(file, status.st_size)
        settled = max(status.st_mtime_ns, status.st_ctime_ns) + SETTLED_NS < began
        now = _status(file)
        is_same = now is not None and _mark(now) == _mark(status)
        if is_same and (settled or (own and status.st_mtime_ns % SECOND_NS != 0)):
            self._remember(status, digest)
        elif status.st_size >= SMALLEST:
            self._asked("DELETE FROM known WHERE key = ?", _key(status))
        return digest

    def recalled(self, file: Path, *, inode_may_change: bool = False) -> str | None:
        """The sha256 of a file that looks as when it was read; None where that is not known.

        Of a small file it is that of what is there: it is read as fast.

        Args:
            file: Which.
            inode_may_change: Whether another time of its inode is no other look: rights and links
                change it too. For forecasts, which a file of other content with the times of this
                one may mislead.
        """
        status = file.stat()
        small = status.st_size < SMALLEST
        looks_at = -1 if inode_may_change else None
        return _sha256_of(file) if small else self._recalled(status, looks_at)

    def _digest(self, file: Path, size: int) -> str:
        return self.near(_sha256_of, file) if size >= SMALLEST else _sha256_of(file)

    def fact(self, name: str, digests: Sequence[Any], find: Callable[[], Any]) -> Any:
        """What ``find`` finds in files of these hashes; asked once for the same ones.

        Args:
            name: Of what is found, and of how: another name where it is found otherwise.
            digests: Plain values that decide it: the files' hashes.
            find: Returns something JSON can hold.
        """
        known = self._read(_fact(name, digests))
        if known is None:
            known = {"found": find()}
            self._write(_fact(name, digests), known)
        return known["found"]

    def recalled_fact(self, name: str, digests: Sequence[Any]) -> Any:
        """What ``fact`` has found before; None if it was not asked, or found nothing."""
        return (self._read(_fact(name, digests)) or {}).get("found")

    @contextmanager
    def linking(self, files: Iterable[Path]) -> Iterator[None]:
        """Know files again that others link to meanwhile: that changes the time of an inode."""
        known = {
            file: (status, digest)
            for file in files
            if (status := _status(file)) is not None and (digest := self._recalled(status))
        }
        yield
        for file, (before, digest) in known.items():
            now = _status(file)
            if now is not None and _mark(now)[:-1] == _mark(before)[:-1]:
                self._remember(now, digest)

    def _recalled(self, status: os.stat_result, looks_at: int | None = None) -> str | None:
        if self.verify == "always" or status.st_size < SMALLEST:
            return None
        known = self._read(_key(status))
        is_known = known is not None and known["mark"][:looks_at] == _mark(status)[:looks_at]
        return known["sha256"] if is_known else None

    def _remember(self, status: os.stat_result, digest: str) -> None:
        if status.st_size >= SMALLEST:
            self._write(_key(status), {"mark": _mark(status), "sha256": digest})

    def _read(self, key: str) -> Any:
        """What is remembered; None if that is nothing, or not as it was written."""
        row = self._asked("SELECT value, seal FROM known WHERE key = ?", key)
        return json.loads(row[0]) if row is not None and row[1] == _seal(key, row[0]) else None

    def _write(self, key: str, value: Any) -> None:
        text = json.dumps(value)
        statement = "INSERT OR REPLACE INTO known VALUES (?, ?, ?)"
        self._asked(statement, key, text, _seal(key, text))

    def _asked(self, statement: str, *values: str) -> tuple[str, str] | None:
        """A row of what the database answers. Its failures are no more than a lack of memory; one
        that is damaged is removed."""
        path = self.path  # another thread may find that it fails
        if path is None:
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            place = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None)
            with closing(place) as opened:
                # After a power cut it may be damaged: each row has a seal, and all can be missed.
                opened.execute("PRAGMA synchronous = OFF")
                opened.execute(TABLE)
                return opened.execute(statement, values).fetchone()
        except (OSError, sqlite3.OperationalError):  # full, only read, or held for too long
            self.path = None  # and not waited for again
            return None
        except sqlite3.DatabaseError:
            for damaged in (path, path.with_name(f"{path.name}-journal")):
                with suppress(OSError):
                    damaged.unlink(missing_ok=True)
            return None


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return _sha256(file)


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _status(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


def _fact(name: str, digests: Sequence[Any]) -> str:
    return f"{name} {hashlib.sha256(json.dumps(digests).encode()).hexdigest()}"


def _key(status: os.stat_result) -> str:
    return f"file {status.st_dev} {status.st_ino}"


def _mark(status: os.stat_result) -> list[int]:
    """What is other once a file has changed; the time of the inode last."""
    numbers = (status.st_dev, status.st_ino, status.st_size)
    return [*numbers, status.st_mtime_ns, status.st_ctime_ns]


def _seal(key: str, value: str) -> str:
    return hashlib.sha256(f"{key}\n{value}".encode()).hexdigest()
