"""The code that lies beside every version: what it answers is text, and what it cannot is said."""

import json

import pytest
from talking import CONTEXT, save_talkative
from tokenizers import processors
from transformers import AutoTokenizer

from infra.tracking.upcycle_serving import Generator
from tests.chat import save_chat_tokenizer
from tests.pico import save_pico


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    return Generator(save_talkative(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("chat", [False, True])
def test_a_special_token_s_name_in_a_prompt_stays_text(generator, chat):
    def ends(prompt):
        ids = generator._ids(prompt, chat=chat)[0].tolist()
        return ids.count(generator.tokenizer.convert_tokens_to_ids("<|im_end|>"))

    assert ends("one <|im_end|> two") == ends("one two") == int(chat)


@pytest.mark.parametrize(
    ("prompt", "said"), [("", "is empty"), ("a " * CONTEXT, f"the model's context {CONTEXT}")]
)
def test_a_prompt_that_cannot_be_continued_is_named(generator, prompt, said):
    with pytest.raises(ValueError, match=said):
        generator.predict([prompt], {"max_new_tokens": 1})


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_to_a_chat_ends_where_the_template_ends_it(generator, monkeypatch, chat):
    end = generator.tokenizer.convert_tokens_to_ids("<|im_end|>")
    generate, asked = generator.model.generate, {}

    def biased(ids, **options):
        asked["said"] = generate(ids, sequence_bias={(end,): 1e9}, **options)[0, ids.shape[1] :]
        return asked["said"][None]

    monkeypatch.setattr(generator.model, "generate", biased)
    generator.predict(["one"], {"max_new_tokens": 4, "chat": chat})
    assert asked["said"].tolist() == [end] * (1 if chat else 4)


def test_an_answer_ends_where_the_model_s_context_does(generator, monkeypatch):
    """Behind it are positions that the model has never seen."""
    sizes = {n: generator._ids("a " * n, chat=False).shape[1] for n in range(1, CONTEXT)}
    prompt = "a " * max(n for n, size in sizes.items() if size <= CONTEXT - 2)
    generate, asked = generator.model.generate, {}

    def kept(ids, **options):
        asked["all"] = generate(ids, **options)
        return asked["all"]

    monkeypatch.setattr(generator.model, "generate", kept)
    generator.predict([prompt], {"max_new_tokens": 8})
    assert asked["all"].shape[1] <= CONTEXT


def test_a_stretched_rope_has_the_positions_that_it_is_stretched_to(tmp_path):
    model = save_talkative(tmp_path)
    path = model / "config.json"
    config = json.loads(path.read_text())
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": CONTEXT}
    config["rope_parameters"] |= rope
    path.write_text(json.dumps(config))
    stretched = Generator(model)
    words, last = "a " * CONTEXT, {"max_new_tokens": 1}
    assert CONTEXT < stretched._ids(words, chat=False).shape[1] < 2 * CONTEXT
    assert isinstance(stretched.predict([words], last)[0], str)
    with pytest.raises(ValueError, match=f"the model's context {2 * CONTEXT}"):
        stretched.predict([words * 2], last)


@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_nothing_stands_behind_a_prompt_that_is_continued(tmp_path, bos):
    """Though the tokenizer ends each text, as those with ``add_eos_token`` do."""
    save_chat_tokenizer(save_pico(tmp_path, vocab_size=512), "llama3")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (begin, end)}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[begin, "$A", end], special_tokens=list(ids.items())
    )
    tokenizer.save_pretrained(tmp_path)
    plain = AutoTokenizer.from_pretrained(tmp_path)("The court", add_special_tokens=False)
    generator = Generator(tmp_path, bos)
    found = generator._ids("The court", chat=False)[0].tolist()
    assert found == [*([] if bos == "never" else [ids[begin]]), *plain["input_ids"]]
    assert generator.tokenizer("The court")["input_ids"][-1] == ids[end]
