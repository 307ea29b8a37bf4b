"""What an engine's room is compared with: all tokens of a prompt, whatever its tokenizer keeps."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from infra.serving.engine import Engine
from tests.pico import save_pico_tokenizer


@pytest.mark.parametrize("text", ["a", "a" * 50])
def test_tokens_are_counted_without_the_tokenizer_s_own_limits(tmp_path, text):
    path = save_pico_tokenizer(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path))
    engine = Engine(SimpleNamespace(tokenizer=path), client=None)
    assert engine.count_tokens(text) == len(text)
