"""A byte-level BPE tokenizer for recipes whose seed model brings none."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from upcycle_core.corpora.config import TokenizerConfig
from upcycle_core.corpora.reader import read_documents
from upcycle_core.progress import Progress, Silent

END = "<|endoftext|>"
"""Ends a document; also the beginning-of-sequence token."""
PAD = "<|pad|>"


def train_tokenizer(
    documents: Mapping[str, Path],
    out: Path,
    *,
    config: TokenizerConfig,
    progress: Progress | None = None,
) -> None:
    """Train a tokenizer on equal parts of each domain and save it for ``AutoTokenizer``.

    Args:
        documents: Training text, ``train.parquet`` of ``write_documents``, by domain.
        out: Directory for tokenizer.json and tokenizer_config.json.
        config: Size of the vocabulary and bytes read per domain.
        progress: Hears of the beginning and the end.
    """
    progress = progress or Silent()
    progress.start("training the tokenizer", 1, "vocabularies")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary_size,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (
        text
        for domain in sorted(documents)
        for text in _first(documents[domain], config.bytes_per_domain)
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(out)
    _name_class_for_older_readers(out / "tokenizer_config.json")
    progress.advance()


def _first(path: Path, size: int) -> Iterator[str]:
    """Documents until ``size`` UTF-8 bytes are reached."""
    read = 0
    for text in read_documents(path):
        if read >= size:
            return
        yield text
        read += len(text.encode())


def _name_class_for_older_readers(path: Path) -> None:
    """transformers 5 saves a class name that transformers 4 does not know; both know this one."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
