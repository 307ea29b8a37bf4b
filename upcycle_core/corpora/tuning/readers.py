"""What instruction sources read, which files they are, and what is in them."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from upcycle_core.corpora.config import Source
from upcycle_core.corpora.dataset import open_dataset
from upcycle_core.corpora.families.catalogue import FAMILIES, generate
from upcycle_core.corpora.sources import FOLDER, SHUFFLE_BUFFER, source_files, source_fingerprint
from upcycle_core.corpora.tuning.config import InstructionsConfig, InstructionSource
from upcycle_core.corpora.tuning.records import Found, Record, checked, file_records
from upcycle_core.corpora.tuning.superni import row_records, task_file_records
from upcycle_core.errors import Fault

SAMPLE = 20
"""Instances of each family that stand for what it generates."""


def read_records(
    name: str,
    source: InstructionSource,
    *,
    config: InstructionsConfig,
    folder: Path | None,
    seed: int,
) -> Iterator[Found]:
    """Every record of a source in its order, or what is wrong with it.

    Args:
        name: The source's.
        source: What to read; it has no fault of its own.
        config: How many instances are generated of a family, or used of a published task.
        folder: What ``{folder}`` stands for.
        seed: Decides what is generated, and the order of a dataset.
    """
    if source.generate is not None:
        for family in FAMILIES:
            for row in generate(family, config.per_family(family), seed):
                known = {name: row[name] for name in ("task", "category", "domain", "prompt", "id")}
                yield Record(**known, references=tuple(row["references"]))
        return
    if source.dataset is not None:
        yield from _streamed(name, source, folder, seed)
        return
    paths = list(_files(source.files, folder).values())
    if source.form == "superni":
        most = partial(config.most_per_task, source)
        yield from task_file_records(source, paths, _listed(source, folder), seed=seed, most=most)
    elif source.form == "superni-rows":
        yield from row_records(source, paths, Path(_filled(str(source.definitions), folder)))
    else:
        yield from file_records(name, source, paths)


def missing_files(name: str, source: InstructionSource, folder: Path | None) -> list[Fault]:
    """A fault for each path or pattern that no file is found for.

    Args:
        name: Where the recipe names the source.
        source: What will be read.
        folder: What ``{folder}`` stands for.
    """
    named = [("files", path) for path in source.files]
    named += [("definitions", source.definitions)] if source.definitions else []
    named += [("task_lists", path) for path in source.task_lists]
    found = []
    for field, path in [*named, ("dataset", source.dataset or "")]:
        if folder is None and FOLDER in path:
            remedy = "it needs a folder; give the folder parameter"
            found.append(Fault(f"{name}.{field}", path, remedy))
        elif field != "dataset" and not _files((path,), folder):
            remedy = "there is no such file; check the path"
            found.append(Fault(f"{name}.{field}", _filled(path, folder), remedy))
    return found


def first_of_dataset(name: str, source: InstructionSource, folder: Path | None) -> Found | None:
    """A dataset's first record, or what keeps it from being read."""
    return next(_streamed(name, source, folder, seed=None), None)


def reader_fingerprint(source: InstructionSource, folder: Path | None) -> Mapping[str, Any]:
    """What a source would read, by content, ready for JSON.

    Returns:
        Of generated families a digest of their first instances; else as
        ``sources.source_fingerprint``.
    """
    if source.generate is not None:
        sample = [generate(family, SAMPLE, seed=0) for family in FAMILIES]
        digest = hashlib.sha256(json.dumps(sample).encode()).hexdigest()
        return {"generate": source.generate, "digest": digest}
    if source.dataset is not None:
        names = {name: getattr(source, name) for name in ("dataset", "subset", "revision")}
        read = Source(**names, split=source.split or "train")
        return source_fingerprint(read, folder=folder)
    named = (*source.files, *source.task_lists)
    named += (source.definitions,) if source.definitions else ()
    return source_fingerprint(Source(files=named), folder=folder)


def _streamed(
    name: str, source: InstructionSource, folder: Path | None, seed: int | None
) -> Iterator[Found]:
    """Records of a dataset; in the dataset's own order without a seed."""
    number = -1
    try:
        rows = open_dataset(
            _filled(str(source.dataset), folder),
            subset=source.subset,
            split=source.split or "train",
            revision=source.revision,
        )
        if seed is not None:
            rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        for number, row in enumerate(islice(rows, source.max_records)):
            present = {field: value for field, value in row.items() if value is not None}
            yield from checked(present, f"{source.dataset}, row {number}", name, source)
    except Exception as error:
        # A hub, a cache, a file system: each fails in its own way.
        reason = f"{type(error).__name__}: {error}"
        remedy = f"it cannot be read ({reason}); check name, subset, split, revision and network"
        yield Fault(f"instructions.sources.{name}.dataset", source.dataset, remedy)
        return
    if number < 0:
        remedy = "it holds no rows; name a split that does"
        yield Fault(f"instructions.sources.{name}.dataset", source.dataset, remedy)


def _files(patterns: tuple[str, ...], folder: Path | None) -> dict[str, Path]:
    return source_files(Source(files=patterns), folder)


def _filled(path: str, folder: Path | None) -> str:
    return path if folder is None else path.replace(FOLDER, str(folder))


def _listed(source: InstructionSource, folder: Path | None) -> frozenset[str] | None:
    """Names of the tasks to take; None takes all."""
    if not source.task_lists:
        return None
    texts = [path.read_text("utf-8") for path in _files(source.task_lists, folder).values()]
    return frozenset(line.strip() for text in texts for line in text.splitlines() if line.strip())
