"""Documents and records of one file, one at a time; what cannot be read is a ValueError that says
where and what to do."""

import codecs
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

SEPARATOR = re.compile(r"<\|doc\|>[ \t]*\n?")
"""The line between two documents of a .txt file."""
ROWS_AT_ONCE = 256
"""Rows of a Parquet file in memory."""
READ_BYTES = 1 << 18
"""Of a Parquet file's column in one read."""
RECORDS = (".jsonl", ".json", ".parquet")
"""Endings of files of records."""


def read_txt(path: Path) -> Iterator[str]:
    """Documents of a UTF-8 text file, separated by lines ``<|doc|>``.

    Raises:
        ValueError: The file is not UTF-8; says at which byte.
    """
    document: list[str] = []
    for line in _lines(path):
        if not SEPARATOR.fullmatch(line):
            document.append(line)
            continue
        if text := "".join(document).strip("\n"):
            yield text
        document.clear()
    if text := "".join(document).strip("\n"):
        yield text


def _lines(path: Path) -> Iterator[str]:
    done = 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                text = line.decode("utf-8" if done else "utf-8-sig").replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"byte {done + error.start} is not UTF-8; convert the file, for example with "
                    "`iconv -f latin1 -t utf-8`"
                ) from None
            done += len(line)
            if "\r" in text and any(map(SEPARATOR.fullmatch, text.split("\r"))):
                yield from io.StringIO(text.replace("\r", "\n"), newline="\n")  # a Mac's of old
            else:
                yield text


def file_rows(
    path: Path, form: str, columns: Sequence[str] | None = None, *, some: bool = False
) -> Iterator[tuple[str, dict]]:
    """Place (``line 3``, ``row 0``) and fields of each record of a .jsonl, .json or .parquet file.

    Args:
        path: The file. One that ends in .json holds a list of objects, and is read whole, or lines
            as one that ends in .jsonl.
        form: What a record should look like, for errors.
        columns: Those of a Parquet file that are needed; all by default, and if one is missing.
        some: Whether those of them that are there are enough, if there is one.

    Raises:
        ValueError: The ending is unknown, or a line is no record.
        OSError: The file cannot be opened.
    """
    if path.suffix not in RECORDS:
        raise ValueError(
            f"its ending is none of {', '.join(RECORDS)} (nor .txt, for plain text); convert or "
            "rename it"
        )
    if path.suffix == ".parquet":
        rows: Iterable[dict] = _parquet_rows(path, columns, some)
    elif path.suffix == ".json" and _is_list(path):
        rows = _listed_rows(path, form)
    else:
        return ((f"line {number}", row) for number, row in _json_rows(path, form))
    return ((f"row {number}", row) for number, row in enumerate(rows))


def _is_list(path: Path) -> bool:
    """Whether a file begins as a list does."""
    with path.open("rb") as file:
        return file.read(READ_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _listed_rows(path: Path, form: str) -> Iterator[dict]:
    """Objects of a file that is one list."""
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON in UTF-8 ({error}); mend it") from None
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is not a JSON object like {form}")
        yield row


def _json_rows(path: Path, form: str) -> Iterator[tuple[int, dict]]:
    """Number and object of each line that is not blank."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"line {number} is not JSON in UTF-8 ({error}); mend or remove that line"
                ) from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not a JSON object like {form}")
            yield number, row


def _parquet_rows(path: Path, columns: Sequence[str] | None, some: bool) -> Iterator[dict]:
    """Values by column of each row."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        # In small reads: else memory holds a whole row group's pages, which may be the whole file.
        with parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False) as file:
            there = [name for name in columns or () if name in file.schema_arrow.names]
            columns = (there or None) if some or there == list(columns or ()) else None
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
                yield from batch.to_pylist()
    except FileNotFoundError:
        raise
    except (OverflowError, LookupError) as error:  # dates and time zones that Python has not
        raise ValueError(f"a column holds what cannot be read ({error}); take it out") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"this is not a whole Parquet file ({error}); write it again") from None


def checked_text(row: dict, text_field: str, where: str) -> str:
    """``row[text_field]``, if it is text that can be written as UTF-8.

    Raises:
        ValueError: It is not; says what there is instead.
    """
    if text_field not in row:
        present = ", ".join(map(str, row)) or "nothing"
        raise ValueError(
            f"{where} has no field {text_field!r}, it has {present}; name the right text_field"
        )
    text = row[text_field]
    if not isinstance(text, str):
        found = "nothing" if text is None else type(text).__name__
        raise ValueError(
            f"{where} holds {found} in {text_field!r}, not text; "
            "name the right text_field or remove the row"
        )
    return encodable(text, where)


def is_text(value: object) -> bool:
    """Whether a field holds text that can be written, and that is not empty."""
    return is_written(value) and bool(str(value).strip())


def is_written(value: object) -> bool:
    """Whether a field holds text that can be written as UTF-8."""
    try:
        return isinstance(value, str) and encodable(value, "it") == value
    except ValueError:
        return False


def encodable(text: str, where: str) -> str:
    """``text``, if it can be written as UTF-8.

    Raises:
        ValueError: It cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{where} holds half a surrogate pair, which is no character; remove it"
        ) from None
    return text
