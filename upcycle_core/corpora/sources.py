"""Where text comes from: files, a Hugging Face dataset, or the Python installation itself."""

import errno
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.checkpoints.known import KnownFiles
from upcycle_core.corpora.config import Source, template_fields
from upcycle_core.corpora.conversations import (
    FAULTS_SHOWN,
    FIELDS,
    FORM,
    Conversation,
    joined,
    messages_of,
    present,
)
from upcycle_core.corpora.dataset import open_dataset
from upcycle_core.corpora.distinct import Document
from upcycle_core.corpora.harvest import MissingPackage, harvest_documents, harvest_files, has_files
from upcycle_core.corpora.readers import checked_text, encodable, file_rows, read_txt
from upcycle_core.corpora.seeded import permutation
from upcycle_core.corpora.spool import Kept, Spool
from upcycle_core.errors import FULL, Fault, InputError

LARGE = 1 << 16
"""Bytes of a text that is known again by its times: to look up what is remembered takes 1 ms."""
OF_A_DISK = {*FULL, errno.EIO, errno.EROFS}
"""Errors of the system that no dataset is to blame for."""
FOLDER = "{folder}"
"""Stands for the folder parameter in ``files`` and ``dataset``."""
ROW_SHOWN = 60
"""Letters of a dataset's row by which it can be found: a stream in another order has no numbers."""
SHUFFLE_BUFFER = 10_000
"""Documents of a stream among which the next one is drawn."""


def read_source(
    source: Source, *, seed: int, folder: Path | None, scratch: Path | None = None
) -> Iterator[Kept]:
    """The documents of a source in seeded order, with nothing left out.

    Documents are read one at a time and kept on disk; those of files are ordered all together, a
    dataset is ordered within a buffer. ``source.max_bytes`` is the caller's to apply, after it has
    dropped duplicates.

    Args:
        source: What to read.
        seed: Decides the order.
        folder: What ``{folder}`` stands for.
        scratch: Folder of the temporary file that holds the documents.

    Raises:
        InputError: Something cannot be read; ``source_faults`` tells so beforehand.
    """
    spool = Spool(scratch)
    if source.harvest is not None:
        return map(spool.keep, harvest_documents(source.harvest, seed=seed))
    if source.dataset is not None:
        return map(spool.keep, _stream(source, seed=seed, folder=folder))
    documents = [
        spool.keep(document)
        for label, path in source_files(source, folder).items()
        for document in _read(path, label, source)
    ]
    return (documents[i] for i in permutation(len(documents), seed, "files", *source.files))


def first_chats(source: Source, count: int, *, folder: Path | None) -> Iterator[Conversation]:
    """The first chats of a source.

    Args:
        source: Of chats.
        count: How many.
        folder: What ``{folder}`` stands for.

    Raises:
        InputError: A record is no chat.
    """
    rows: Iterator[tuple[str, Mapping[str, Any]]]
    if source.dataset is not None:
        stream = enumerate(_open_dataset(source, folder))
        rows = ((f"{source.dataset}, row {number}", row) for number, row in stream)
    else:
        paths = source_files(source, folder).values()
        rows = ((f"{f}, {place}", row) for f in paths for place, row in file_rows(f, FORM))
    for place, row in islice(rows, count):
        yield Conversation(messages_of(present(dict(row)), place), place)


def source_files(source: Source, folder: Path | None) -> dict[str, Path]:
    """The local files that a source stands for, by label, sorted.

    Labels are the paths as the recipe writes them (``{folder}`` stays), so that they say the same
    on every machine; those of a harvest start with the package's name. A hub dataset has no files.
    """
    if source.harvest is not None:
        return {file.label: file.path for file in harvest_files(source.harvest)}
    if source.dataset is not None:
        root = Path(_filled(source.dataset, folder))
        found = [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else []
        return {
            f"{source.dataset}/{path.relative_to(root).as_posix()}": path for path in sorted(found)
        }
    files: dict[str, Path] = {}
    for pattern in source.files:
        files |= _matches(pattern, folder)
    return dict(sorted(files.items()))


def source_fingerprint(
    source: Source, *, folder: Path | None = None, known: KnownFiles | None = None
) -> dict[str, object]:
    """What a source would read, by content.

    Args:
        source: What would be read.
        folder: What ``{folder}`` stands for.
        known: Hashes of files that have not changed; every file is read by default.

    Returns:
        JSON-ready: ``harvest`` with one digest over (label, sha256) of all its files; ``files``
        with the sha256 of each; ``dataset`` with its name, subset, split, revision and, of a local
        directory, the sha256 of each file.
    """
    files = source_files(source, folder).items()
    hashes = {label: (_remembering(path, known) or sha256_file)(path) for label, path in files}
    if source.harvest is not None:
        listing = json.dumps(sorted(hashes.items())).encode()
        return {"harvest": source.harvest, "digest": hashlib.sha256(listing).hexdigest()}
    if source.dataset is None:
        return {"files": hashes}
    return {
        "dataset": source.dataset,
        "subset": source.subset,
        "split": source.split,
        "revision": source.revision,
        "files": hashes,
    }


def source_faults(
    source: Source, field: str, folder: Path | None, known: KnownFiles | None = None
) -> list[Fault]:
    """Everything that would stop ``source`` from being read, found by reading it once.

    Args:
        source: What will be read.
        field: Where the recipe names it (``domains.law.train``).
        folder: What ``{folder}`` stands for.
        known: What was found in files that have not changed; every file is read by default.

    Returns:
        One fault for each file, pattern, package or dataset that cannot be read.
    """
    if found := source.faults(field):
        return found
    if source.harvest is not None:
        return _harvest_faults(source.harvest, f"{field}.harvest")
    if source.dataset is not None:
        return _dataset_faults(source, f"{field}.dataset", folder)
    return [
        fault
        for pattern in source.files
        for fault in _pattern_faults(pattern, source, f"{field}.files", folder, known)
    ]


def missing_patterns(patterns: Iterable[str], folder: Path | None) -> list[str]:
    """Patterns of a source's ``files`` that no file matches; nothing is read."""
    return [pattern for pattern in patterns if not _matches(pattern, folder)]


def _filled(reference: str, folder: Path | None) -> str:
    return reference if folder is None else reference.replace(FOLDER, str(folder))


def _matches(pattern: str, folder: Path | None) -> dict[str, Path]:
    """Label and path of each file that ``pattern`` stands for."""
    path = Path(_filled(pattern, folder))
    if os.path.isfile(path) or not glob.has_magic(pattern):  # a file may be called notes[1].txt
        return {pattern: path} if os.path.isfile(path) else {}  # False of what is no path, too
    root = None if folder is None else Path(glob.escape(str(folder)))
    paths = sorted(glob.glob(_filled(pattern, root), recursive=True))
    start = str(folder) if folder and pattern.startswith(FOLDER) else ""
    return {
        FOLDER + path.removeprefix(start) if start else path: Path(path)
        for path in paths
        if Path(path).is_file()
    }


def _read(path: Path, label: str, source: Source) -> Iterator[Document]:
    try:
        yield from file_documents(path, label, source)
    except InputError:
        raise
    except (ValueError, OSError) as error:
        raise InputError(Fault("files", str(path), str(error))) from error


def file_documents(path: Path, label: str, source: Source) -> Iterator[Document]:
    """The documents of a file, by its ending and the form that the source says it has.

    Args:
        path: A .txt (documents separated by a line ``<|doc|>``), .jsonl, .json or .parquet
            file.
        label: What its documents say they are from.
        source: Its form, template or text field.

    Raises:
        ValueError: The ending is unknown, or the content is not what it says.
        OSError: The file cannot be opened.
    """
    if path.suffix == ".txt" and source.form == "text" and source.template is None:
        return (Document(text, label) for text in read_txt(path))
    return (_of_row(row, source, place, label) for place, row in _rows(path, source))


def _rows(path: Path, source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and fields of a file's records."""
    is_chat = source.form == "chat"
    fields, form = (FIELDS, FORM) if is_chat else _fields(source)
    return file_rows(path, form, fields, some=is_chat)


def _of_row(row: Mapping[str, Any], source: Source, place: str, label: str) -> Document:
    """The document that a record is."""
    row = dict(row)
    if source.form == "chat":
        messages = messages_of(present(row), place)
        return Document(encodable(joined(messages), place), label, messages)
    if source.template is None:
        return Document(checked_text(row, source.text_field, place), label)
    values = {name: checked_text(row, name, place) for name in template_fields(source.template)}
    return Document(source.template.format(**values), label)


def _fields(source: Source) -> tuple[list[str], str]:
    """Fields of a record that are read, and what it looks like."""
    names = [source.text_field] if source.template is None else template_fields(source.template)
    return names, "{" + ", ".join(f'"{name}": ...' for name in names) + "}"


def _stream(source: Source, *, seed: int, folder: Path | None) -> Iterator[Document]:
    try:
        rows = _open_dataset(source, folder).shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        for row in rows:
            try:
                document = _of_row(row, source, "a row", str(source.dataset))
            except ValueError:  # said once more, so that it can be found
                start = json.dumps(row, ensure_ascii=False, default=str)[:ROW_SHOWN]
                document = _of_row(row, source, f"the row {start} ...", str(source.dataset))
            yield document
    except ValueError as error:
        raise InputError(Fault("dataset", source.dataset, str(error))) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_A_DISK:
            raise
        remedy = f"{_unread(error)} of the machine that reads it, and HF_TOKEN there"
        raise InputError(Fault("dataset", source.dataset, remedy)) from error


def _unread(error: Exception) -> str:
    """What is to be looked at: a hub, a cache, a file system, each answers in its own way."""
    reason = f"{type(error).__name__}: {error}"
    return f"it cannot be read ({reason}); check name, subset, split, revision and network"


def _open_dataset(source: Source, folder: Path | None):
    return open_dataset(
        _filled(str(source.dataset), folder),
        subset=source.subset,
        split=source.split,
        revision=source.revision,
    )


def _harvest_faults(name, field: str) -> list[Fault]:
    try:
        if has_files(name):
            return []
    except MissingPackage as error:
        return [Fault(field, name, f"package {error} is not installed; install upcycle[pipeline]")]
    return [Fault(field, name, "this installation holds no such files; name files or a dataset")]


def _dataset_faults(source: Source, field: str, folder: Path | None) -> list[Fault]:
    if folder is None and FOLDER in str(source.dataset):
        return [_no_folder(field, source.dataset)]
    try:
        first = next(iter(_open_dataset(source, folder)), None)
        if first is None:
            raise ValueError("it holds no rows; name a split that does")
        _of_row(first, source, "the first row", str(source.dataset))
    except ValueError as error:
        return [Fault(field, source.dataset, str(error))]
    except Exception as error:
        return [Fault(field, source.dataset, _unread(error))]
    return []


def _pattern_faults(
    pattern: str, source: Source, field: str, folder: Path | None, known: KnownFiles | None
) -> Iterable[Fault]:
    if folder is None and FOLDER in pattern:
        yield _no_folder(field, pattern)
        return
    files = _matches(pattern, folder)
    if not files:
        remedy, place = "there is no such file; check the path", _filled(pattern, folder)
        if os.path.isdir(place):
            remedy = (
                "is a folder; name what is to be read of it, as folder/*.jsonl or folder/**/*.txt"
            )
        yield Fault(field, place, remedy)
    for path in files.values():
        found = _known_faults(path, source, known)
        yield from (Fault(field, str(path), said) for said in found[:FAULTS_SHOWN])
        if len(found) > FAULTS_SHOWN:
            yield Fault(field, str(path), "more of its records are faulty too")


def _remembering(path: Path, known: KnownFiles | None) -> Callable[[Path], str] | None:
    """What hashes a file and remembers it; None where it is read as fast as it is looked up."""
    return known.sha256 if known is not None and path.stat().st_size >= LARGE else None


def _known_faults(path: Path, source: Source, known: KnownFiles | None) -> list[str]:
    """As ``_file_faults``, of which it is remembered that there are none."""
    try:
        hash_of = _remembering(path, known)
        digest = None if hash_of is None else hash_of(path)
    except OSError:  # which is one of its faults
        digest = None
    if known is None or digest is None:
        return _file_faults(path, source)
    how, found = [path.suffix, source.form, source.text_field, source.template], list[str]()

    def is_sound() -> bool:
        found.extend(_file_faults(path, source))
        return not found

    is_known = known.fact("sound text", [digest, *how], is_sound)
    return found if is_known or found else _file_faults(path, source)


def _file_faults(path: Path, source: Source) -> list[str]:
    """What is wrong with a file, or with its records: one more than are shown, at most."""
    faults, texts = [], 0
    try:
        if path.suffix == ".txt" and source.form == "text" and source.template is None:
            texts = sum(1 for text in read_txt(path) if text.strip())
        else:
            for place, row in _rows(path, source):
                try:
                    texts += bool(_of_row(row, source, place, str(path)).text.strip())
                except ValueError as error:
                    faults.append(str(error))
                    if len(faults) > FAULTS_SHOWN:  # a wrong field is wrong in every record
                        break
    except (ValueError, OSError) as error:
        faults.append(str(error))
    return faults if texts or faults else ["it holds no text; remove it or fill it"]


def _no_folder(field: str, value: str | None) -> Fault:
    return Fault(field, value, "it needs a folder; give the folder parameter")
