import json
import random

import pyarrow
import pyarrow.parquet as parquet
import pytest

from upcycle_core.corpora.config import Source
from upcycle_core.corpora.sources import file_documents


def read_file(path, text_field):
    return (d.text for d in file_documents(path, "label", Source(text_field=text_field)))


def write(path, content):
    path.write_bytes(content)
    return path


def test_text_files_are_split_at_separator_lines(tmp_path):
    text = "one\ntwo\n<|doc|>\n\nthree <|doc|> inside\n<|doc|>  \r\nfour\r\n<|doc|>\n"
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbf" + text.encode())
    assert list(read_file(path, "text")) == ["one\ntwo", "three <|doc|> inside", "four"]


def test_separators_between_returns_alone_are_separators(tmp_path):
    path = write(tmp_path / "a.txt", b"one\rtwo\r<|doc|>\rthree\r<|doc|> \rfour\r")
    assert list(read_file(path, "text")) == ["one\ntwo", "three", "four"]
    path = write(tmp_path / "b.txt", b"10 %\r20 %\nread\r\n<|doc|>\n<|doc|>\rno: text\n")
    assert list(read_file(path, "text")) == ["10 %\r20 %\nread", "no: text"]


def test_json_lines_give_the_named_field(tmp_path):
    rows = [{"body": "a\u2028b", "text": "no"}, {"body": "c\nd"}]
    content = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    path = write(tmp_path / "a.jsonl", content.encode())
    assert list(read_file(path, "body")) == ["a\u2028b", "c\nd"]


def test_memory_holds_no_row_group_of_a_parquet_file(tmp_path):
    path, draw = tmp_path / "a.parquet", random.Random(0)
    texts = [draw.randbytes(1000).hex() for _ in range(12_000)]
    table = pyarrow.table({"text": texts})
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    assert parquet.ParquetFile(path).num_row_groups == 1
    del table
    before, largest = pyarrow.total_allocated_bytes(), 0
    for _ in read_file(path, "text"):
        largest = max(largest, pyarrow.total_allocated_bytes() - before)
    assert largest < path.stat().st_size / 3


def test_parquet_gives_the_named_column(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["a", "b"]}), path)
    assert list(read_file(path, "text")) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"fine\n\xff\xfe", "byte 5 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 is not JSON in UTF-8"),
        ("a.jsonl", b'["text"]\n', "line 1 is not a JSON object"),
        ("a.jsonl", b'{"body": "a"}\n', "line 1 has no field 'text', it has body"),
        ("a.jsonl", b'{"text": null}\n', "line 1 holds nothing in 'text'"),
        ("a.jsonl", b'{"text": 3}\n', "line 1 holds int in 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "half a surrogate pair"),
        ("a.parquet", b"PAR1 not really", "not a whole Parquet file"),
        ("a.csv", b"text\n", "its ending is none of .jsonl, .json, .parquet"),
        ("a.jsonl", b'{"text": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n", "line 1 is not JSON"),
    ],
)
def test_unreadable_content_is_located(tmp_path, name, content, says):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=r".+") as error:
        list(read_file(path, "text"))
    assert says in str(error.value)


def test_parquet_without_the_column_or_with_a_gap_is_located(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(ValueError, match="row 1 holds nothing in 'text'"):
        list(read_file(path, "text"))
    with pytest.raises(ValueError, match="no field 'body', it has text"):
        list(read_file(path, "body"))


def test_a_parquet_file_that_is_cut_short_or_damaged_says_what_to_do(tmp_path):
    path = tmp_path / "a.parquet"
    texts = {"text": [f"a text of some length {i}" for i in range(5000)]}
    parquet.write_table(pyarrow.table(texts), path, compression="zstd")
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content[:400] + b"\0" * 4000 + content[4400:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"not a whole Parquet file .*; write it again"):
            list(read_file(path, "text"))
