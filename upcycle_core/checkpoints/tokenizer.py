"""Tokenizers: whether two mean the same, and carrying one along."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle_core.checkpoints.copy import TEMPLATES
from upcycle_core.checkpoints.writer import sync_directory, sync_file, write_json
from upcycle_core.errors import Fault, InputError, raise_faults

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
CORE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
AS_IT_IS = "PreTrainedTokenizerFast"
"""The one class that takes tokenizer.json as it is. Others make parts of it anew, one way or
another by the config.json that lies beside it: the same files give other tokens beside an expert,
beside the MoE and alone."""
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
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
    try:
        load_tokenizer(directory)
    except Exception as error:  # the tokenizers library raises no narrower class
        raise InputError(_unreadable(directory, error)) from error


def load_tokenizer(directory: Path | str) -> Any:
    """The tokenizer as its tokenizer.json says, whatever lies beside it; no code of it is run.

    Without a tokenizer.json it is what transformers makes of the other files.

    Raises:
        InputError, ValueError, OSError: It cannot be loaded.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import

    directory = Path(directory)
    if not _is_whole(directory):
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    if tokenizer.eos_token is None:
        for role, token in _supplied(directory, tokenizer).items():
            setattr(tokenizer, role, token)
    return tokenizer


def _supplied(directory: Path, tokenizer: Any) -> dict[str, str]:
    """Roles of tokens that no file says, and the class that is asked for does."""
    from transformers import AutoTokenizer  # slow to import

    try:
        own = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception:  # it is not needed: the file says all of it but roles
        return {}
    known = tokenizer.get_vocab()
    tokens = {role: getattr(own, role) for role in ROLES if getattr(tokenizer, role) is None}
    return {role: token for role, token in tokens.items() if token in known}


def manners(directory: Path) -> dict[str, Any]:
    """What of a tokenizer is none of its tokens, by its name for people.

    Raises:
        InputError, ValueError, OSError: It cannot be loaded.
    """
    tokenizer = load_tokenizer(directory)
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    return {
        "chat template": tokenizer.chat_template,
        "beginning-of-sequence token": tokenizer.bos_token,
        "end-of-sequence token": tokenizer.eos_token,
        "way to cut text": [core[part] for part in ("normalizer", "pre_tokenizer")],
        "frame around texts": core["post_processor"],
    }


def _is_whole(directory: Path) -> bool:
    """Whether tokenizer.json says all of it: there is one, and no code."""
    return (directory / CORE).is_file() and "auto_map" not in _settings(directory)


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / SETTINGS
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {**found}
    except (ValueError, TypeError) as error:
        raise InputError(_unreadable(directory, error)) from error


def tokenizer_files(directory: Path) -> list[Path]:
    """The files of a tokenizer that ``directory`` has, relative to it."""
    named = (Path(name) for name in TOKENIZER_FILES if (directory / name).is_file())
    templates = (path.relative_to(directory) for path in directory.glob(TEMPLATES))
    return [*named, *sorted(templates)]


def absence_faults(source: Path) -> list[Fault]:
    """What is said of a directory that holds no tokenizer."""
    return [] if tokenizer_files(source) else [_no_tokenizer(source)]


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer files of one directory to another, to the disk.

    What ``destination`` has of another tokenizer is removed: two are no tokenizer. Whoever loads
    the copy has its tokenizer.json as it is: see ``AS_IT_IS``. What its class would say of padding
    is said then. Where ``source`` has none it is made of the other files, as they are read there.

    Raises:
        InputError: ``source`` holds none, or none that can be read.
    """
    raise_faults(absence_faults(source))
    names = tokenizer_files(source)
    destination.mkdir(parents=True, exist_ok=True)
    for name in tokenizer_files(destination):
        if name not in names:
            (destination / name).unlink()
    for name in names:
        (destination / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, destination / name)
        sync_file(destination / name)
    is_made = not (source / CORE).is_file() and _write_core(source, destination / CORE)
    if is_made or _is_whole(source):
        settings = _settings(source)
        if settings.get("tokenizer_class") != AS_IT_IS:
            said = {**_of_class(settings.get("tokenizer_class")), **settings}
            if is_made or not any("eos_token" in own for own in (settings, _map(source))):
                loaded = load_tokenizer(source)
                tokens = {role: getattr(loaded, role) for role in ROLES}
                said |= {role: token for role, token in tokens.items() if token is not None}
            write_json(destination / SETTINGS, {**said, "tokenizer_class": AS_IT_IS})
    sync_directory(destination)


def _write_core(source: Path, core: Path) -> bool:
    """Write what transformers makes of files without a tokenizer.json, which hangs on the
    config.json beside them; False of a class that has no such thing."""
    check_tokenizer(source)
    backend = getattr(load_tokenizer(source), "backend_tokenizer", None)
    if backend is None:
        return False
    backend.save(str(core))
    sync_file(core)
    return True


def _map(directory: Path) -> dict[str, Any]:
    """What an older file says of roles."""
    path = directory / "special_tokens_map.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _of_class(name: str | None) -> dict[str, Any]:
    """What a class says that no file needs to."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    own = tokenizer_class_from_name(name) if name else None
    if own is None:
        return {}
    return {"padding_side": own.padding_side, "model_input_names": own.model_input_names}


def _core(directory: Path) -> dict:
    """The content of tokenizer.json, or what it would be."""
    path = directory / CORE
    try:
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            raise InputError(_no_tokenizer(directory))
        return json.loads(load_tokenizer(directory).backend_tokenizer.to_str())
    except (ValueError, OSError, AttributeError, ImportError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(_unreadable(directory, error)) from error


def _unreadable(directory: Path, error: Exception) -> Fault:
    remedy = f"its tokenizer cannot be read ({error!r}); save it with a tokenizer.json"
    return Fault("tokenizer", str(directory), remedy)


def _no_tokenizer(directory: Path) -> Fault:
    return Fault("tokenizer", str(directory), "holds no tokenizer; save the model's own beside it")
