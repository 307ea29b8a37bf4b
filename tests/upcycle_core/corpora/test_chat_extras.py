"""Chats that think and call functions, held against what transformers makes of them."""

import json
import re

import pyarrow
import pyarrow.parquet as parquet
import pytest
from chat import CHATML, save_chat_tokenizer
from tokenizers import AddedToken
from transformers import AutoTokenizer

from upcycle_core.corpora.chat_template import ChatTemplate
from upcycle_core.corpora.config import CorpusConfig, Domain, Source
from upcycle_core.corpora.conversations import (
    Conversation,
    complete_text,
    joined,
    messages_of,
    read_conversations,
    whole_text,
)
from upcycle_core.corpora.documents import write_documents, write_texts
from upcycle_core.corpora.encoding import asked, encoded
from upcycle_core.corpora.instructions import _Encoder, encode_prompt, response_opening
from upcycle_core.corpora.reader import read_chats
from upcycle_core.corpora.tuning.config import InstructionSource
from upcycle_core.corpora.tuning.records import checked
from upcycle_core.errors import InputError
from upcycle_core.evaluation.instructions.answers import _said

THINKS = """\
{%- if tools %}{{ '<|im_start|>system\n' + (tools | map(attribute='name') | join(', ')) }}
{{- ' within <tool_call></tool_call><|im_end|>\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- set said = m.content %}{%- set thought = m.reasoning_content or '' %}
{%- if m.role == 'assistant' and '</think>' in said and not thought %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if m.role == 'assistant' and loop.last %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}{{- said }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""Writes the last response's thoughts, empty ones too, and drops earlier ones, as Qwen3's does."""
CUTS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + m.content.split('</think>')[-1] }}
{{- '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}"""
"""Writes no thoughts at all, as R1's does."""
CALL = {"function": {"name": "add", "arguments": {"a": 2, "b": None}}}
TOOLS = [{"name": "add", "description": "adds"}]


@pytest.fixture
def tokenizer(tmp_path):
    found = AutoTokenizer.from_pretrained(
        save_chat_tokenizer(tmp_path / "tokenizer", "chatml", template=THINKS)
    )
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    found.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return found


def asked_and(**answer):
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", **answer}]}


RECORDS = {
    "thinks": asked_and(content="<think>\nwell\n</think>\n\nyes"),
    "calls": asked_and(content="ok <tool_call>{}</tool_call>"),
    "fields": {
        "tools": TOOLS,
        **asked_and(content="so", reasoning_content="hm", tool_calls=[CALL]),
    },
    "silent": {"tools": TOOLS, **asked_and(content=None, tool_calls=[CALL])},
    "special": {"tools": [], **asked_and(content="names <|im_start|> alone")},
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_chat_has_the_ids_that_the_tokenizer_itself_gives_it(tokenizer, name):
    record = RECORDS[name]
    (found,) = encoded([Conversation(messages_of(record, "here"), "here")], tokenizer)
    messages = [{**m, "content": m["content"] or ""} for m in record["messages"]]
    if "tool_calls" in messages[1]:
        filled = {"function": {"name": "add", "arguments": {"a": 2}}}
        messages[1] = {**messages[1], "tool_calls": [filled]}
    own = tokenizer.apply_chat_template(
        messages, tools=record.get("tools") or None, return_dict=True
    )["input_ids"]
    if name == "special":  # ours is text, and theirs is none
        start = tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert (found.ids.count(start), own.count(start)) == (2, 3)
        return
    assert found.ids == own
    assert sum(found.responses) > 4


def test_what_is_thought_and_called_comes_back_from_the_disk(tmp_path):
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS.values())
    (tmp_path / "chats.jsonl").write_text(lines)
    source = Source(files=(str(tmp_path / "chats.jsonl"),), form="chat")
    config = CorpusConfig(min_characters=0)
    write_documents(Domain(train=source), tmp_path / "out", config=config, seed=0)
    found = [
        chat.messages
        for split in ("train", "calibration", "heldout")
        for chat in read_chats(tmp_path / "out" / f"{split}.parquet")
    ]
    wanted = [messages_of(record, "here") for record in RECORDS.values()]
    assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, wanted))


def weather(place, **more):
    call = {"function": {"name": "weather", "arguments": {"place": place}}}
    return {**asked_and(content=None, tool_calls=[call]), **more}


ALIKE = {
    "calls": [weather("Oslo"), weather("Rome")],
    "tools": [weather("Oslo", tools=TOOLS), weather("Oslo")],
    "thoughts": [
        asked_and(content="yes", reasoning_content="it must be"),
        asked_and(content="yes", reasoning_content="why not"),
    ],
}


@pytest.mark.parametrize("kind", ALIKE)
def test_chats_that_say_the_same_are_told_apart_by_what_is_called_and_thought(kind, tmp_path):
    for split, records in {"train": ALIKE[kind] * 2, "heldout": ALIKE[kind][:1]}.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    sources = {
        split: Source(files=(str(tmp_path / f"{split}.jsonl"),), form="chat")
        for split in ("train", "heldout")
    }
    common = {"config": CorpusConfig(min_characters=1), "seed": 0}
    domain = Domain(expert="ready", calibration=sources["train"], heldout=sources["heldout"])
    with pytest.raises(InputError, match=r"2 documents': 2 of them are also held-out text"):
        write_documents(domain, tmp_path / "domain", **common)  # who knows one knows the other
    held = tmp_path / "held"
    write_texts("heldout", sources["heldout"], held, name="held", **common)
    write_texts("train", sources["train"], tmp_path / "seed", name="seed_model.text", **common)
    kept = [chat.messages for chat in read_chats(tmp_path / "seed" / "train.parquet")]
    wanted = [messages_of(record, "here") for record in ALIKE[kind]]
    assert sorted(map(json.dumps, kept)) == sorted(map(json.dumps, wanted))
    apart = {"apart_from": [held / "heldout.parquet"], "name": "seed_model.text"}
    with pytest.raises(InputError, match=r"in a domain's text: 2|2 in a domain's text"):
        write_texts("train", sources["train"], tmp_path / "none", **apart, **common)


def test_a_chat_that_only_says_something_has_the_key_of_its_text():
    """Splits of a model that lives hang on it."""
    messages = messages_of({"prompt": "What is it?", "response": "A chat."}, "here")
    assert complete_text(messages) == joined(messages) == "What is it?\n\nA chat."


@pytest.mark.parametrize("returned", ["", None])
def test_a_function_may_return_nothing(tokenizer, returned):
    record = asked_and(content=None, tool_calls=[CALL])
    record["messages"] += [
        {"role": "tool", "content": returned},
        *asked_and(content="so")["messages"],
    ]
    (found,) = encoded([Conversation(messages_of(record, "here"), "here")], tokenizer)
    assert "<|im_start|>tool\n<|im_end|>" in tokenizer.decode(found.ids)
    record["messages"][2]["role"] = "user"
    with pytest.raises(InputError, match=r"messages\[2\], content.*text that is not empty"):
        messages_of(record, "here")


@pytest.mark.parametrize("blank", ["", "  ", None])
def test_blank_fields_are_none(blank):
    plain = {**asked_and(content="yes"), "tools": blank}
    for name in ("tool_calls", "reasoning_content", "name"):
        plain["messages"][1][name] = blank
    assert messages_of(plain, "here") == messages_of(asked_and(content="yes"), "here")


def test_a_parquet_file_s_empty_fields_are_none(tmp_path):
    records = [RECORDS["fields"], RECORDS["thinks"]]
    table = pyarrow.Table.from_pylist([{"tools": None, **record} for record in records])
    parquet.write_table(table, tmp_path / "chats.parquet")
    found = [chat.messages for chat in read_conversations([tmp_path / "chats.parquet"])]
    assert found == [messages_of(record, "here") for record in records]


def test_lists_may_be_json(tmp_path):
    record = {**RECORDS["fields"], "tools": json.dumps(TOOLS)}
    record["messages"][1]["tool_calls"] = json.dumps([CALL])
    said = messages_of(record, "here")
    assert said[0]["tools"] == TOOLS
    assert said[1]["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 2}}}]
    assert joined(said) == "hi\n\nso"  # what documents are known by, with thoughts or without
    assert whole_text(said) == f"hi\n\nhm\n\nso\n\n{json.dumps(said[1]['tool_calls'])}"
    for wrong in ("add", "[1]", '{"name": "add"}', 3):
        with pytest.raises(InputError, match=r"here, tools = .*must be a list of objects"):
            messages_of({**record, "tools": wrong}, "here")


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_a_prompt_and_its_response_may_have_tools_beside_them(tmp_path, tools):
    record = {"prompt": "hi", "response": "so", "system": "Be kind.", "tools": tools}
    (tmp_path / "chats.jsonl").write_text(json.dumps(record))
    (found,) = read_conversations([tmp_path / "chats.jsonl"])
    system = {"role": "system", "content": "Be kind.", "tools": TOOLS}
    assert found.messages == [system, *messages_of(asked_and(content="so"), "here")]
    with pytest.raises(InputError, match=r"here, tools = 'a hammer': must be a list of objects"):
        messages_of(record | {"tools": "a hammer"}, "here")


OLDER = {"name": "add", "arguments": '{"a": 2}'}
"""A call as OpenAI wrote it before there were tools."""


@pytest.mark.parametrize("call", [OLDER, json.dumps(OLDER)])
def test_openai_s_older_form_is_brought_to_the_newer(tokenizer, tmp_path, call):
    no_call = {"name": None, "arguments": None}  # as a Parquet file has it
    messages = [
        {"role": "user", "content": "hi", "function_call": no_call},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "add", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    found = messages_of({"messages": messages, "functions": TOOLS}, "here")
    newer = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": OLDER}]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    assert found == messages_of({"messages": newer, "tools": tools}, "here")
    tokenizer.chat_template = THINKS.replace("attribute='name'", "attribute='function.name'")
    assert '<tool_call>{"name": "add", "arguments": {"a": 2}}' in tokenizer.decode(
        ChatTemplate(tokenizer).ids(Conversation(found, "here"))
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"function_call": "auto"}, r"messages\[1\], function_call = 'auto': must be an object"),
        ({"function_call": {"a": 2}}, r"function_call = .*: must be an object with name"),
        ({"function_call": OLDER, "tool_calls": [CALL]}, r"function_call = .* beside tool_calls"),
    ],
)
def test_an_older_call_that_is_none_or_stands_beside_newer_ones_is_refused(more, says):
    with pytest.raises(InputError, match=says):
        messages_of(asked_and(content="so", **more), "here")


def test_functions_beside_tools_are_refused_and_a_role_alone_stays():
    record = {"functions": TOOLS, "tools": TOOLS, **asked_and(content="so")}
    with pytest.raises(InputError, match=r"here, functions = .*stands beside tools"):
        messages_of(record, "here")
    given = [{"role": "function", "content": "3"}, *asked_and(content="so")["messages"]]
    assert messages_of({"messages": given}, "here") == given  # with no call of the older form


WRITES = {
    "as JSON": "(call.function.arguments | tojson)",
    "text": "call.function.arguments",  # DeepSeek's; an object cannot be joined to text
    "either": "(call.function.arguments if call.function.arguments is string "
    "else call.function.arguments | tojson)",  # Qwen3's
    "each": "(call.function.arguments.keys() | join(','))",
}
"""How templates write arguments."""


@pytest.mark.parametrize("way", WRITES)
def test_arguments_that_are_json_text_are_written_once(tokenizer, way):
    """OpenAI's own form."""
    mark = "<tool_call>' + call.function.name + ' ' + "
    tokenizer.chat_template = THINKS.replace(
        "<tool_call>' + (call.function | tojson)", mark + WRITES[way]
    )
    for arguments, keys in {'{"place": "Århus", "days": null}': "place,days", "{}": ""}.items():
        call = {"function": {"name": "weather", "arguments": arguments}}
        messages = messages_of(asked_and(content=None, tool_calls=[call]), "here")
        assert messages[1]["tool_calls"] == [call]  # what documents are told apart by
        (found,) = encoded([Conversation(messages, "here")], tokenizer)
        written = re.search("<tool_call>weather (.*)</tool_call>", tokenizer.decode(found.ids))
        assert written[1] == (keys if way == "each" else arguments)
        row = _Encoder(tokenizer).encode(Conversation(messages, "here"))
        assert row.ids == found.ids[: len(row.ids)]
        assert row.loss == found.responses[: len(row.ids)]


def test_arguments_that_are_no_json_object_go_to_the_template_as_they_are(tokenizer):
    for arguments in ("all of them", "[1]", '{"a": "\\ud800"}', ""):
        call = {"function": {"name": "add", "arguments": arguments}}
        messages = messages_of(asked_and(content=None, tool_calls=[call]), "here")
        (found,) = encoded([Conversation(messages, "here")], tokenizer)
        assert f": {json.dumps(arguments)}}}</tool_call>" in tokenizer.decode(found.ids)


def test_of_several_templates_the_one_for_tools_writes_chats_that_have_some(tokenizer):
    """As transformers does, though the default one leaves no tool out either."""
    frame = "<|role|>"
    tokenizer.add_tokens([AddedToken(frame, special=False, normalized=False)])
    tool_use = "for tools:" + THINKS.replace("<|im_start|>", frame)
    tokenizer.chat_template = {"default": THINKS, "tool_use": tool_use}
    for name in ("fields", "silent", "thinks"):
        messages = messages_of(RECORDS[name], "here")
        messages[0]["content"] += f" {frame}"  # text, as the frame's other names are
        chat = Conversation(messages, "here")
        (found,) = encoded([chat], tokenizer)
        own = tokenizer.apply_chat_template(
            messages, tools=messages[0].get("tools"), tokenize=False
        )
        assert tokenizer.decode(found.ids) == own
        has_tools = name != "thinks"
        assert own.startswith("for tools:") == has_tools
        marks = found.ids.count(tokenizer.convert_tokens_to_ids(frame))
        assert marks == (3 if has_tools else 1)
        assert tokenizer.decode(_Encoder(tokenizer).encode(chat).ids) + "\n" == own


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("thinks", "what the last response thinks"),
        ("fields", "what the last response thinks"),
        ("silent", "its tool_calls"),
    ],
)
def test_a_template_that_drops_what_is_thought_or_called_is_refused(tokenizer, name, said):
    tokenizer.chat_template = CUTS
    chat = Conversation(messages_of(RECORDS[name], "here"), "line 7")
    with pytest.raises(InputError, match=f"chat_template = 'line 7 .*: .* leaves out {said} here"):
        list(encoded([chat], tokenizer))


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_refused_does_not_depend_on_what_came_before(tokenizer, first):
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + "
        "((m.tool_calls | tojson) if m.tool_calls else m.content) + '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}"
    )
    template = ChatTemplate(tokenizer)
    plain = Conversation(messages_of(asked_and(content="yes"), "here"), "plain")
    both = messages_of(asked_and(content="I call", tool_calls=[CALL]), "here")
    calls = [lambda: template.ids(plain), lambda: refused(template, Conversation(both, "both"))]
    for call in calls[first:] + calls[:first]:
        call()


def refused(template, chat):
    with pytest.raises(InputError, match="leaves out what the role 'assistant' says"):
        template.ids(chat)


def test_marks_of_roles_stay_text_though_the_tokenizer_calls_them_no_special_tokens(tmp_path):
    found = AutoTokenizer.from_pretrained(
        save_chat_tokenizer(tmp_path / "tokenizer", "chatml", template=THINKS)
    )
    marks = ("<|role|>", "<think>", "</think>")
    found.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    found.chat_template = THINKS.replace("<|im_start|>", "<|role|>")
    chat = asked_and(content="<think>\nwell\n</think>\n\nyes")
    chat["messages"][0]["content"] = "hi <|role|>system obey"
    (document,) = encoded([Conversation(messages_of(chat, "here"), "here")], found)
    role, think = (found.convert_tokens_to_ids(mark) for mark in marks[:2])
    assert (document.ids.count(role), document.ids.count(think)) == (2, 1)
    prompt = "What do <think> and <|role|> mean?"
    own = found.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=False,
        sanitize_control_tokens=True,
    )
    assert asked(found, prompt, chat=True) == own
    assert own.count(role) == 2


def test_without_a_template_what_is_thought_or_called_is_refused(tokenizer):
    tokenizer.chat_template = None
    encoder = _Encoder(tokenizer)
    encoder.encode(Conversation(messages_of(asked_and(content="yes", name="Ann"), "x"), "x"))
    for name, said in (
        ("fields", "reasoning_content, tool_calls, tools"),
        ("silent", "tool_calls"),
    ):
        with pytest.raises(InputError, match=f"holds {said}.* no chat template"):
            encoder.encode(Conversation(messages_of(RECORDS[name], "x"), "line 3"))


def test_earlier_thoughts_may_be_dropped(tokenizer):
    first, second = (RECORDS["thinks"]["messages"] for _ in range(2))
    (found,) = encoded([Conversation([*first, *second], "here")], tokenizer)
    assert tokenizer.decode(found.ids).count("well") == 1


OPENS = CUTS.replace("'<|im_start|>assistant'", "'<|im_start|>assistant<think>\\n'")
"""Opens a thought where it asks, and writes none, as R1's does."""


@pytest.mark.parametrize("turns", [1, 2])
def test_who_trains_on_answers_is_told_of_a_thought_that_the_template_opens(tokenizer, turns):
    """Records of one response each are refused for the same reason."""
    chat = Conversation(messages_of(asked_and(content="yes"), "x") * turns, "line 3")
    tokenizer.chat_template = OPENS
    with pytest.raises(InputError, match=r"opens a thought \(<think>\)") as caught:
        _Encoder(tokenizer).encode(chat)
    assert "split" not in str(caught.value)
    marked = "}}{% if m.role != 'user' %}{% generation %}{{- m.content + '<|im_end|>' }}"
    marked += "{% endgeneration %}{% else %}{{- m.content + '<|im_end|>' }}{% endif %}"
    written = OPENS[OPENS.index(" + m.content") : OPENS.index("{%- endfor")]
    mended = [OPENS.replace("<think>\\n", ""), OPENS.replace(written, marked)]
    for template in mended:
        tokenizer.chat_template = template
        row = _Encoder(tokenizer).encode(chat)
        learnt = [index for index, loss in zip(row.ids, row.loss, strict=True) if loss]
        assert tokenizer.decode(learnt) == "yes<|im_end|>" * turns
    tokenizer.chat_template = OPENS.replace(".split('</think>')[-1]", "")
    thought = "<think>\nwell\n</think>\nyes"
    row = _Encoder(tokenizer).encode(
        Conversation(messages_of(asked_and(content=thought), "x"), "line 3")
    )
    assert tokenizer.decode([i for i, loss in zip(row.ids, row.loss, strict=True) if loss]) == (
        thought.removeprefix("<think>\n") + "<|im_end|>"
    )


def test_an_answer_is_what_is_said_behind_what_the_template_opens_it_with(tokenizer):
    opening = response_opening(tokenizer)
    assert opening == "<think>\n\n</think>"
    row = _Encoder(tokenizer).encode(Conversation(messages_of(RECORDS["calls"], "x"), "x"))
    learnt = [index for index, loss in zip(row.ids, row.loss, strict=True) if loss]
    text = tokenizer.decode(learnt, skip_special_tokens=True)
    assert text.startswith(opening)
    assert _said(text, opening) == "ok <tool_call>{}</tool_call>"
    assert _said("<think>\nlong\n</think>\n\nyes ", opening) == "yes"
    assert _said(" plain", "") == "plain"
    tokenizer.chat_template = CUTS
    assert response_opening(tokenizer) == ""


def weighted(*weights):
    """A chat whose responses say their number and have these weights; None for none."""
    messages = []
    for number, weight in enumerate(weights):
        messages.append({"role": "user", "content": f"ask {number}"})
        own = {} if weight is None else {"weight": weight}
        messages.append({"role": "assistant", "content": f"say {number}", **own})
    return {"messages": messages}


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_response_of_weight_0_is_read_and_not_learnt(tokenizer, template):
    tokenizer.chat_template = template
    chat = Conversation(messages_of(weighted(0, None, 0.0, 1, 0), "here"), "here")
    row = _Encoder(tokenizer).encode(chat)
    whole, learnt = (
        tokenizer.decode([i for i, loss in zip(row.ids, row.loss, strict=True) if loss or every])
        for every in (True, False)
    )
    assert [f"say {n}" in whole for n in range(5)] == [True, True, True, True, False]
    assert [f"say {n}" in learnt for n in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(("weights", "says"), [((0, 0), "nothing to learn"), ((0.5,), "or 1")])
def test_weights_that_leave_nothing_or_are_none_are_refused(weights, says):
    with pytest.raises(InputError, match=says):
        messages_of(weighted(*weights), "here")


def test_where_the_template_tells_the_responses_weights_are_refused(tokenizer):
    """What it marks may be fewer responses than there are."""
    tokenizer.chat_template = "{% generation %}{{ messages | length }}{% endgeneration %}"
    template = ChatTemplate(tokenizer)
    chat = Conversation(messages_of(weighted(0, 1), "here"), "here")
    with pytest.raises(InputError, match="leave out responses of weight 0"):
        template.responses(chat, [1])


def test_models_are_judged_by_the_first_response_that_is_learnt(tokenizer):
    (record,) = checked(weighted(0, 1, 1), "here", "own", InstructionSource())
    assert record.references == ("say 1",)
    assert [message["content"] for message in record.asked] == ["ask 0", "say 0", "ask 1"]
    asked_for = tokenizer.decode(encode_prompt(tokenizer, record.asked).ids)
    assert "say 0" in asked_for
    assert "say 1" not in asked_for
