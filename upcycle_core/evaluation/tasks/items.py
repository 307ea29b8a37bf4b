"""Every item that a model was asked: prompt, right answer, response and score, kept as parquet."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from upcycle_core.errors import Fault, InputError


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question put to one model with one seed.

    Args:
        task: The task it belongs to.
        subtask: The task within a group (a subject of MMLU); "" if there is none.
        category: What scores are also averaged by; "" if there is none.
        id: Names the item within its task and subtask; the same for every model.
        seed: The seed of the run.
        prompt: All that the model was given.
        target: The right answer, or the text that was scored.
        response: What the model gave: a text, or the choice that it found likeliest.
        metric: What ``score`` measures.
        score: The item's score, in the metric's own unit.
    """

    task: str
    subtask: str
    category: str
    id: str
    seed: int
    prompt: str
    target: str
    response: str
    metric: str
    score: float


_COLUMNS = tuple(field.name for field in fields(Item))


def write_items(items: Sequence[Item], path: Path) -> None:
    """Write one model's items as parquet, in order; the same items give the same bytes."""
    _write([asdict(item) for item in items], path, columns=_COLUMNS)


def read_items(path: Path) -> list[Item]:
    """The items that ``write_items`` wrote.

    Raises:
        InputError: The file cannot be read or has other columns.
    """
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(Fault("items", str(path), f"cannot be read as parquet: {error}")) from None
    if table.column_names != list(_COLUMNS):
        remedy = f"its columns are {table.column_names}; a file with {list(_COLUMNS)} is needed"
        raise InputError(Fault("items", str(path), remedy))
    return [Item(**row) for row in table.to_pylist()]


def write_models(items: Mapping[str, Sequence[Item]], path: Path) -> None:
    """Write several models' items into one parquet file with a first column ``model``.

    Args:
        items: {model: its items}, in the order they are written.
        path: The file.
    """
    rows = [{"model": model, **asdict(item)} for model, own in items.items() for item in own]
    _write(rows, path, columns=("model", *_COLUMNS))


def _write(rows: list[dict[str, Any]], path: Path, *, columns: Sequence[str]) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    # 64-bit offsets: the prompts of one file may exceed 2 GiB.
    numbers = {"seed": pyarrow.int64(), "score": pyarrow.float64()}
    schema = pyarrow.schema([(n, numbers.get(n, pyarrow.large_string())) for n in columns])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path, compression="zstd")
