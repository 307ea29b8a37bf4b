import hashlib
import json

import pyarrow
import pyarrow.parquet as parquet
import pytest

from upcycle_core.corpora import harvest
from upcycle_core.corpora.config import Source
from upcycle_core.corpora.sources import (
    read_source,
    source_faults,
    source_files,
    source_fingerprint,
)
from upcycle_core.errors import InputError


def texts(source, *, seed=0, folder=None):
    return [document.text for document in read_source(source, seed=seed, folder=folder)]


@pytest.fixture
def folder(tmp_path):
    """Three endings, one document each but ten in the text file."""
    root = tmp_path / "texts [1]"
    (root / "law").mkdir(parents=True)
    (root / "law" / "train.txt").write_text("\n<|doc|>\n".join(f"text {n}" for n in range(10)))
    (root / "law" / "more.jsonl").write_text(json.dumps({"text": "a line"}) + "\n")
    parquet.write_table(pyarrow.table({"text": ["a row"]}), root / "law" / "rows.parquet")
    return root


def test_all_documents_of_all_files_come_in_seeded_order(folder):
    source = Source(files=("{folder}/law/*",))
    expected = sorted([*(f"text {n}" for n in range(10)), "a line", "a row"])
    first = texts(source, folder=folder)
    assert sorted(first) == expected
    assert first != expected
    assert first == texts(source, folder=folder)
    assert first != texts(source, seed=1, folder=folder)


def test_folder_parameter_and_its_brackets_are_taken_literally(folder):
    source = Source(files=("{folder}/law/train.txt", "{folder}/**/*.jsonl"))
    assert source_files(source, folder) == {
        "{folder}/law/more.jsonl": folder / "law" / "more.jsonl",
        "{folder}/law/train.txt": folder / "law" / "train.txt",
    }


def test_fingerprint_of_files_is_their_content_wherever_they_lie(folder, tmp_path):
    source = Source(files=("{folder}/law/*.txt",))
    content = (folder / "law" / "train.txt").read_bytes()
    expected = {"files": {"{folder}/law/train.txt": hashlib.sha256(content).hexdigest()}}
    assert source_fingerprint(source, folder=folder) == expected
    moved = folder.rename(tmp_path / "moved")
    assert source_fingerprint(source, folder=moved) == expected
    (moved / "law" / "train.txt").write_text("changed")
    assert source_fingerprint(source, folder=moved) != expected


def test_fingerprint_of_a_harvest_changes_with_any_file(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"text of {name}")
    found = lambda: list(harvest.found(tmp_path, "here", "a", "b"))  # noqa: E731 (a two-line stand-in)
    monkeypatch.setitem(harvest.FILES, "python", found)
    source = Source(harvest="python")
    listing = [
        [f"here/{name}", hashlib.sha256(f"text of {name}".encode()).hexdigest()] for name in "ab"
    ]
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    assert source_fingerprint(source) == {"harvest": "python", "digest": digest}
    (tmp_path / "b").write_text("changed")
    assert source_fingerprint(source)["digest"] != digest


def test_a_local_dataset_is_streamed_in_seeded_order(tmp_path):
    rows = "".join(json.dumps({"body": f"row {n}"}) + "\n" for n in range(20))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(rows)
    source = Source(dataset="{folder}/data", text_field="body")
    first = texts(source, folder=tmp_path)
    assert sorted(first) == sorted(f"row {n}" for n in range(20))
    assert first == texts(source, folder=tmp_path)
    assert first != texts(source, seed=1, folder=tmp_path)
    assert source_faults(source, "train", tmp_path) == []
    fingerprint = source_fingerprint(source, folder=tmp_path)
    assert fingerprint["files"] == {
        "{folder}/data/train.jsonl": hashlib.sha256(rows.encode()).hexdigest()
    }


def faults(source, folder=None):
    return [
        (f.field, f.value, f.remedy) for f in source_faults(source, "domains.law.train", folder)
    ]


def test_all_faults_of_a_source_are_found_at_once(folder):
    (folder / "bytes.txt").write_bytes(b"ab\xff")
    (folder / "empty.txt").write_text(" \n<|doc|>\n")
    (folder / "other.jsonl").write_text('{"body": "x"}\n')
    (folder / "table.csv").write_text("text\n")
    names = ("law/train.txt", "bytes.txt", "empty.txt", "other.jsonl", "table.csv", "absent.txt")
    found = faults(Source(files=tuple("{folder}/" + name for name in names)), folder)
    expected = ["byte 2 is not UTF-8", "holds no text", "no field 'text'", "ending", "no such file"]
    assert [value for _, value, _ in found] == [str(folder / name) for name in names[1:]]
    assert {field for field, _, _ in found} == {"domains.law.train.files"}
    for (_, _, remedy), part in zip(found, expected, strict=True):
        assert part in remedy


def test_a_good_source_has_no_fault(folder):
    assert faults(Source(files=("{folder}/law/*",)), folder) == []
    assert faults(Source(harvest="cpp")) == []


@pytest.mark.parametrize(
    ("source", "field", "says"),
    [
        (Source(), "domains.law.train", "exactly one of"),
        (Source(harvest="cpp", files=("a.txt",)), "domains.law.train", "exactly one of"),
        (Source(files=("{folder}/a.txt",)), "domains.law.train.files", "give the folder"),
        (Source(dataset="{folder}/a"), "domains.law.train.dataset", "give the folder"),
        (Source(dataset="/no/such/dataset"), "domains.law.train.dataset", "cannot be opened"),
        (Source(files=("*.nothing",)), "domains.law.train.files", "there is no such file"),
    ],
)
def test_a_source_that_cannot_be_read_is_a_fault(source, field, says):
    ((found, _, remedy),) = faults(source)
    assert found == field
    assert says in remedy


def test_a_dataset_without_the_text_field_is_a_fault(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"body": "x"}\n')
    ((field, _, remedy),) = faults(Source(dataset=str(tmp_path)))
    assert field == "domains.law.train.dataset"
    assert "no field 'text', it has body" in remedy


def test_a_missing_package_is_a_fault(monkeypatch):
    monkeypatch.setitem(harvest.FILES, "cpp", lambda: [harvest.package("no_such_package")])
    ((field, value, remedy),) = faults(Source(harvest="cpp"))
    assert (field, value) == ("domains.law.train.harvest", "cpp")
    assert "no_such_package is not installed" in remedy


def test_reading_without_checking_first_names_the_file(tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match="byte 0 is not UTF-8"):
        texts(Source(files=(str(tmp_path / "bytes.txt"),)))
