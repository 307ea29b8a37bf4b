"""Documents as token ids on disk, memory-mapped.

Packing puts the end token between documents; statistics and evaluation read each one alone.
"""

import json
from array import array
from collections.abc import Iterable, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.chat_template import Encoded
from upcycle_core.corpora.config import SPLITS, Bos
from upcycle_core.corpora.encoding import encoded
from upcycle_core.corpora.reader import TokenCorpus, read_chats
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.progress import Progress, Silent


def write_corpus(
    documents: Path,
    tokenizer: Path,
    out: Path,
    *,
    bos: Bos = "auto",
    progress: Progress | None = None,
) -> None:
    """Tokenise every split of a domain.

    Args:
        documents: Directory written by ``write_documents``.
        tokenizer: Directory of its files.
        out: Fresh directory for ``<split>/`` and ``manifest.json``: documents, tokens, bytes and
            sha256 per split, and what ``documents`` says about its sources.
        bos: Whether a beginning-of-sequence token stands before each document.
        progress: Told of each document.

    Raises:
        InputError: As ``write_encoded``.
    """
    progress = progress or Silent()
    encoder = load_tokenizer(tokenizer)
    manifest = json.loads((documents / "manifest.json").read_text(encoding="utf-8"))
    for split in (split for split in SPLITS if split in manifest["splits"]):
        facts = manifest["splits"][split]
        progress.start(f"tokens of {split}", facts["documents"], "documents")
        write_encoded(
            out / split,
            documents / f"{split}.parquet",
            encoder,
            bos=bos,
            is_scored=split == "heldout",
            progress=progress,
        )
        corpus = TokenCorpus(out / split)
        facts["tokens"] = len(corpus.tokens)
        facts["sha256"] = sha256_file(out / split / "tokens.bin")
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    (out / "manifest.json").write_text(text + "\n", "utf-8", "backslashreplace")


def write_encoded(
    directory: Path,
    documents: Path,
    encoder: Any,
    *,
    bos: Bos = "auto",
    is_scored: bool = False,
    progress: Progress | None = None,
) -> None:
    """Tokenise one split of a domain.

    Args:
        directory: As for ``write_split``.
        documents: The split's Parquet file.
        encoder: The tokenizer, loaded.
        bos: Whether a beginning-of-sequence token stands before each document.
        is_scored: Whether models are scored on it: what stands before its texts is told then.
        progress: Told of each document.

    Raises:
        InputError: See ``end_faults`` and ``encoding.encoded``.
    """
    raise_faults(end_faults(encoder))
    texts = encoded(read_chats(documents), encoder, bos=bos, progress=progress)
    write_split(
        directory,
        texts if is_scored else (text._replace(prefix=0) for text in texts),
        eos_id=encoder.eos_token_id,
        vocabulary_size=max(encoder.get_vocab().values()) + 1,
    )


def end_faults(encoder: Any, *, field: str = "tokenizer") -> list[Fault]:
    """What keeps a loaded tokenizer from ending documents; ``field`` is its name in the recipe."""
    if encoder.eos_token_id is not None:
        return []
    remedy = "it has no end-of-sequence token to put between documents; set its eos_token"
    return [Fault(field, encoder.name_or_path, remedy)]


def write_split(
    directory: Path,
    documents: Iterable[tuple[Sequence[int], int] | Encoded],
    *,
    eos_id: int,
    vocabulary_size: int,
) -> None:
    """Write documents as a split that ``TokenCorpus`` reads, one at a time.

    Args:
        directory: Fresh directory for tokens.bin, offsets.npy, bytes.npy and split.json; of chats
            responses.bin, too, a byte a token.
        documents: Token ids and UTF-8 bytes of each document; of chats, the responses; the ids
            before each text, which split.json tells where there are any. Where chats end in a
            response without an end token, it tells the end tokens of the others.
        eos_id: The token that packing puts after each document.
        vocabulary_size: V; decides between uint16 and uint32.
    """
    directory.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")
    lengths, sizes, unmarked, prefixes = array("q", [0]), array("q", [0]), 0, set[int]()
    ends, is_open = set[int](), False
    marks = directory / "responses.bin"
    with (directory / "tokens.bin").open("wb") as file, marks.open("wb") as responses:
        for document in starmap(Encoded, documents):
            if document.responses is None:
                unmarked += 1
            else:
                responses.write(bytes(document.responses))
                is_open |= document.is_open
                if len(document.ids) and document.responses[-1] and not document.is_open:
                    ends.add(int(document.ids[-1]))
            file.write(np.asarray(document.ids, dtype=dtype).tobytes())
            lengths.append(len(document.ids))
            sizes.append(document.size)
            prefixes.add(document.prefix)
    np.save(directory / "offsets.npy", np.cumsum(lengths, dtype=np.int64))
    np.save(directory / "bytes.npy", np.cumsum(sizes, dtype=np.int64))
    facts: dict[str, Any] = {
        "dtype": dtype.str,
        "eos_id": eos_id,
        "vocabulary_size": vocabulary_size,
    }
    if prefix := min(prefixes, default=0):
        facts["prefix"] = prefix
    if unmarked < len(sizes) - 1:
        facts["unmarked"] = unmarked
    if is_open:
        facts["ends"] = sorted(ends)
    if facts.get("unmarked") != 0:
        marks.unlink()
    (directory / "split.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
