"""Documents as token ids on disk, memory-mapped.

Documents are stored without special tokens: packing puts the end token between them, statistics and
evaluation read each one alone.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.corpora.config import SPLITS
from upcycle_core.corpora.reader import TokenCorpus, read_documents
from upcycle_core.errors import Fault, InputError
from upcycle_core.progress import Progress, Silent

DOCUMENTS_AT_ONCE = 256
"""Documents tokenised in one call: enough to keep all threads busy."""


def write_corpus(
    documents: Path, tokenizer: Path, out: Path, *, progress: Progress | None = None
) -> None:
    """Tokenise every split of a domain.

    Args:
        documents: Directory written by ``write_documents``.
        tokenizer: Directory that ``AutoTokenizer`` loads.
        out: Fresh directory for ``<split>/`` and ``manifest.json``: documents, tokens, bytes and
            sha256 per split, and what ``documents`` says about its sources.
        progress: Told of each document.

    Raises:
        InputError: The tokenizer has no end-of-sequence token.
    """
    progress = progress or Silent()
    encoder = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    if encoder.eos_token_id is None:
        remedy = "it has no end-of-sequence token to put between documents; set its eos_token"
        raise InputError(Fault("tokenizer", str(tokenizer), remedy))
    manifest = json.loads((documents / "manifest.json").read_text(encoding="utf-8"))
    for split in (split for split in SPLITS if split in manifest["splits"]):
        facts = manifest["splits"][split]
        progress.start(f"tokens of {split}", facts["documents"], "documents")
        write_split(
            out / split,
            encoded(read_documents(documents / f"{split}.parquet"), encoder, progress),
            eos_id=encoder.eos_token_id,
            vocabulary_size=max(encoder.get_vocab().values()) + 1,
        )
        corpus = TokenCorpus(out / split)
        facts["tokens"] = len(corpus.tokens)
        facts["sha256"] = sha256_file(out / split / "tokens.bin")
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    (out / "manifest.json").write_text(text + "\n", encoding="utf-8")


def write_split(
    directory: Path,
    documents: Iterable[tuple[Sequence[int], int]],
    *,
    eos_id: int,
    vocabulary_size: int,
) -> None:
    """Write documents as a split that ``TokenCorpus`` reads, one at a time.

    Args:
        directory: Fresh directory for tokens.bin, offsets.npy, bytes.npy and split.json.
        documents: Token ids and UTF-8 bytes of each document.
        eos_id: The token that packing puts after each document.
        vocabulary_size: V; decides between uint16 and uint32.
    """
    directory.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")
    lengths, sizes = [0], [0]
    with (directory / "tokens.bin").open("wb") as file:
        for ids, size in documents:
            file.write(np.asarray(ids, dtype=dtype).tobytes())
            lengths.append(len(ids))
            sizes.append(size)
    np.save(directory / "offsets.npy", np.cumsum(lengths, dtype=np.int64))
    np.save(directory / "bytes.npy", np.cumsum(sizes, dtype=np.int64))
    facts = {"dtype": dtype.str, "eos_id": eos_id, "vocabulary_size": vocabulary_size}
    (directory / "split.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def encoded(
    texts: Iterable[str], encoder: PreTrainedTokenizerBase, progress: Progress | None = None
) -> Iterator[tuple[list[int], int]]:
    """Token ids and UTF-8 bytes of each text, as ``write_split`` takes them.

    Nothing special is added, and a special token's name in a text stays ordinary text.
    """
    texts, progress = iter(texts), progress or Silent()
    while batch := list(islice(texts, DOCUMENTS_AT_ONCE)):
        ids = encoder(
            batch,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        for text, document in zip(batch, ids, strict=True):
            progress.advance()
            yield document, len(text.encode())
