"""What the tokens of a tokenizer stand for, as bytes, and how a tokenizer spells bytes."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.errors import Fault, InputError

Spelling = Literal["bytes", "pieces", "text"]
"""How the strings of a vocabulary are meant: the alphabet of byte-level BPE; sentencepiece's, with
``▁`` for a space and ``<0x0A>`` for a byte; or as they stand."""
MODELS = ("BPE", "Unigram", "WordLevel")
SPACE = "▁"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, str]:
    """The character that byte-level BPE (GPT-2 and after) writes for each byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


ALPHABET = byte_alphabet()
BYTES = {character: byte for byte, character in ALPHABET.items()}


@dataclass(frozen=True, order=True)
class Key:
    """What makes two tokens of different tokenizers the same.

    Args:
        text: Its byte string; the content of a control token in UTF-8.
        control: Whether it is an added token that some model calls special. Ordinary text that
            happens to spell a control token is not it.
        copy: How many tokens of this text the same tokenizer has before it (``<0x41>`` after A).
    """

    text: bytes
    control: bool = False
    copy: int = 0


@dataclass(frozen=True, kw_only=True)
class Token:
    """One entry of a tokenizer.

    Args:
        content: The string of the file.
        id: Its row in the embedding.
        text: The bytes that it stands for.
        rank: 0 of the vocabulary, 1 added, 2 for a byte that has no other token.
        special: Whether it is added and special.
    """

    content: str
    id: int
    text: bytes
    rank: int
    special: bool


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer as it runs.

    Args:
        field: How errors name it.
        directory: Where it lies.
        core: Its tokenizer.json, as it is loaded.
        spelling: How its strings are meant.
        tokens: All of them, by id.
    """

    field: str
    directory: Path
    core: Mapping[str, Any]
    spelling: Spelling
    tokens: tuple[Token, ...]

    def rows(self, controls: Collection[str]) -> dict[Key, int]:
        """Return the id of each token; ``controls``: contents that some model calls special."""
        seen: Counter[tuple[bytes, bool]] = Counter()
        found = {}
        for token in sorted(self.tokens, key=lambda t: (t.rank, t.id)):
            name = (token.text, token.rank == 1 and token.content in controls)
            found[Key(*name, copy=seen[name])] = token.id
            seen[name] += 1
        return found


def read_vocabulary(directory: Path, *, field: str) -> Vocabulary:
    """Read the tokenizer of a checkpoint.

    Args:
        directory: Where it lies.
        field: How errors name it.

    Raises:
        InputError: None can be read, or it is of a kind without byte strings (WordPiece).
    """
    core = _core(Path(directory), field)
    model = core["model"]
    if model["type"] not in MODELS:
        remedy = f"is {model['type']}, whose tokens are no byte strings; use {', '.join(MODELS)}"
        raise InputError(Fault(field, str(directory), remedy))
    spelling = _spelling(core)
    added = {t["content"]: t for t in core.get("added_tokens") or ()}
    entries = {c: i for c, i in _entries(model) if c not in added}
    tokens = [
        Token(
            content=content,
            id=id,
            text=_bytes(content, spelling),
            rank=2 if spelling == "pieces" and BYTE.fullmatch(content) else 0,
            special=False,
        )
        for content, id in entries.items()
    ]
    tokens += [
        Token(content=c, id=t["id"], text=c.encode(), rank=1, special=bool(t["special"]))
        for c, t in added.items()
    ]
    tokens.sort(key=lambda t: t.id)
    return Vocabulary(
        field=field, directory=Path(directory), core=core, spelling=spelling, tokens=tuple(tokens)
    )


def spell(text: bytes, spelling: Spelling) -> str | None:
    """Write a byte string as a vocabulary would, or None where it has no way to."""
    if spelling == "bytes":
        return "".join(ALPHABET[byte] for byte in text)
    try:
        content = text.decode()
    except UnicodeDecodeError:  # a byte by itself is in the vocabulary already, if it can be
        return None
    if spelling == "text":
        return content
    if SPACE in content or BYTE.fullmatch(content):
        return None
    return content.replace(" ", SPACE)


def rule_faults(vocabularies: Sequence[Vocabulary]) -> Iterator[Fault]:
    """Yield a fault for each tokenizer that cuts text by other rules than the first."""
    first = vocabularies[0]
    rules = _rules(first)
    for other in vocabularies[1:]:
        for name, theirs in _rules(other).items():
            if theirs != rules[name]:
                pairs = enumerate(zip_longest(theirs, rules[name]))
                at, (new, old) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
                remedy = f"cuts text by other rules than {first.field}: {name}[{at}] is "
                remedy += f"{_short(new)} here and {_short(old)} there; say whose rules the "
                yield Fault(other.field, str(other.directory), remedy + "result follows (ruling)")
                break


def _core(directory: Path, field: str) -> dict[str, Any]:
    try:
        tokenizer = load_tokenizer(directory)
        return json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # the tokenizers library raises no narrower class
        remedy = f"its tokenizer cannot be read ({error}); save it with a tokenizer.json"
        raise InputError(Fault(field, str(directory), remedy)) from error


def _entries(model: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    if isinstance(model["vocab"], dict):
        yield from model["vocab"].items()
    else:  # Unigram: pairs of piece and score, the id is the position
        yield from ((piece, id) for id, (piece, _) in enumerate(model["vocab"]))


def _spelling(core: Mapping[str, Any]) -> Spelling:
    parts = [core.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    text = json.dumps(parts, ensure_ascii=False)
    if '"ByteLevel"' in text:
        return "bytes"
    model = core["model"]
    pieces = SPACE in text or '"Metaspace"' in text or model.get("byte_fallback")
    return "pieces" if pieces or model["type"] == "Unigram" else "text"


def _bytes(content: str, spelling: Spelling) -> bytes:
    if spelling == "bytes" and all(character in BYTES for character in content):
        return bytes(BYTES[character] for character in content)
    if spelling == "pieces":
        byte = BYTE.fullmatch(content)
        return bytes([int(byte[1], 16)]) if byte else content.replace(SPACE, " ").encode()
    return content.encode()


def _rules(vocabulary: Vocabulary) -> dict[str, list]:
    """What decides where text is cut, apart from ids and added tokens."""
    model = vocabulary.core["model"]
    named = ("type", "vocab", "merges", "unk_id")
    merges = [m.split(" ", 1) if isinstance(m, str) else list(m) for m in model.get("merges") or ()]
    vocab = model["vocab"]
    return {
        "model": [model["type"], vocabulary.spelling],
        "merges": merges,
        "vocabulary": [] if model["type"] == "BPE" else sorted(map(_fixed, vocab)),
        "options": sorted((k, v) for k, v in model.items() if v and k not in named),
        "normalizer": [vocabulary.core.get("normalizer")],
        "pre_tokenizer": [vocabulary.core.get("pre_tokenizer")],
    }


def _fixed(entry: str | Sequence) -> str | tuple:
    return entry if isinstance(entry, str) else tuple(entry)


def _short(value: object) -> str:
    text = " + ".join(map(repr, value)) if isinstance(value, list) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
