"""Find a model in whatever form it is given, as a directory of safetensors.

A directory is taken as it is, a repository of the hub fetched. A GGUF file and a LoRA adapter are
turned into an ordinary checkpoint once, in the models' cache, under the hash of what was given.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, list_repo_files, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from upcycle_core.architectures.families import family_of
from upcycle_core.checkpoints.copy import TEMPLATES
from upcycle_core.checkpoints.known import FILE, KnownFiles
from upcycle_core.checkpoints.place import make_once
from upcycle_core.checkpoints.reader import PICKLE_SUFFIXES, read_config
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.given.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Adapter,
    is_adapter,
    merge_adapter,
)

CONFIG = "config.json"
# Configuration, tokenizer, safetensors; no pickle, no code, no other formats.
WANTED = (
    CONFIG,
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    TEMPLATES,
)
GGUF = ".gguf"
CONVERTED = "converted"
"""Folder of the cache for what was made of other forms."""
CONVERSION = 4
"""Raised when the same file is to become another checkpoint."""
MERGING = 2
"""Raised when the same adapter is to become another one."""


def resolve_model(
    reference: str, cache_dir: Path, *, base: str | None = None, known: KnownFiles | None = None
) -> Path:
    """Return the directory of a model: config.json, safetensors and the tokenizer.

    Args:
        reference: A directory, or a repository of the Hugging Face hub (``owner/name``), of a model
            or a LoRA adapter; or a GGUF file, a path or ``owner/name/FILE.gguf``.
        cache_dir: Where fetched repositories, and checkpoints made of other forms, are kept.
        base: What an adapter is merged into, in any of these forms but an adapter; by default what
            it names itself.
        known: Remembers hashes of files; by default those in ``cache_dir`` are.

    Raises:
        InputError: It is not there, and why; it cannot be read; an adapter that does not fit; of a
            repository, whose weights are not fetched then, a family that is not supported.
    """
    known = known or KnownFiles(cache_dir / FILE)
    if reference.endswith(GGUF):
        return _of_gguf(gguf_path(reference, cache_dir), cache_dir, known)
    directory = _directory(reference, cache_dir)
    return _merged(directory, base, cache_dir, known) if is_adapter(directory) else directory


def converted_before(
    reference: str, cache_dir: Path, *, base: str | None = None, known: KnownFiles
) -> bool:
    """Whether a GGUF file or an adapter on this disk is in the cache as a checkpoint already.

    Nothing is fetched and no weight read: of files whose hash is not known it is not.

    Args:
        reference: As for ``resolve_model``.
        cache_dir: Where checkpoints made of other forms are kept.
        base: What an adapter is merged into.
        known: Remembers hashes of files.
    """
    path = _found(reference)
    if path is None or not (cache_dir / CONVERTED).is_dir():
        return False
    if path.is_file():
        return _place(cache_dir, {"gguf": known.recalled(path)}).is_dir()
    into = None if base is None else _found(base)
    if into is not None and into.is_file():
        into = _place(cache_dir, {"gguf": known.recalled(into)})
    if into is None or not into.is_dir():
        return False
    parts = _merging(_digests(path, known.recalled), _digests(into, known.recalled))
    return _place(cache_dir, parts).is_dir()


def _directory(reference: str, cache_dir: Path, revision: str | None = None) -> Path:
    """A directory as it is, or what the hub has of a repository (by default its newest)."""
    directory = _found(reference)
    if directory is not None and directory.is_dir():
        files = sorted(path.name for path in directory.glob(f"*{GGUF}"))
        if files and not (directory / CONFIG).is_file():
            remedy = f"holds GGUF files; name one of them: {directory / files[0]}"
            raise InputError(Fault("model", reference, remedy))
        return directory

    def fetch(*patterns: str) -> Path:
        return _fetched(
            reference,
            lambda: snapshot_download(
                reference, revision=revision, cache_dir=cache_dir, allow_patterns=list(patterns)
            ),
        )

    settings = fetch(CONFIG)
    if (settings / CONFIG).is_file():  # an adapter has none
        config, faults = read_config(settings, reference)
        raise_faults(faults)
        family_of(config, field="config.model_type")  # before its weights are fetched
    fetched = fetch(*WANTED)
    if not any(fetched.glob("*.safetensors")):
        raise_faults(_pickles(reference))
    return fetched


def _pickles(reference: str) -> Iterator[Fault]:
    """What is said of a repository without safetensors that has pickles, which are not fetched."""
    try:
        files = sorted(list_repo_files(reference))
    except Exception:  # of the hub, or of a network: what was fetched says that weights are missing
        return
    for name in files:
        if Path(name).suffix in PICKLE_SUFFIXES:
            remedy = f"holds pickled weights ({name}), which can run code, and no safetensors; "
            remedy += "convert them to safetensors, and give the directory"
            yield Fault("model", reference, remedy)
            return


def gguf_path(reference: str, cache_dir: Path) -> Path:
    """The GGUF file of that path, or of that name on the hub.

    Raises:
        InputError: It is not there, and why.
    """
    path = _found(reference)
    if path is not None and path.is_file():
        return path
    parts = reference.split("/", 2)
    if path is not None or len(parts) < 3 or not all(parts) or reference.startswith("~"):
        remedy = "is no file; give a path, or owner/name/FILE.gguf of the hub"
        raise InputError(Fault("model", reference, remedy))
    owner, name, file = parts
    return _fetched(
        reference, lambda: hf_hub_download(f"{owner}/{name}", file, cache_dir=cache_dir)
    )


def _found(reference: str) -> Path | None:
    """What is there under this path; None where nothing is, or it cannot be a path."""
    try:
        path = Path(reference).expanduser()
        return path if reference and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, ~ of nobody, a zero in it
        return None


def _fetched(reference: str, fetch: Callable[[], str]) -> Path:
    """What the hub has, or why it does not come."""
    try:
        found = fetch()
    except HFValidationError:
        remedy = "is no directory, nor owner/name of a repository; mend the path"
    except GatedRepoError:
        remedy = "is a gated repository; accept its terms on the hub and log in with hf auth login"
    except RepositoryNotFoundError:
        remedy = "is neither a directory nor a repository of the hub; mend the name, or log in"
    except LocalEntryNotFoundError:
        remedy = "is no directory, and the hub cannot be reached to fetch it; give a directory"
    except EntryNotFoundError:
        remedy = "is no file of that repository; mend its name"
    except OSError as error:
        remedy = f"could not be fetched ({error}); try again, or give a directory"
    else:
        return Path(found)
    raise InputError(Fault("model", reference, remedy))


def _of_gguf(path: Path, cache_dir: Path, known: KnownFiles) -> Path:
    from upcycle_core.given.gguf_file import open_gguf, write_gguf  # imports transformers

    out = _place(cache_dir, {"gguf": known.sha256(path)})
    return make_once(out, lambda partial: write_gguf(open_gguf(path), partial))


def _merged(directory: Path, base: str | None, cache_dir: Path, known: KnownFiles) -> Path:
    adapter = Adapter(directory)
    into = _base(adapter, base, cache_dir, known)
    parts = _merging(_digests(directory, known.sha256), _digests(into, known.sha256))
    return make_once(
        _place(cache_dir, parts), lambda partial: merge_adapter(adapter, into, partial)
    )


def _base(adapter: Adapter, named: str | None, cache_dir: Path, known: KnownFiles) -> Path:
    """The checkpoint that an adapter is merged into.

    Raises:
        InputError: Nobody names one, or the adapter names another one than the recipe.
    """
    own, place = adapter.base_name, str(adapter.directory)
    reference = named or own
    if reference is None:
        remedy = f"{ADAPTER_CONFIG} names no base; name it in seed_model.model"
        raise InputError(Fault("adapter", place, remedy))
    revision = adapter.revision if named is None else None
    base = _base_directory(reference, revision, place, cache_dir, known)
    if named is not None and named == own and _is_hub_id(own) and adapter.revision:
        remedy = f"is an adapter of {own} at revision {adapter.revision}, and the seed is its "
        remedy += "newest: fetch that revision, and name its directory in seed_model.model"
        raise InputError(Fault("adapter", place, remedy))
    if named is None or own is None or own == named:
        return base
    if Path(own).is_dir():
        is_other = _weights(Path(own), known) != _weights(base, known)
    else:
        is_other = _is_hub_id(own) and _is_hub_id(named)
    if is_other:
        remedy = f"is an adapter of {own}, and the seed is {named}: name the base that it was "
        remedy += f"trained on; if both are one model, write that into its {ADAPTER_CONFIG}"
        raise InputError(Fault("adapter", place, remedy))
    return base


def _base_directory(
    reference: str, revision: str | None, place: str, cache_dir: Path, known: KnownFiles
) -> Path:
    try:
        if reference.endswith(GGUF):
            return resolve_model(reference, cache_dir, known=known)
        directory = _directory(reference, cache_dir, revision)
        if is_adapter(directory):
            remedy = f"its base {reference} is an adapter too; give the model that both are of"
            raise InputError(Fault("adapter", place, remedy))
        return directory
    except InputError as error:
        faults = (_of_base(fault, reference, place) for fault in error.faults)
        raise InputError(*faults) from error


def _of_base(fault: Fault, reference: str, place: str) -> Fault:
    """A fault of what an adapter is merged into; of the adapter where that is not to be had."""
    if fault.value != reference:
        return Fault("base of the adapter", fault.value, fault.remedy)
    return Fault("adapter", place, absent_base(reference, fault.remedy))


def absent_base(reference: str, why: str) -> str:
    """What to do about an adapter whose base is not to be had.

    Args:
        reference: As ``adapter_config.json`` names it.
        why: What is wrong with it.
    """
    return (
        f"its base, by {ADAPTER_CONFIG}, is {reference}, which {why}; or name the base in "
        "seed_model.model"
    )


def _is_hub_id(reference: str) -> bool:
    return reference.count("/") == 1 and _found(reference) is None


def _weights(directory: Path, known: KnownFiles) -> list[str]:
    return sorted(known.sha256(path) for path in directory.glob("*.safetensors"))


def _merging(adapter: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, object]:
    """What an adapter merged into its base is made of."""
    return {"merging": MERGING, "adapter": adapter, "base": base}


def _digests(directory: Path, digest: Callable[[Path], str | None]) -> dict[str, str | None]:
    """{file: sha256} of what belongs to a model or an adapter."""
    files = {path for pattern in WANTED for path in directory.glob(pattern) if path.is_file()}
    return {p.relative_to(directory).as_posix(): digest(p) for p in sorted(files)}


def _place(cache_dir: Path, parts: Mapping[str, object]) -> Path:
    """Where the checkpoint made of these bytes is kept."""
    text = json.dumps({"conversion": CONVERSION, **parts}, sort_keys=True)
    return cache_dir / CONVERTED / hashlib.sha256(text.encode()).hexdigest()
