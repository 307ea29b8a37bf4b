"""Tokenizers: whether two mean the same, and carrying one along."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from upcycle_core.checkpoints.writer import sync_directory, sync_file
from upcycle_core.errors import Fault, InputError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Those without which there are no tokens."""


@dataclass(frozen=True)
class TokenIds:
    """What the ids of a tokenizer mean.

    Args:
        kind: Of its model: BPE, Unigram, ...
        merges: Pairs that are joined, in order; none for models without.
        ids: Token to id, added tokens among them.
    """

    kind: str
    merges: tuple[tuple[str, ...], ...]
    ids: Mapping[str, int]

    @property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 of all of it."""
        merges = list(map(list, self.merges))
        content = {"type": self.kind, "vocabulary": self.ids, "merges": merges}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()


def token_ids(directory: Path) -> TokenIds:
    """Read what ids mean, whatever file they are in.

    Args:
        directory: A checkpoint or tokenizer directory.

    Raises:
        InputError: There is no tokenizer that can be read.
    """
    core = _core(Path(directory))
    try:
        model = core["model"]
        ids = model["vocab"]
        if isinstance(ids, list):  # Unigram: pairs of token and score, the id is the position
            ids = {token: index for index, (token, _) in enumerate(ids)}
        ids = ids | {t["content"]: t["id"] for t in core.get("added_tokens") or ()}
        # "a b" in older files, ["a", "b"] in newer ones.
        merges = (m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges") or ())
        return TokenIds(model["type"], tuple(map(tuple, merges)), ids)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(_unreadable(Path(directory), error)) from error


def vocabulary_fingerprint(directory: Path) -> str:
    """Hash what ids mean: the map from token to id and the merges, whatever file they are in.

    Two directories of equal fingerprint give a text the same ids, as far as vocabulary and merges
    decide. Arguments and errors are those of ``token_ids``.
    """
    return token_ids(directory).fingerprint


def check_tokenizer(directory: Path) -> None:
    """Load a tokenizer as every later stage does.

    Raises:
        InputError: transformers cannot, or would need code of the checkpoint, which is never run.
    """
    from transformers import AutoTokenizer  # slow to import

    try:
        AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises no narrower class
        raise InputError(_unreadable(directory, error)) from error


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer files of one directory to another, to the disk.

    Raises:
        InputError: ``source`` holds none.
    """
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not names:
        raise InputError(_no_tokenizer(source))
    destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, destination / name)
        sync_file(destination / name)
    sync_directory(destination)


def _core(directory: Path) -> dict:
    """The content of tokenizer.json, or what it would be."""
    path = directory / "tokenizer.json"
    try:
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            raise InputError(_no_tokenizer(directory))
        from transformers import AutoTokenizer  # slow to import, and seldom needed

        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        return json.loads(tokenizer.backend_tokenizer.to_str())
    except (ValueError, OSError, AttributeError, ImportError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(_unreadable(directory, error)) from error


def _unreadable(directory: Path, error: Exception) -> Fault:
    remedy = f"its tokenizer cannot be read ({error!r}); save it with a tokenizer.json"
    return Fault("tokenizer", str(directory), remedy)


def _no_tokenizer(directory: Path) -> Fault:
    return Fault("tokenizer", str(directory), "holds no tokenizer; save the model's own beside it")
