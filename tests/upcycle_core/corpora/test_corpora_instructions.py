"""Instruction rows against rows put together by hand, one character a token."""

import json
import pickle
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import torch
from chat import save_chat_tokenizer
from forms import change_json
from pico import save_pico_tokenizer
from transformers import AutoTokenizer

from upcycle_core.corpora.instructions import InstructionRows, encode_prompt
from upcycle_core.errors import InputError
from upcycle_core.evaluation.instructions.answers import encode_prompts

END, PAD = 0, 1
TURNS = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<|endoftext|> {% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
COUNTED = "{{ messages | length }}" + TURNS
MARKED = (
    "{{ messages | length }}{% for m in messages %}[{{ m['role'][0] }}]"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<|endoftext|> {% endfor %}"
)
ENDLESS = (
    "{% for m in messages %}({{ m['content'] }}){% endfor %}"
    "{% if add_generation_prompt %}({% endif %}"
)


def ids_of(text):
    """``~`` stands for the end token."""
    return [END if character == "~" else ord(character) - 32 + 2 for character in text]


def hand_made(length, *parts):
    """A row of (text, whether there is loss on it)."""
    ids = [i for text, _ in parts for i in ids_of(text)]
    labels = [i if loss else -100 for text, loss in parts for i in ids_of(text)]
    padding = length - len(ids)
    return {
        "input_ids": ids + [PAD] * padding,
        "labels": labels + [-100] * padding,
        "attention_mask": [1] * len(ids) + [0] * padding,
    }


@pytest.fixture
def tokenizer(tmp_path):
    """Without a chat template; a line feed is no token of it, so it is added."""
    directory = save_pico_tokenizer(tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(directory)
    loaded.add_tokens(["\n"])
    loaded.save_pretrained(directory)
    return directory


def with_template(directory, template):
    loaded = AutoTokenizer.from_pretrained(directory)
    loaded.chat_template = template
    loaded.save_pretrained(directory)
    return directory


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rows_of(file, tokenizer, length, count=1, seed=0):
    rows = InstructionRows([file], tokenizer, sequence_length=length, count=count, seed=seed)
    return rows, [{name: value.tolist() for name, value in row.items()} for row in rows]


def chat(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]}


BLANK_LINE = [96, 96]


def test_tokens_are_kept_in_a_file(tokenizer, tmp_path):
    file, size = tmp_path / "asks.jsonl", 1000
    lines = [json.dumps({"prompt": "P" * size, "response": "R" * size})] * 100
    file.write_text("\n".join(lines))
    tracemalloc.start()
    try:
        rows = InstructionRows([file], tokenizer, sequence_length=3000, count=100, seed=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The text itself is held, and one row as lists of Python.
    assert rows.tokens > 2 * size * len(lines)
    assert peak < 8 * rows.tokens


def plain(length, prompt, response):
    ids = [*ids_of(prompt), *BLANK_LINE, *ids_of(response + "~")]
    labels = [-100] * (len(prompt) + 2) + ids_of(response + "~")
    padding = length - len(ids)
    return {
        "input_ids": ids + [PAD] * padding,
        "labels": labels + [-100] * padding,
        "attention_mask": [1] * len(ids) + [0] * padding,
    }


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "two and two?", "response": "four"},
        {"instruction": "two and two?", "output": "four", "input": ""},
        {"prompt": "two and two?", "completion": "four", "id": 3},
        {"prompt": "two and two?", "answer": "four", "orig": {"answer": "4"}},
        chat("two and two?", "four"),
    ],
)
def test_every_form_of_a_record_gives_the_same_row(tmp_path, tokenizer, record):
    rows, found = rows_of(jsonl(tmp_path / "a.jsonl", record), tokenizer, 24)
    assert found == [plain(24, "two and two?", "four")]
    assert all(value.dtype == torch.int64 for value in rows[0].values())


def test_input_follows_the_instruction(tmp_path, tokenizer):
    record = {"instruction": "add", "input": "2 2", "output": "4"}
    _, (row,) = rows_of(jsonl(tmp_path / "a.jsonl", record), tokenizer, 16)
    ids = [*ids_of("add"), *BLANK_LINE, *ids_of("2 2"), *BLANK_LINE, *ids_of("4~")]
    assert row["input_ids"][: len(ids)] == ids
    assert row["labels"][: len(ids)] == [-100] * (len(ids) - 2) + ids_of("4~")


def test_parquet_gives_what_jsonl_gives(tmp_path, tokenizer):
    records = [{"prompt": f"q{i}", "response": f"a{i}"} for i in range(5)]
    table = pyarrow.table({name: [r[name] for r in records] for name in ("prompt", "response")})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    options = {"length": 12, "count": 9, "seed": 4}
    expected = rows_of(jsonl(tmp_path / "a.jsonl", *records), tokenizer, **options)[1]
    assert rows_of(tmp_path / "a.parquet", tokenizer, **options)[1] == expected


def test_end_token_named_in_a_text_stays_text(tmp_path, tokenizer):
    record = {"prompt": "say <|endoftext|>", "response": "<|endoftext|>"}
    file = jsonl(tmp_path / "a.jsonl", record)
    _, (row,) = rows_of(file, tokenizer, 64)
    _, (templated,) = rows_of(file, with_template(tokenizer, TURNS), 64)
    assert row["input_ids"].count(END) == 1
    assert templated["input_ids"].count(END) == 2
    for labels in (row["labels"], templated["labels"]):
        assert [label for label in labels if label != -100] == ids_of("<|endoftext|>~")


def test_chat_template_gives_loss_on_responses_and_their_end(tmp_path, tokenizer):
    file = jsonl(tmp_path / "a.jsonl", chat("hi", "yo", "and?", "so"))
    _, found = rows_of(file, with_template(tokenizer, TURNS), 40)
    assert found == [
        hand_made(40, ("[u]hi~ [a]", False), ("yo~", True), (" [u]and?~ [a]", False), ("so~", True))
    ]


def test_what_follows_the_last_response_is_left_out(tmp_path, tokenizer):
    file = jsonl(tmp_path / "a.jsonl", chat("hi", "yo", "and?"))
    _, found = rows_of(file, with_template(tokenizer, TURNS), 20)
    assert found == [hand_made(20, ("[u]hi~ [a]", False), ("yo~", True))]


def test_template_without_an_end_gets_one(tmp_path, tokenizer):
    file = jsonl(tmp_path / "a.jsonl", chat("hi", "yo"))
    _, found = rows_of(file, with_template(tokenizer, ENDLESS), 20)
    assert found == [hand_made(20, ("(hi)(", False), ("yo)~", True))]


def test_template_that_rewrites_earlier_turns_needs_marks(tmp_path, tokenizer):
    file = jsonl(tmp_path / "a.jsonl", chat("hi", "yo", "and?", "so"))
    with pytest.raises(InputError, match=r"a\.jsonl, line 1'.*one response each.*generation"):
        rows_of(file, with_template(tokenizer, COUNTED), 40)
    _, found = rows_of(file, with_template(tokenizer, MARKED), 40)
    parts = ("4[u]hi~ [a]", False), ("yo~", True), (" [u]and?~ [a]", False), ("so~", True)
    assert found == [hand_made(40, *parts)]


def test_template_that_refuses_a_conversation_is_named(tmp_path, tokenizer):
    refusing = "{{ raise_exception('no system here') }}"
    file = jsonl(tmp_path / "a.jsonl", chat("hi", "yo"))
    with pytest.raises(InputError, match=r"line 1'.*refuses it \(no system here\)"):
        rows_of(file, with_template(tokenizer, refusing), 40)


def test_long_prompts_lose_their_left_and_long_responses_are_left_out(tmp_path, tokenizer):
    file = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "abcdefgh", "response": "1234"},  # 15 tokens
        {"prompt": "abc", "response": "12345678"},  # only one blank of the prompt is left
        {"prompt": "abc", "response": "123456789"},  # nothing of the prompt would be left
    )
    rows, found = rows_of(file, tokenizer, 10, count=2)
    assert (rows.records, rows.cut, rows.left_out) == (2, 2, 1)
    expected = [
        [*ids_of("fgh"), *BLANK_LINE, *ids_of("1234~")],
        [*BLANK_LINE[:1], *ids_of("12345678~")],
    ]
    assert sorted(row["input_ids"] for row in found) == sorted(expected)
    assert sorted(sum(label != -100 for label in row["labels"]) for row in found) == [5, 9]


def test_a_beginning_of_sequence_token_stays_where_a_prompt_is_cut(tmp_path, tokenizer):
    """Attention rests on it, in training and in answering."""
    with_template(tokenizer, "{{ bos_token }}" + TURNS)
    file = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "abcdefgh", "response": "1234"},
        {"prompt": "abc", "response": "12345678901"},  # fits beside one token of its prompt
        {"prompt": "abc", "response": "123456789012"},  # would take the first token's place
    )
    rows, found = rows_of(file, tokenizer, 14, count=2)
    assert (rows.records, rows.cut, rows.left_out) == (2, 2, 1)
    expected = ["~fgh~ [a]1234~", "~]12345678901~"]
    assert sorted(row["input_ids"] for row in found) == sorted(map(ids_of, expected))
    whole = encode_prompt(tokenizer, "abcdefgh")
    for length in (1, 2, 9):
        end = whole.ids[len(whole.ids) - length + 1 :]
        kept = encode_prompt(tokenizer, "abcdefgh", max_tokens=length)
        assert kept == ([END, *end], len(whole.ids) - length)


def test_rows_are_padded_with_a_token_that_the_model_has(tmp_path, tokenizer):
    """Settings that name another one have transformers add it behind all rows of the embedding."""
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "hi", "response": "ok"})
    settings = tokenizer / "tokenizer_config.json"
    known = len(AutoTokenizer.from_pretrained(tokenizer))
    for named, padding in (("<|pad|>", PAD), ("[PAD]", END), (None, END)):
        change_json(settings, pad_token=named)
        _, (row,) = rows_of(file, tokenizer, 20)
        assert row["input_ids"][-1] == padding
    change_json(settings, pad_token="[PAD]")
    assert AutoTokenizer.from_pretrained(tokenizer).pad_token_id == known


@pytest.mark.parametrize("count", [1, 3, 4, 8])
def test_tokens_are_counted_without_padding(tmp_path, tokenizer, count):
    records = [{"prompt": "q" * n, "response": "a"} for n in (1, 4, 9)]
    rows, found = rows_of(jsonl(tmp_path / "a.jsonl", *records), tokenizer, 20, count=count)
    assert rows.tokens == sum(sum(row["attention_mask"]) for row in found)


def test_what_is_left_of_a_response_without_its_prompt_has_no_loss(tmp_path, tokenizer):
    file = jsonl(tmp_path / "a.jsonl", chat("hi", "123456789", "and?", "so"))
    rows, found = rows_of(file, with_template(tokenizer, TURNS), 20)
    assert rows.cut == 1
    parts = ("789~", False), (" [u]and?~ [a]", False), ("so~", True)
    assert found == [hand_made(20, *parts)]


def test_what_is_too_long_may_be_left_out_whole(tmp_path, tokenizer):
    file = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "abcdefgh", "response": "1234"},  # 15 tokens
        {"prompt": "abc", "response": "1234"},  # 10
    )
    options = {"sequence_length": 10, "count": 1, "seed": 0, "cuts": False}
    rows = InstructionRows([file], tokenizer, **options)
    assert (rows.records, rows.cut, rows.left_out) == (1, 0, 1)
    assert rows[0]["input_ids"].tolist() == [*ids_of("abc"), *BLANK_LINE, *ids_of("1234~")]
    assert (pickle.loads(pickle.dumps(rows)).records, pickle.loads(pickle.dumps(rows)).cut) == (
        1,
        0,
    )
    with pytest.raises(InputError, match="no conversation fits into 9 tokens"):
        InstructionRows([file], tokenizer, **{**options, "sequence_length": 9})
    with pytest.raises(InputError, match="no response fits into 4 tokens; raise sequence_length"):
        rows_of(file, tokenizer, 4)


def test_every_epoch_gives_each_record_once_in_its_own_order(tmp_path, tokenizer):
    records = [{"prompt": f"q{i:02d}", "response": chr(65 + i)} for i in range(12)]
    file = jsonl(tmp_path / "a.jsonl", *records)
    _, found = rows_of(file, tokenizer, 10, count=36)
    epochs = [[row["labels"][5] for row in found[i : i + 12]] for i in (0, 12, 24)]
    assert all(sorted(epoch) == [ids_of(chr(65 + i))[0] for i in range(12)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert rows_of(file, tokenizer, 10, count=36, seed=1)[1] != found


def test_a_row_depends_on_seed_and_index_alone(tmp_path, tokenizer):
    file = jsonl(tmp_path / "a.jsonl", *({"prompt": "q", "response": str(i)} for i in range(9)))
    rows, found = rows_of(file, tokenizer, 10, count=30)
    fresh = pickle.loads(pickle.dumps(rows))
    assert [fresh[i]["input_ids"].tolist() for i in (29, 3, 11)] == [
        found[i]["input_ids"] for i in (29, 3, 11)
    ]
    with pytest.raises(IndexError):
        rows[30]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, r"a\.jsonl, line 2, prompt = .*has none of \['prompt', 'instruction'\]"),
        ({"prompt": "a"}, "line 2, response = .*has none of"),
        ({"prompt": "a", "output": "b", "answer": "c"}, "has both output and answer"),
        ({"prompt": "a", "response": " "}, r"a\.jsonl, line 2, response = ' ': must be text"),
        ({"prompt": "a", "response": ""}, "line 2, response = '': must be text that is not empty"),
        (chat("hi", ""), r"line 2, messages\[1\], content = '': must be text that is not empty"),
        ({"prompt": 3, "response": "b"}, "line 2, prompt = 3: must be text"),
        ({"prompt": "a\ud83d", "response": "b"}, "line 2, prompt = .*holds half a surrogate pair"),
        ({"messages": "hi"}, "line 2, messages = 'hi': must be a list"),
        (chat("hi"), r"line 2, messages = \['user'\]: a response .* must follow"),
        ({"messages": [{"role": "user"}]}, r"line 2, messages\[0\], content = None: must be text"),
    ],
)
def test_faulty_records_are_named(tmp_path, tokenizer, record, message):
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"}, record)
    with pytest.raises(InputError, match=message):
        rows_of(file, tokenizer, 10)


def test_files_that_cannot_be_read_are_named_together(tmp_path, tokenizer):
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt"\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "a.csv").write_text("prompt,response\n")
    files = [tmp_path / name for name in ("broken.jsonl", "empty.jsonl", "a.csv", "none.jsonl")]
    with pytest.raises(InputError) as error:
        InstructionRows(files, tokenizer, sequence_length=8, count=1, seed=0)
    faults = [str(fault) for fault in error.value.faults]
    for fault, part in zip(
        faults, ("line 2 is not JSON", "holds no record", "its ending", "No such file"), strict=True
    ):
        assert part in fault


def test_many_faults_are_counted(tmp_path, tokenizer):
    file = jsonl(tmp_path / "a.jsonl", *({"text": str(i)} for i in range(40)))
    with pytest.raises(InputError) as error:
        rows_of(file, tokenizer, 8)
    assert len(error.value.faults) == 6
    assert "35 more" in str(error.value.faults[-1])


def test_tokenizer_without_an_end_token_is_refused(tmp_path, tokenizer):
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.eos_token = None
    loaded.save_pretrained(tokenizer)
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"})
    with pytest.raises(InputError, match="no end-of-sequence token"):
        rows_of(file, tokenizer, 8)


@pytest.mark.parametrize("template", [None, TURNS, ENDLESS, MARKED])
def test_a_prompt_to_answer_is_what_stands_before_the_response(tmp_path, tokenizer, template):
    if template is not None:
        with_template(tokenizer, template)
    # Marks and names of control tokens do not go together where decoding adds spaces, as here.
    prompt = f"say {'words' if template == MARKED else '<|endoftext|>'}: 2, 3\nand 4, in order"
    file = jsonl(tmp_path / "a.jsonl", {"prompt": prompt, "response": "so"})
    rows = InstructionRows([file], tokenizer, sequence_length=64, count=1, seed=0)
    first = int((rows[0]["labels"] != -100).nonzero()[0])
    for given in (tokenizer, AutoTokenizer.from_pretrained(tokenizer)):
        found = encode_prompt(given, prompt)
        assert found.ids == rows[0]["input_ids"][:first].tolist()
        assert found.cut == 0
    assert len(found.ids) > 20
    assert encode_prompt(tokenizer, prompt, max_tokens=5) == (found.ids[-5:], len(found.ids) - 5)
    assert encode_prompt(tokenizer, prompt, max_tokens=len(found.ids)) == found


def test_marks_that_cannot_be_placed_are_refused(tmp_path, tokenizer):
    with_template(tokenizer, MARKED)
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "say <|endoftext|>", "response": "so"})
    with pytest.raises(InputError, match="or take the names of control tokens out of it"):
        InstructionRows([file], tokenizer, sequence_length=64, count=1, seed=0)


def test_rows_say_which_task_their_record_is(tmp_path, tokenizer):
    """Rows that are left out must not shift the tasks of the others."""
    records = [
        {"prompt": "long", "response": "123456789", "task": "b"},
        {"prompt": "a", "response": "A", "task": "a"},
        {"prompt": "c", "response": "C", "task": "c"},
        {"prompt": "b", "response": "B", "task": "b"},
        {"prompt": "n", "response": "N"},
        {"prompt": "l", "response": "L", "task": ["a"]},
    ]
    file = jsonl(tmp_path / "a.jsonl", *records)
    options = {"sequence_length": 8, "count": 10, "seed": 3}
    rows = InstructionRows([file], tokenizer, tasks=("a", "b"), **options)
    expected = {"A": 0, "B": 1, "C": -1, "N": -1, "L": -1}
    for own in (rows, pickle.loads(pickle.dumps(rows))):
        ids = {chr(int(row["input_ids"][3]) + 30): row["task_ids"] for row in own}
        assert {letter: int(number) for letter, number in ids.items()} == expected
        assert all(number.dtype == torch.int64 and number.dim() == 0 for number in ids.values())
    plain_rows = InstructionRows([file], tokenizer, **options)
    assert "task_ids" not in plain_rows[0]


def test_what_others_than_a_user_say_before_is_asked_in_their_roles(tmp_path):
    tokenizer = save_chat_tokenizer(tmp_path / "chat", "chatml")
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a"}]
    messages = [*asked, {"role": "assistant", "content": "b"}]
    file = jsonl(tmp_path / "a.jsonl", {"messages": messages})
    row = InstructionRows([file], tokenizer, sequence_length=64, count=1, seed=0)[0]
    first = int((row["labels"] != -100).nonzero()[0])
    assert encode_prompt(tokenizer, asked).ids == row["input_ids"][:first].tolist()
    rows = [{"prompt": "Be kind.\n\na", "asked": asked}, {"prompt": "a"}]
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    found = encode_prompts(loaded, rows, max_prompt_tokens=64).ids
    assert found == [encode_prompt(tokenizer, one).ids for one in (asked, "a")]
