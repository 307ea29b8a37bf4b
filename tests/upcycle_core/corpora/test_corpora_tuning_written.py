"""Instructions that a tokenizer refuses are found before anything is trained on them."""

import json
from dataclasses import replace

import pytest
from chat import save_chat_tokenizer

from upcycle_core.corpora.tuning.config import InstructionsConfig, InstructionSource
from upcycle_core.corpora.tuning.prepare import instruction_faults, prepare_instructions
from upcycle_core.errors import InputError

NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
)
ONE_TURN = "{% if messages | length > 2 %}{{ raise_exception('one turn alone') }}{% endif %}"
NO_ODD = "{% if 'odd' in messages[0]['content'] %}{{ raise_exception('odd') }}{% endif %}"
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def said(number, *roles):
    """A conversation whose roles speak in turn."""
    messages = [{"role": role, "content": f"{role} {number} {i}"} for i, role in enumerate(roles)]
    return {"messages": messages}


PLAIN, SYSTEM = ("user", "assistant"), ("system", "user", "assistant")


def config_of(path, trained, judged, **source):
    """``trained`` and ``judged`` are records; the second are of a category that is held out."""
    rows = [{**row, "category": "c"} for row in trained]
    rows += [{**row, "category": "u"} for row in judged]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = source or {"files": (str(path),)}
    return InstructionsConfig(sources={"talks": InstructionSource(**source)}, unseen=("u",))


def faults_of(config, tokenizer):
    return [str(f) for f in instruction_faults(config, folder=None, tokenizer=tokenizer)]


def test_a_role_that_the_template_refuses_is_named_before_any_training(tmp_path):
    tokenizer = save_chat_tokenizer(tmp_path / "chat", "chatml", template=NO_SYSTEM + TURNS)
    config = config_of(
        tmp_path / "a.jsonl",
        [said(i, *PLAIN) for i in range(20)],
        [said(i, *SYSTEM) for i in range(20)],
    )
    (fault,) = faults_of(config, tokenizer)
    assert fault.startswith("instructions.sources.talks = 'user 0 1'")
    assert "refuses it (no system here)" in fault
    assert instruction_faults(config, folder=None) == []


def test_records_that_nobody_is_trained_on_or_judged_by_are_not_tried(tmp_path):
    tokenizer = save_chat_tokenizer(tmp_path / "chat", "chatml", template=NO_SYSTEM + TURNS)
    plain = [said(i, *PLAIN) for i in range(20)]
    config = config_of(tmp_path / "a.jsonl", plain, plain[:9])
    other = [{**said(i, *SYSTEM), "category": "other"} for i in range(9)]
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in other))
    assert faults_of(config, tokenizer)
    assert faults_of(replace(config, train_categories=("c",)), tokenizer) == []


def test_a_later_turn_matters_where_it_is_trained_on_alone(tmp_path):
    tokenizer = save_chat_tokenizer(tmp_path / "chat", "chatml", template=ONE_TURN + TURNS)
    short, long = ([said(10 * n + i, *PLAIN * n) for i in range(9)] for n in (1, 2))
    assert faults_of(config_of(tmp_path / "a.jsonl", short, long), tokenizer) == []
    (fault,) = faults_of(config_of(tmp_path / "a.jsonl", long, short), tokenizer)
    assert "one turn alone" in fault


def test_of_a_dataset_the_first_record_is_tried(tmp_path):
    tokenizer = save_chat_tokenizer(tmp_path / "chat", "chatml", template=NO_SYSTEM + TURNS)
    (tmp_path / "set").mkdir()
    file = tmp_path / "set" / "train.jsonl"
    config = config_of(file, [said(0, *SYSTEM)], [], dataset=str(tmp_path / "set"))
    (fault,) = faults_of(config, tokenizer)
    assert "no system here" in fault


def test_all_that_is_judged_by_is_tried_when_it_is_drawn(tmp_path):
    """Nothing but reading them all finds what a text, and no role, makes a template refuse."""
    tokenizer = save_chat_tokenizer(tmp_path / "chat", "chatml", template=NO_ODD + TURNS)
    judged = [said(i, *PLAIN) for i in range(30)]
    for row in judged[20:]:
        row["messages"][0]["content"] += " odd"
    config = config_of(tmp_path / "a.jsonl", [said(i + 99, *PLAIN) for i in range(9)], judged)
    assert faults_of(config, tokenizer) == []
    with pytest.raises(InputError, match="refuses it \\(odd\\)") as error:
        prepare_instructions(config, tmp_path / "out", seed=0, tokenizer=tokenizer)
    assert len(error.value.faults) == 6
    assert "5 more" in str(error.value.faults[-1])
    prepare_instructions(config, tmp_path / "out", seed=0)
