"""Documents out of one file; what cannot be read is a ValueError that says where and what to do."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

SEPARATOR = re.compile(r"^<\|doc\|>[ \t]*$", re.MULTILINE)
"""The line between two documents of a .txt file."""


def read_txt(path: Path, text_field: str) -> Iterator[str]:
    """Documents of a UTF-8 text file, separated by lines ``<|doc|>``.

    Raises:
        ValueError: The file is not UTF-8; says at which byte.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start} is not UTF-8; convert the file, for example with "
            "`iconv -f latin1 -t utf-8`"
        ) from None
    for part in SEPARATOR.split(text.replace("\r\n", "\n")):
        if document := part.strip("\n"):
            yield document


def read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    """The field ``text_field`` of each line, which holds one JSON object.

    Raises:
        ValueError: A line is not UTF-8, not a JSON object, or has no such text; says which line.
    """
    for number, row in json_rows(path, f'{{"{text_field}": ...}}'):
        yield checked_text(row, text_field, f"line {number}")


def json_rows(path: Path, form: str) -> Iterator[tuple[int, dict]]:
    """Number and object of each line that is not blank.

    Raises:
        ValueError: A line is not UTF-8, or not a JSON object like ``form``; says which line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                raise ValueError(
                    f"line {number} is not JSON in UTF-8 ({error}); mend or remove that line"
                ) from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not a JSON object like {form}")
            yield number, row


def read_parquet(path: Path, text_field: str) -> Iterator[str]:
    """The string column ``text_field``.

    Raises:
        ValueError: Not a Parquet file, no such column, or a row without text; says which row.
    """
    with _parquet_file(path) as file:
        if text_field not in file.schema_arrow.names:
            checked_text(dict.fromkeys(file.schema_arrow.names), text_field, "the file")
        row = 0
        for batch in file.iter_batches(columns=[text_field]):
            for text in batch.column(0).to_pylist():
                yield checked_text({text_field: text}, text_field, f"row {row}")
                row += 1


def parquet_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """Number (from 0) and values by column of each row.

    Raises:
        ValueError: Not a Parquet file.
    """
    with _parquet_file(path) as file:
        row = 0
        for batch in file.iter_batches():
            for values in batch.to_pylist():
                yield row, values
                row += 1


def _parquet_file(path: Path):
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        return parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"this is not a whole Parquet file ({error}); write it again") from None


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}


def read_file(path: Path, text_field: str) -> Iterator[str]:
    """The documents of a file, by its ending.

    Args:
        path: A .txt (documents separated by a line ``<|doc|>``), .jsonl or .parquet file.
        text_field: The field that holds the text of the latter two.

    Raises:
        ValueError: The ending is unknown, or the content is not what it says.
        OSError: The file cannot be opened.
    """
    if path.suffix not in READERS:
        raise ValueError(f"its ending is none of {', '.join(READERS)}; convert or rename it")
    return READERS[path.suffix](path, text_field)


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
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{where} holds half a surrogate pair, which is no character; remove it"
        ) from None
    return text
