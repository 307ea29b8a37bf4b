import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
from transformers import AutoTokenizer

from infra.readers.to_gguf import pre_tokenizer
from upcycle_core.corpora import tokenizer as room
from upcycle_core.corpora.config import TokenizerConfig
from upcycle_core.corpora.tokenizer import train_tokenizer

TEXTS = [f"def f{n}(x):\n    return x + {n}  # café\n\n" * 20 for n in range(50)]


@pytest.fixture
def documents(tmp_path):
    found = {}
    for name, texts in {"code": TEXTS, "prose": ["The quick brown fox. " * 30] * 50}.items():
        (tmp_path / name).mkdir()
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name / "train.parquet")
        found[name] = tmp_path / name / "train.parquet"
    return found


def trained(documents, out, **options):
    config = TokenizerConfig(**{"vocabulary_size": 330, **options})
    train_tokenizer(documents, out, config=config)
    return AutoTokenizer.from_pretrained(out)


def test_llama_cpp_knows_how_it_splits_text(documents, tmp_path):
    trained(documents, tmp_path / "out")
    assert pre_tokenizer(json.loads((tmp_path / "out" / "tokenizer.json").read_text())) == "gpt-2"


def test_any_text_survives_a_round_trip(documents, tmp_path):
    tokenizer = trained(documents, tmp_path / "out")
    assert len(tokenizer) == 330
    for text in [
        TEXTS[0],
        " leading",
        "trailing  ",
        "don't , .",
        "\x00\t\r\n",
        "日本語 🦊 é e\u0301",
        "",
    ]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_have_their_roles(documents, tmp_path):
    tokenizer = trained(documents, tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|endoftext|>",
        "<|endoftext|>",
        "<|pad|>",
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    assert tokenizer("x")["input_ids"] == tokenizer("x", add_special_tokens=False)["input_ids"]


def test_the_saved_class_is_known_to_older_readers(documents, tmp_path):
    trained(documents, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_every_domain_is_read_up_to_the_same_size(documents, tmp_path, monkeypatch):
    read = []

    def counted(path):
        for text in parquet.read_table(path)["text"].to_pylist():
            read.append((path.parent.name, len(text.encode())))
            yield text

    monkeypatch.setattr(room, "read_documents", counted)
    trained(documents, tmp_path / "out", bytes_per_domain=5000)
    for name in documents:
        sizes = [size for domain, size in read if domain == name]
        assert sum(sizes[:-1]) >= 5000 > sum(sizes[:-2])  # the last was looked at, not used


def test_training_gives_the_same_bytes_for_any_number_of_threads(documents, tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from upcycle_core.corpora.config import TokenizerConfig\n"
        "from upcycle_core.corpora.tokenizer import train_tokenizer\n"
        "root = Path(sys.argv[1])\n"
        "documents = {n: root / n / 'train.parquet' for n in ('prose', 'code')}\n"
        "config = TokenizerConfig(vocabulary_size=330)\n"
        "train_tokenizer(documents, Path(sys.argv[2]), config=config)\n"
    )
    for threads in ("1", "3"):
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), str(tmp_path / threads)],
            check=True,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "RAYON_NUM_THREADS": threads},
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes()
