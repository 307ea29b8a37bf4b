"""Another model's scores on this run's text, where its tokenizer is another one."""

import pytest
from chat import save_chat_tokenizer
from pico import save_pico

from tasks.scoring.evaluation import stranger_piece
from upcycle_core.errors import InputError
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.progress import Silent


def test_responses_are_not_compared_across_tokenizers(tmp_path):
    model = save_pico(tmp_path / "model")
    with pytest.raises(InputError, match=r"evaluation\.loss = 'responses': .*another tokenizer"):
        stranger_piece(
            out=tmp_path / "out",
            progress=Silent(),
            model=model,
            tokenizer=save_chat_tokenizer(tmp_path / "tokenizer", "chatml"),
            documents={},
            corpora={},
            reference={},
            bos="auto",
            config=EvaluationConfig(loss="responses"),
            device="cpu",
        )
