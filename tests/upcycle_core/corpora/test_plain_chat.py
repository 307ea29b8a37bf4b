"""Without a chat template: tuned, judged and asked in one form, token by token."""

import json
from types import SimpleNamespace

import pytest
from chat import LLAMA3, save_chat_tokenizer
from transformers import AutoTokenizer

from infra.tracking.upcycle_serving import Generator
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.encoding import asked
from upcycle_core.corpora.instructions import InstructionRows, encode_prompt
from upcycle_core.corpora.plain_chat import form_in_words, name_plain_form
from upcycle_core.evaluation.instructions.answers import encode_prompts

PROMPT = "What is two\nand two?"
USER, RESPONSE = {"role": "user", "content": PROMPT}, {"role": "assistant", "content": "Four"}
SETTINGS = [
    (kind, bos) for kind in ("chatml", "llama3") for bos in ("auto", "always", "never")
]  # the first puts nothing before a text of its own accord


def row_of(directory, messages, bos):
    """Ids of a training row, and where its first response begins."""
    file = directory.parent / "a.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    rows = InstructionRows([file], directory, sequence_length=256, count=1, seed=0, bos=bos)
    mask, labels = rows[0]["attention_mask"].bool(), rows[0]["labels"]
    return rows[0]["input_ids"][mask].tolist(), int((labels != -100).nonzero()[0])


def by_hand(directory, kind, bos, *texts):
    """The ids of texts one by one; ``None`` is the end token."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    first = {"always": True, "never": False, "auto": kind == "llama3"}[bos]
    ids = [tokenizer.bos_token_id] if first else []
    for text in texts:
        ids += (
            [tokenizer.eos_token_id]
            if text is None
            else tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        )
    return ids


def served(directory, prompt, bos):
    """Ids as MLflow's function asks for an answer, and as ``flows.generate`` and the page do."""
    generator = Generator.__new__(Generator)
    generator.tokenizer, generator.bos = AutoTokenizer.from_pretrained(directory), bos
    generator.model = SimpleNamespace(device="cpu")
    ids = generator._ids(prompt, chat=True)[0].tolist()
    return [ids, asked(load_tokenizer(directory), prompt, bos=bos, chat=True)]


@pytest.mark.parametrize(("kind", "bos"), SETTINGS)
def test_a_model_is_served_in_the_form_in_which_it_was_tuned_and_judged(tmp_path, kind, bos):
    directory = save_chat_tokenizer(tmp_path / "model", kind, template=None)
    expected = by_hand(directory, kind, bos, f"{PROMPT}\n\n")
    ids, start = row_of(directory, [USER, RESPONSE], bos)
    assert ids == [*expected, *by_hand(directory, kind, "never", "Four", None)]
    assert ids[:start] == expected
    (judged,) = encode_prompts(
        load_tokenizer(directory), [{"prompt": PROMPT}], max_prompt_tokens=99, bos=bos
    ).ids
    assert judged == expected
    name_plain_form(directory, bos)
    assert served(directory, PROMPT, bos) == [expected, expected]
    assert encode_prompt(directory, PROMPT, bos=bos).ids == expected


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
def test_a_special_token_s_name_is_tuned_and_served_as_the_same_text(tmp_path, kind):
    directory = save_chat_tokenizer(tmp_path / "model", kind, template=None)
    named = AutoTokenizer.from_pretrained(directory)
    prompt = f"say {named.eos_token}, {named.bos_token} and so on"
    expected = encode_prompt(directory, prompt, bos="never").ids
    assert not {named.eos_token_id, named.bos_token_id} & set(expected)
    assert named.decode(expected) == f"{prompt}\n\n"
    name_plain_form(directory, "never")
    assert served(directory, prompt, "never") == [expected, expected]


@pytest.mark.parametrize(("kind", "bos"), SETTINGS)
def test_tuning_again_what_was_tuned_changes_no_row(tmp_path, kind, bos):
    directory = save_chat_tokenizer(tmp_path / "model", kind, template=None)
    said = [{"role": "system", "content": "Be short."}, USER, RESPONSE, USER, RESPONSE]
    before = row_of(directory, said, bos)
    follows = ("Four", None, f"{PROMPT}\n\n", "Four", None)
    ids = by_hand(directory, kind, bos, f"Be short.\n\n{PROMPT}\n\n", *follows)
    assert before[0] == ids
    name_plain_form(directory, bos)
    assert row_of(directory, said, bos) == before
    text = AutoTokenizer.from_pretrained(directory).apply_chat_template(said, tokenize=False)
    assert text == AutoTokenizer.from_pretrained(directory).decode(ids)
    assert "without roles" in form_in_words(directory)


def test_a_template_of_its_own_stays(tmp_path):
    directory = save_chat_tokenizer(tmp_path / "model", "llama3")
    name_plain_form(directory, "auto")
    assert load_tokenizer(directory).chat_template == LLAMA3
    assert "without roles" not in form_in_words(directory)


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
def test_with_a_template_too_the_recipe_s_bos_stands_before_what_is_tuned(tmp_path, kind):
    directory = save_chat_tokenizer(tmp_path / "model", kind)
    expected = asked(load_tokenizer(directory), PROMPT, bos="always", chat=True)
    ids, start = row_of(directory, [USER, RESPONSE], "always")
    assert ids[:start] == expected
    assert ids.count(ids[0]) == 1
    assert encode_prompt(directory, PROMPT, bos="always").ids == expected
