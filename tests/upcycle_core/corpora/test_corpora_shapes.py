"""Instruction data as others publish them are the conversations that their own names would be."""

import json

import pyarrow
import pyarrow.parquet as parquet
import pytest

from upcycle_core.corpora.config import Source
from upcycle_core.corpora.conversations import messages_of, read_conversations
from upcycle_core.corpora.readers import file_rows
from upcycle_core.corpora.sources import file_documents
from upcycle_core.corpora.tuning.config import InstructionSource
from upcycle_core.corpora.tuning.records import checked
from upcycle_core.errors import InputError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and three?"},
    {"role": "assistant", "content": "Five."},
]
SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt"}
SHARED = {"conversations": [{"from": SPEAKERS[m["role"]], "value": m["content"]} for m in CHAT]}
ORCA = {"system_prompt": "Be brief.", "question": "Two and three?", "response": "Five."}
PARTED = {
    "messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in CHAT],
}


@pytest.mark.parametrize("row", [SHARED, ORCA, PARTED, {"conversations": CHAT}])
def test_published_shapes_are_conversations(row):
    assert messages_of(row, "line 1") == CHAT
    (record,) = checked(row, "line 1", "sums", InstructionSource(files=("sums.jsonl",)))
    assert list(record.messages) == CHAT
    assert record.references == ("Five.",)


def test_a_question_with_a_worked_answer_is_a_prompt():
    row = {"question": "Two and three?", "answer": "2 + 3 = 5\n#### 5"}
    assert [m["content"] for m in messages_of(row, "line 1")] == [row["question"], row["answer"]]


def test_own_names_come_first():
    row = {"prompt": "Add.", "question": "Two?", "response": "Five.", **SHARED}
    assert [m["content"] for m in messages_of(row, "line 1")] == ["Add.", "Five."]
    assert messages_of({"messages": CHAT, "conversations": [{"from": "bot"}]}, "line 1") == CHAT


def test_a_whole_shared_chat_keeps_its_further_answers():
    turns = [*SHARED["conversations"], {"from": "human", "value": "And four?"}]
    turns.append({"from": "gpt", "value": "Nine."})
    (record,) = checked({"conversations": turns}, "line 1", "sums", InstructionSource(files=("a",)))
    assert [m["content"] for m in record.messages[-2:]] == ["And four?", "Nine."]


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        ({"conversations": [{"from": "bot", "value": "a"}]}, "conversations[0], from", "bot"),
        ({"conversations": "text"}, "conversations", "text"),
        (
            {"messages": [CHAT[1] | {"content": [{"type": "image_url", "image_url": "a"}]}]},
            "messages[0], content",
            [{"type": "image_url", "image_url": "a"}],
        ),
        ({"question": "a", "query": "b", "response": "c"}, "prompt", None),
    ],
)
def test_what_is_unclear_is_refused(row, field, value):
    with pytest.raises(InputError) as caught:
        messages_of(row, "line 1")
    (fault,) = caught.value.faults
    assert fault.field == f"line 1, {field}"
    assert value is None or fault.value == value


def test_a_list_of_records_is_a_file(tmp_path):
    """As Alpaca and ShareGPT are published; some files of that ending hold lines."""
    alpaca = {"instruction": "Add.", "input": "2, 3", "output": "5"}
    (tmp_path / "list.json").write_text("\ufeff\n" + json.dumps([alpaca, SHARED], indent=1))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, [alpaca, SHARED])))
    listed, lined = (
        [chat.messages for chat in read_conversations([tmp_path / name])]
        for name in ("list.json", "lines.json")
    )
    assert listed == lined
    assert listed[1] == CHAT
    texts = file_documents(tmp_path / "list.json", "a", Source(form="chat"))
    assert [document.messages for document in texts] == listed


def test_a_shared_chat_in_a_parquet_file(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist([SHARED | {"id": 1}]), tmp_path / "a.parquet")
    (document,) = file_documents(tmp_path / "a.parquet", "a", Source(form="chat"))
    assert document.messages == CHAT


@pytest.mark.parametrize(
    ("text", "words"),
    [("[1]", "row 0 is not a JSON object"), ('[{"a": 1}', "it is not JSON in UTF-8")],
)
def test_a_list_that_is_none_is_refused(tmp_path, text, words):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        list(file_rows(tmp_path / "a.json", "{...}"))
