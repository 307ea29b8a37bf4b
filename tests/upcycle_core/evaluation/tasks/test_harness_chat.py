"""What the harness gives the model: the ids that statistics and training have."""

import pytest
from transformers import AutoTokenizer

from tests.chat import save_chat_tokenizer
from tests.pico import save_pico
from upcycle_core.corpora.conversations import Conversation
from upcycle_core.corpora.encoding import encoded
from upcycle_core.evaluation.tasks.adapter import _load_model
from upcycle_core.evaluation.tasks.config import TaskEvaluationConfig

SAID = [{"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "Two."}]


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_texts_and_chats_are_the_ids_that_they_are_elsewhere(tmp_path, kind, bos):
    save_chat_tokenizer(save_pico(tmp_path, vocab_size=400), kind)
    config = TaskEvaluationConfig(chat_template=True, batch_size=1)
    model = _load_model(tmp_path, config, bos, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text, chat = encoded(["The court held.", Conversation(SAID, "here")], tokenizer, bos=bos)
    assert model.tok_encode("The court held.") == text.ids
    batch, _ = model.tok_batch_encode(["The court held."])
    assert batch[0].tolist() == text.ids
    prompt = model.apply_chat_template(SAID[:1])
    ids = model.tok_encode(prompt)
    assert ids == chat.ids[: len(ids)]
    assert len(ids) > 5
