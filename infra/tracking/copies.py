"""Files of registered versions, for the commands that read them: where they lie, or else copies.

Who reads them holds them, until it lets go of them or its process ends. Copies that nobody holds
may be removed, but for the versions of each model that were read last. What lies in its place is
held by its folder: of processes of another machine nobody here knows.
"""

import fcntl
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from infra.settings import Settings
from infra.tracking.records import Version
from infra.tracking.registry import Registry
from upcycle_core.checkpoints.copy import place_files
from upcycle_core.checkpoints.place import LOCK, PARTIAL, make_once

KEPT = 2
"""Versions of a model that stay though nobody holds them: of a rollback the one before is asked."""
HELD = ".held"
"""Ends the name of a file beside a copy that its readers share, and that says when it was read."""
NAME = re.compile(r"(?P<version>(?P<model>.+)-\d+)-[0-9a-f]{12}(\.files)?")
_held: dict[Path, TextIO] = {}
"""Copies that this process reads."""
_in_place: dict[tuple[str, int, Path], int] = {}
"""{model, number and place: open folder} of versions that it reads where they lie."""


def in_place(version: Version, registry: Registry) -> Path | None:
    """Where a version's files lie on this machine, held from now on; None where they do not.

    Raises:
        InputError: There is no such version, or it was deleted meanwhile.
    """
    place = registry.place(version.reference)
    if place is None or (version.name, version.number, place) in _in_place:
        return place
    with suppress(OSError):  # deleted since, which is said below; or not ours to hold
        folder = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_SH)
        except OSError:  # a file system without locks
            os.close(folder)
            raise
        _in_place[version.name, version.number, place] = folder
    return registry.place(version.reference)


@contextmanager
def unread(folder: Path) -> Iterator[bool]:
    """Whether no process of this machine reads a version's files in ``folder``, their place.

    Where none does, none begins to before the block ends.
    """
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:  # gone, or not ours to hold
        yield True
        return
    try:
        yield _is_ours(opened)
    finally:
        os.close(opened)


def checkpoint(version: Version, registry: Registry, settings: Settings) -> Path:
    """The directory of a version's checkpoint, copied once and held from now on.

    What a recipe or an earlier release has fetched is not fetched again.

    Raises:
        InputError: There is no such version, or its files cannot be read from here.
    """
    folder, name = _folder(settings), version.folder(settings.mlflow_tracking_uri)
    _hold(folder / name)
    fetched = settings.home / "models" / "registered" / name
    if fetched.is_dir():
        return make_once(folder / name, lambda new: place_files(fetched, new))
    return registry.fetch(version.reference, folder)


def all_files(version: Version, registry: Registry, settings: Settings) -> Path:
    """As ``checkpoint``, with all that MLflow has of the version, as it lies there."""
    place = _folder(settings) / f"{version.folder(settings.mlflow_tracking_uri)}.files"
    _hold(place)

    def copy(partial: Path) -> None:
        registry.download(version.reference, partial / "files")

    return make_once(place, copy) / "files"


def keep(name: str, numbers: Collection[int]) -> None:
    """Hold no other versions than these of one model any more."""
    versions = {f"{name}-{number}" for number in numbers}
    for place in [*_held]:
        if _parts(place)["version"] not in versions:
            _held.pop(place).close()
    for key in [*_in_place]:
        if key[0] != name or key[1] not in numbers:
            os.close(_in_place.pop(key))


def unused(settings: Settings) -> list[Path]:
    """Copies, half ones too, that nobody holds and that are none of those read last."""
    folders = (path for path in _folder(settings).glob("*") if path.is_dir())
    places = {path.with_name(path.name.removesuffix(PARTIAL)) for path in folders}
    ours = [place for place in places if NAME.fullmatch(place.name)]
    stay: defaultdict[str, set[str]] = defaultdict(set)
    for place in sorted(ours, key=_last_read, reverse=True):
        model, version = _parts(place)["model"], _parts(place)["version"]
        if len(stay[model]) < KEPT:
            stay[model].add(version)
    read_last = set().union(*stay.values())
    return sorted(p for p in ours if _parts(p)["version"] not in read_last and not _is_held(p))


def remove_unused(settings: Settings) -> None:
    """Remove what ``unused`` finds."""
    for place in unused(settings):
        _remove(place)


def _folder(settings: Settings) -> Path:
    return settings.home / "models" / "served"


def _parts(place: Path) -> re.Match[str]:
    found = NAME.fullmatch(place.name)
    assert found is not None, place
    return found


def _mark(place: Path) -> Path:
    return place.with_name(f"{place.name}{HELD}")


def _last_read(place: Path) -> float:
    try:
        return _mark(place).stat().st_mtime
    except FileNotFoundError:  # or removed meanwhile, with the copy
        return 0.0


def _hold(place: Path) -> None:
    """Let no process remove what lies at ``place``, or will."""
    mark = _mark(place)
    mark.parent.mkdir(parents=True, exist_ok=True)
    while place not in _held:
        file = mark.open("a+")
        fcntl.flock(file, fcntl.LOCK_SH)
        if _is_named(file, mark):
            _held[place] = file
        else:  # removed with the copy, meanwhile
            file.close()
    os.utime(mark)


def _is_named(file: TextIO, mark: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), mark.stat())
    except FileNotFoundError:
        return False


def _is_held(place: Path) -> bool:
    try:
        with _mark(place).open("r+") as file:
            return not _is_ours(file.fileno())
    except FileNotFoundError:
        return False


def _is_ours(file: int) -> bool:
    """Whether nobody else holds an open file or folder; it is ours then, until it is closed.

    Where a file system has no locks nobody can hold anything.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _remove(place: Path) -> None:
    """Remove a copy unless somebody holds it by now; killed in between, it is none any more."""
    mark = _mark(place)
    with mark.open("a+") as file:
        if not _is_ours(file.fileno()) or not _is_named(file, mark):
            return
        partial = place.with_name(f"{place.name}{PARTIAL}")
        shutil.rmtree(partial, ignore_errors=True)
        if place.exists():
            place.rename(partial)
            shutil.rmtree(partial)
        place.with_name(f"{place.name}{LOCK}").unlink(missing_ok=True)
        mark.unlink()
