"""The code that lies beside every version: what it answers is text, and what it cannot is said."""

import pytest
from talking import CONTEXT, save_talkative

from infra.tracking.upcycle_serving import Generator


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
