"""What the harness gives the model: the ids that statistics and training have."""

import json

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.chat import CHATML, save_chat_tokenizer
from tests.forms import change_json
from tests.pico import VOCABULARY, save_pico
from upcycle_core.corpora.conversations import Conversation
from upcycle_core.corpora.encoding import encoded
from upcycle_core.evaluation.tasks.adapter import _load_model
from upcycle_core.evaluation.tasks.config import TaskEvaluationConfig

SAID = [{"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "Two."}]


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_texts_and_chats_are_the_ids_that_they_are_elsewhere(tmp_path, kind, bos):
    save_chat_tokenizer(save_pico(tmp_path, vocab_size=400), kind)
    model = _load_model(tmp_path, TaskEvaluationConfig(batch_size=1), bos, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (text,) = encoded(["The court held."], tokenizer, bos=bos)
    assert model.tok_encode("The court held.") == text.ids
    batch, _ = model.tok_batch_encode(["The court held."])
    assert batch[0].tolist() == text.ids
    assert_chats_are_asked_as_trained_on(tmp_path, bos)


@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_a_template_that_writes_no_beginning_gets_none_from_the_tokenizer(tmp_path, bos):
    """Of a tokenizer that puts one before texts."""
    save_chat_tokenizer(save_pico(tmp_path, vocab_size=400), "llama3", template=CHATML)
    assert_chats_are_asked_as_trained_on(tmp_path, bos)


def assert_chats_are_asked_as_trained_on(folder, bos):
    config = TaskEvaluationConfig(chat_template=True, batch_size=1)
    model = _load_model(folder, config, bos, "cpu")
    (chat,) = encoded([Conversation(SAID, "here")], AutoTokenizer.from_pretrained(folder), bos=bos)
    prompt = model.apply_chat_template(SAID[:1])
    ids = model.tok_encode(prompt)
    assert ids == chat.ids[: len(ids)]
    batch, _ = model.tok_batch_encode([prompt])
    assert batch[0].tolist() == ids
    assert len(ids) > 5


def test_likelihoods_of_bf16_weights_are_added_up_in_fp32(tmp_path):
    save_chat_tokenizer(save_pico(tmp_path, vocab_size=400), "chatml")
    config = TaskEvaluationConfig(batch_size=1, precision="bf16")
    model = _load_model(tmp_path, config, "auto", "cpu")
    context, answer = "The court held.", " A contract needs an offer and acceptance. " * 8
    asked = Instance(request_type="loglikelihood", doc={}, arguments=(context, answer), idx=0)
    ((found, _),) = model.loglikelihood([asked])
    before, after = model._encode_pair(context, answer)
    ids_1S = torch.tensor([[*before, *after]])
    with torch.no_grad():
        logs = model.model(ids_1S[:, :-1]).logits[0].double().log_softmax(-1)
    whole = logs[len(before) - 1 :].gather(1, torch.tensor(after)[:, None]).sum()
    assert found == pytest.approx(float(whole), rel=1e-4)


@pytest.mark.parametrize("ends", [0, [0, 2]])
def test_answers_of_every_row_end_where_the_template_ends_them(tmp_path, ends):
    """A dense model of a seed that ends texts otherwise names the end of a chat nowhere."""
    save_chat_tokenizer(save_pico(tmp_path, vocab_size=400, eos_token_id=ends), "chatml")
    config = tmp_path / "tokenizer_config.json"
    told = json.loads(config.read_text()) | {"eos_token": "<|endoftext|>"}
    config.write_text(json.dumps(told))
    assert AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("<|im_end|>") == 2

    def said(**how):
        """What a model says that could go on to the fifth token, and says the second at once."""
        model = _load_model(tmp_path, TaskEvaluationConfig(batch_size=1, **how), "auto", "cpu")
        ids = torch.tensor([[5, 6, 7]])
        others = [token for token in range(400) if token != 2]
        written = model.model.generate(ids, max_new_tokens=5, suppress_tokens=others)
        return written[0, 3:].tolist()

    assert said(chat_template=True) == said(chat_template=False) == [2]
    config.write_text(json.dumps({k: v for k, v in told.items() if k != "chat_template"}))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert said() == ([2] if ends != 0 else [2] * 5)


def test_prompts_are_padded_with_a_token_that_the_model_has(tmp_path):
    """Settings that name another one have transformers add it behind all rows of the embedding."""
    save_pico(tmp_path)
    how = {"until": [], "max_gen_toks": 4, "do_sample": False}
    asked = [
        Instance(request_type="generate_until", doc={}, arguments=(text, how), idx=i)
        for i, text in enumerate(("two", "two and two", "a much longer one"))
    ]

    def said():
        config = TaskEvaluationConfig(batch_size=3)
        return _load_model(tmp_path, config, "auto", "cpu").generate_until(asked)

    before = said()
    change_json(tmp_path / "tokenizer_config.json", pad_token="[PAD]")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.pad_token_id == VOCABULARY
    assert said() == before


@pytest.mark.parametrize(("kind", "bos"), [("llama3", "auto"), ("chatml", "always")])
def test_likelihood_of_a_text_is_that_behind_one_beginning(tmp_path, kind, bos):
    save_chat_tokenizer(save_pico(tmp_path, vocab_size=400), kind)
    model = _load_model(tmp_path, TaskEvaluationConfig(batch_size=2), bos, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_pretrained(tmp_path)
    texts = ["The court held.", "A contract needs an offer and acceptance."]
    asked = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=i)
        for i, text in enumerate(texts)
    ]
    for text, found in zip(texts, model.loglikelihood_rolling(asked), strict=True):
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids_1S = torch.tensor([[tokenizer.bos_token_id, *plain]])
        with torch.no_grad():
            logs = network(ids_1S).logits.log_softmax(-1)[0, :-1]
        whole = logs.gather(1, ids_1S[0, 1:, None]).sum()
        assert found == pytest.approx(float(whole), rel=1e-5)
    assert model.tok_encode(texts[0])[0] == tokenizer.bos_token_id  # other requests are as before


def test_a_template_that_writes_the_date_asks_the_same_every_day(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
    save_chat_tokenizer(save_pico(tmp_path, vocab_size=400), "chatml", template=template)
    config = TaskEvaluationConfig(chat_template=True, batch_size=1)
    model = _load_model(tmp_path, config, "auto", "cpu")
    prompt = model.apply_chat_template(SAID[:1])
    assert prompt.startswith("26 Jul 2024\n<|im_start|>user")
    [chat] = encoded([Conversation(SAID, "here")], AutoTokenizer.from_pretrained(tmp_path))
    ids = model.tok_encode(prompt)
    assert ids == chat.ids[: len(ids)]
