from dataclasses import asdict, replace

import pyarrow.parquet as parquet
import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.items import (
    Item,
    read_items,
    write_items,
    write_models,
)

ITEMS = [
    Item(
        task="sums",
        subtask="",
        category="",
        id="7",
        seed=0,
        prompt="1 + 2 =\r\n\tΣ 数 \x00",
        target="3",
        response="",
        metric="exact_match",
        score=0.1,
    ),
    Item(
        task="sums",
        subtask="long",
        category="two digits",
        id="x/8",
        seed=2**40,
        prompt="12 + 30 =",
        target="42",
        response="42\n",
        metric="exact_match",
        score=1.0,
    ),
]


def test_items_come_back_as_they_were_in_order(tmp_path):
    write_items(ITEMS, tmp_path / "items.parquet")
    assert read_items(tmp_path / "items.parquet") == ITEMS
    write_items([], tmp_path / "none.parquet")
    assert read_items(tmp_path / "none.parquet") == []


def test_the_same_items_give_the_same_bytes(tmp_path):
    many = [replace(item, id=str(i)) for i in range(500) for item in ITEMS]
    for name in ("one", "two"):
        write_items(many, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_several_models_items_share_a_file(tmp_path):
    path = tmp_path / "items.parquet"
    write_models({"dume": ITEMS, "idle": [], "champion": ITEMS[:1]}, path)
    assert parquet.read_table(path).to_pylist() == [
        *({"model": "dume", **asdict(item)} for item in ITEMS),
        {"model": "champion", **asdict(ITEMS[0])},
    ]


def test_several_models_file_is_not_taken_for_one_model_s(tmp_path):
    write_models({"dume": ITEMS}, tmp_path / "several.parquet")
    with pytest.raises(InputError, match=r"its columns are \['model'.*is needed"):
        read_items(tmp_path / "several.parquet")


@pytest.mark.parametrize("content", [None, b"", b"not parquet"])
def test_a_file_that_is_no_parquet_is_named(tmp_path, content):
    path = tmp_path / "items.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"items\.parquet.*cannot be read"):
        read_items(path)
