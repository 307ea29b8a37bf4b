import hashlib
import json

import pyarrow
import pyarrow.parquet as parquet
import pytest

from upcycle_core.checkpoints import known
from upcycle_core.corpora import harvest, sources
from upcycle_core.corpora.config import Source
from upcycle_core.corpora.conversations import messages_of, place_rows
from upcycle_core.corpora.sources import (
    first_chats,
    read_source,
    source_faults,
    source_files,
    source_fingerprint,
)
from upcycle_core.errors import InputError

KIND = {"role": "system", "content": "Be kind."}
SAID = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann"}]
BESIDE = {"messages": [KIND, *SAID]}


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
        (Source(dataset="/no/such/dataset"), "domains.law.train.dataset", "cannot be read"),
        (Source(files=("*.nothing",)), "domains.law.train.files", "there is no such file"),
        (Source(files=("/",)), "domains.law.train.files", "is a folder; name what is to be read"),
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


QUESTIONS = [{"question": "why {so}?", "answer": "é", "id": 1}, {"question": "b", "answer": "c"}]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_template_makes_a_document_of_several_fields(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", QUESTIONS)
    table = pyarrow.table(
        {name: [row[name] for row in QUESTIONS] for name in ("question", "answer")}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data" / "train.jsonl", [{**row, "id": 1} for row in QUESTIONS])
    template = "Q: {question}\nA: {answer} {{!}} {question}"
    expected = ["Q: b\nA: c {!} b", "Q: why {so}?\nA: é {!} why {so}?"]
    for named in ({"files": (file,)}, {"files": (str(tmp_path / "a.parquet"),)}):
        assert sorted(texts(Source(template=template, **named))) == expected
    assert sorted(texts(Source(template=template, dataset=str(tmp_path / "data")))) == expected


def test_chats_are_read_in_every_form_of_a_record(tmp_path):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"messages": said},
        {"prompt": "a", "response": "b"},
        {"instruction": "a", "output": "b"},
    ]
    source = Source(files=(jsonl(tmp_path / "a.jsonl", rows),), form="chat")
    found = list(read_source(source, seed=0, folder=None))
    assert [document.messages for document in found] == [said] * 3
    assert {(document.text, document.size) for document in found} == {("a\n\nb", 4)}
    table = pyarrow.table({"messages": [said], "prompt": [None], "note": ["x"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (chat,) = read_source(
        Source(files=(str(tmp_path / "a.parquet"),), form="chat"), seed=0, folder=None
    )
    assert chat.messages == said
    assert faults(source) == []
    places = [chat.place for chat in first_chats(source, 2, folder=None)]
    assert places == [f"{tmp_path}/a.jsonl, line 1", f"{tmp_path}/a.jsonl, line 2"]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_chat_has_the_context_the_system_message_and_the_earlier_turns(tmp_path, ending):
    """Dolly's records, and what LLaMA-Factory writes beside a prompt."""
    dolly = {"instruction": "Who?", "context": "Ann sang.", "response": "Ann", "category": "qa"}
    factory = {"instruction": "a", "output": "b", "system": "Be kind.", "history": [["c", "d"]]}
    file = tmp_path / f"a.{ending}"
    jsonl(file, [dolly, factory])
    if ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([dict.fromkeys(factory) | dolly]), file)
        (tmp_path / "b").mkdir()
        parquet.write_table(pyarrow.Table.from_pylist([factory]), tmp_path / "b" / "b.parquet")
    source = Source(files=(str(tmp_path / f"**/*.{ending}"),), form="chat")
    assert faults(source) == []
    texts = {document.text for document in read_source(source, seed=0, folder=None)}
    assert texts == {"Who?\n\nAnn sang.\n\nAnn", "Be kind.\n\nc\n\nd\n\na\n\nb"}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_system_message_may_stand_beside_messages(tmp_path, ending):
    tools = [{"type": "function", "function": {"name": "look"}}]
    rows = [
        {"messages": SAID, "system": "Be kind.", "context": "", "history": []},
        {"messages": [KIND, *SAID], "system": "Be kind.\n", "context": "Who?"},
        {"messages": SAID, "system": " ", "history": [["Who?", "Ann"]], "tools": tools},
        {"messages": SAID, "system": "Be kind.", "tools": tools},
    ]
    file = tmp_path / f"a.{ending}"
    jsonl(file, rows)
    if ending == "parquet":
        columns = dict.fromkeys(name for row in rows for name in row)
        parquet.write_table(pyarrow.Table.from_pylist([columns | row for row in rows]), file)
    found = [messages_of(row, place) for place, row in place_rows(file)]
    assert found[:2] == [[KIND, *SAID]] * 2
    assert found[2:] == [
        [SAID[0] | {"tools": tools}, SAID[1]],
        [KIND | {"tools": tools}, *SAID],
    ]


@pytest.mark.parametrize(
    ("settings", "row", "says"),
    [
        ({"template": "{a} {b}"}, {"a": "x"}, "line 1 has no field 'b', it has a"),
        ({"template": "{a}"}, {"a": 3}, "line 1 holds int in 'a', not text"),
        ({"form": "chat"}, {"text": "x"}, "line 1, prompt = ['text']: the record has none of"),
        ({"form": "chat"}, {"prompt": "x", "response": ""}, "line 1, response = '': must be text"),
        (
            {"form": "chat"},
            {"messages": [{"role": "user", "content": "x"}]},
            "a response (role assistant) must follow some prompt",
        ),
        ({"form": "chat"}, BESIDE | {"system": "Be fast."}, "line 1, system = 'Be fast.': stands"),
        ({"form": "chat"}, BESIDE | {"system": 3}, "line 1, system = 3: must be text"),
        ({"form": "chat"}, {"prompt": "\ud800", "response": "x"}, "half a surrogate pair"),
    ],
)
def test_records_of_another_form_are_named_with_their_line(tmp_path, settings, row, says):
    source = Source(files=(jsonl(tmp_path / "a.jsonl", [row]),), **settings)
    ((field, value, remedy),) = faults(source)
    assert (field, value) == ("domains.law.train.files", str(tmp_path / "a.jsonl"))
    assert says in remedy


def test_plain_text_holds_no_records(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for settings in ({"form": "chat"}, {"template": "{a}"}):
        ((_, _, remedy),) = faults(Source(files=(str(tmp_path / "a.txt"),), **settings))
        assert "its ending is none of .jsonl, .json, .parquet" in remedy


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        ({"template": "no field"}, "template", "it names no field"),
        ({"template": "{a"}, "template", "expected '}'"),
        ({"template": "{a.__class__}"}, "template", "no plain name"),
        ({"template": "{a!r}"}, "template", "no plain name"),
        ({"template": "{0}"}, "template", "no plain name"),
        ({"template": "{a}", "form": "chat"}, "template", "is for records of text"),
    ],
)
def test_what_is_no_template_is_refused(settings, field, says):
    ((found, _, remedy),) = faults(Source(files=("a.jsonl",), **settings))
    assert found == f"domains.law.train.{field}"
    assert says in remedy


def test_a_harvest_holds_no_chats():
    ((field, _, _),) = faults(Source(harvest="cpp", form="chat"))
    assert field == "domains.law.train.form"


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000, "a" * 5000 + "*"])
def test_a_path_that_is_too_long_is_a_fault(name):
    ((field, _, remedy),) = faults(Source(files=(name,)))
    assert (field, remedy) == ("domains.law.train.files", "there is no such file; check the path")


@pytest.mark.parametrize("form", ["chat", "text"])
def test_a_column_that_python_cannot_hold_is_not_read_beside_the_text(tmp_path, form):
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    far = pyarrow.array([4_000_000], pyarrow.int32()).cast(pyarrow.date32())
    columns = {"messages": [said], "text": ["hi"], "made": far}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    source = Source(files=(str(tmp_path / "a.parquet"),), form=form)
    assert source_faults(source, "domains.x.train", None) == []
    wrong = Source(files=source.files, text_field="made")
    (fault,) = source_faults(wrong, "domains.x.train", None)
    assert "cannot be read" in fault.remedy


def test_a_file_may_be_called_as_a_pattern_is(tmp_path):
    for name in ("notes[1].txt", "notes1.txt"):
        (tmp_path / name).write_text(name)
    own = Source(files=(str(tmp_path / "notes[1].txt"),))
    assert source_faults(own, "domains.x.train", None) == []
    assert [document.text for document in read_source(own, seed=0, folder=None)] == ["notes[1].txt"]


def test_the_first_faults_of_a_file_are_named_together(tmp_path, monkeypatch):
    rows = [{"text": f"a text of its own, {number}"} for number in range(3)]
    rows += [{"text": None}] * 7
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = []
    real = sources._rows
    monkeypatch.setattr(
        sources, "_rows", lambda *args: (drawn.append(row) or row for row in real(*args))
    )
    found = faults(Source(files=(str(path),)))
    assert len(drawn) == 3 + 6  # and no more: a wrong field is wrong in every record
    assert [value for _, value, _ in found] == [str(path)] * 6
    for number in range(4, 9):
        assert f"line {number} holds nothing in 'text'" in found[number - 4][2]
    assert found[5][2] == "more of its records are faulty too"


def test_a_dataset_that_is_there_for_the_flow_alone_is_named_by_the_machine_that_reads(tmp_path):
    source = Source(dataset=str(tmp_path / "gone"), split="train")
    with pytest.raises(InputError, match=r"dataset = '.*gone': it cannot be read .*HF_TOKEN"):
        texts(source)


def test_a_row_of_a_stream_is_named_by_how_it_begins(tmp_path):
    (tmp_path / "data").mkdir()
    rows = [{"text": f"text {number}", "id": number} for number in range(5)]
    rows[3]["text"] = None
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "data" / "train.jsonl").write_text(lines)
    with pytest.raises(InputError, match=r'the row \{"text": null, "id": 3\} \.\.\. holds nothing'):
        texts(Source(dataset=str(tmp_path / "data")))


def remembered(folder, monkeypatch):
    """A memory of the folder's files, and those that are opened from then on."""
    monkeypatch.setattr(known, "SETTLED_NS", -(10**12))
    memory, opened = known.KnownFiles(folder / "known.sqlite"), []
    digest, lines = known._sha256_of, sources.read_txt
    monkeypatch.setattr(known, "_sha256_of", lambda path: opened.append(path) or digest(path))
    monkeypatch.setattr(sources, "read_txt", lambda path: opened.append(path) or lines(path))
    return memory, opened


def test_a_text_that_has_not_changed_is_read_once(tmp_path, monkeypatch):
    memory, opened = remembered(tmp_path, monkeypatch)
    path = tmp_path / "train.txt"
    path.write_text("a text\n" * 10_000)
    source = Source(files=(str(path),))
    for _ in range(3):
        assert not source_faults(source, "train", None, memory)
        assert source_fingerprint(source, known=memory) == source_fingerprint(source)
    assert opened == [path, path]  # its hash, and what it holds
    path.write_text("another text\n" * 10_000)
    assert not source_faults(source, "train", None, memory)
    assert opened[2:] == [path, path]


def test_what_is_wrong_with_a_text_is_said_each_time_until_it_is_another(tmp_path, monkeypatch):
    memory, _ = remembered(tmp_path, monkeypatch)
    path = tmp_path / "train.jsonl"
    path.write_text((json.dumps({"body": "a line"}) + "\n") * 5000)
    source = Source(files=(str(path),))
    for _ in range(2):
        faults = source_faults(source, "train", None, memory)
        assert "text" in faults[0].remedy
    other = Source(files=(str(path),), text_field="body")
    assert not source_faults(other, "train", None, memory)
    assert source_faults(source, "train", None, memory)
    path.unlink()
    assert "no such file" in source_faults(source, "train", None, memory)[0].remedy
