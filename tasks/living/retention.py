"""What a workspace keeps of its past, and what may go: found first, shown, and then removed.

Whatever champion and challenger need stays. Every step can be killed: what is left is whole, and
the next time finds the rest.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from infra.recipe.schema import KeepConfig, Recipe
from infra.tracking.records import Version
from infra.tracking.registry import Registry
from infra.tracking.retention import OURS, Past, Records
from infra.versioning.cache import Cache, Output, outputs, recorded_outputs
from infra.versioning.known import Recorded
from infra.versioning.remote import mend
from infra.versioning.versions import remote_of
from tasks.engine.workspace import PROVENANCE, Workspace
from tasks.living.lineage import modelled
from tasks.methods import every_stage
from tasks.release.history import catch_up, ways_back
from tasks.release.versions import compressed_name
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.text.results import expert_row

BY_DOMAIN = {stage.name for stage in every_stage() if stage.by_domain}
"""Folders with an artifact a domain."""
SCORES = "task_scores"
KEPT = "kept"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spare:
    """Something that may go.

    Args:
        what: Its name, for people.
        why: Why it may go.
        count: Of how many.
        bytes: What its removal frees on the disk; None where that cannot be told.
        free: Removes it.
    """

    what: str
    why: str
    count: int
    bytes: int | None
    free: Callable[[], object]


class Disk:
    """Counts bytes that are freed when files go: once, and only with a file's last name."""

    def __init__(self) -> None:
        self._gone: Counter[tuple[int, int]] = Counter()

    def freed(self, files: Iterable[Path]) -> int:
        """Bytes that go with ``files``, after all that were asked for before."""
        total = 0
        for file in files:
            found = file.lstat()
            inode = (found.st_dev, found.st_ino)
            self._gone[inode] += 1
            if self._gone[inode] == found.st_nlink:
                total += found.st_size
        return total


def spares(
    recipe: Recipe,
    workspace: Workspace,
    records: Records,
    registry: Registry,
    *,
    coming: Collection[str] = (),
) -> Iterator[Spare]:
    """All that may go, in the order in which it is to go. Changes nothing until it is freed.

    Args:
        recipe: Says what stays; with the workspace's lineage.
        workspace: Locked.
        records: Of the workspace's flows in MLflow.
        registry: Where versions carry what they were made from.
        coming: Domains whose growing did not end; what was made for them stays.

    Raises:
        InputError: What a version that stays was made from cannot be read.
    """
    disk = Disk()
    # A deployment may hold the recipe of before a domain was grown. Of a model whose files were
    # lost nobody knows its domains, and what it is made of again stays.
    known = modelled(workspace)
    domains = {*recipe.domains, *known, *coming} if known else None
    names = (recipe.registered_name, compressed_name(recipe))
    past = records.past(recipe.keep, names, recipe=recipe.name, ways_back=ways_back)
    yield from () if domains is None else _artifacts(domains, workspace, disk)
    yield from _pieces(workspace, disk)
    refused: list[str] = []
    yield from _models(past, records, registry, recipe.keep, disk, refused)
    yield from _unless(refused, _runs(past, records, recipe.keep, disk))
    named = [out for version in past.kept for out in _of_version(version, registry)]
    if past.is_unknown:
        unknown = "DVC cache: stays as it is: none of the versions of %s says that %s made it"
        _logger.warning(unknown, recipe.registered_name, recipe.name)
        return
    left = _cache(domains, workspace, named, recipe.versions.remote, disk)
    yield from _unless(refused, left)


def has_left(artifact: str, domains: Iterable[str]) -> bool:
    """Whether ``artifact`` (``experts/law``) is of a domain that is not among ``domains``."""
    folder, _, name = artifact.partition("/")
    if folder == SCORES:
        return name.startswith(expert_row("")) and name not in map(expert_row, domains)
    return folder in BY_DOMAIN and name not in domains


def table(found: Sequence[Spare]) -> list[dict[str, Any]]:
    """Rows for people, with the sum."""
    rows = [_row(s.what, s.why, s.count, s.bytes) for s in found]
    total = sum(spare.bytes or 0 for spare in found)
    return [*rows, _row("all", "", sum(spare.count for spare in found), total)]


def _row(what: str, why: str, count: int, size: int | None) -> dict[str, Any]:
    return {"what": what, "why": why, "count": count, "bytes": "" if size is None else f"{size:,}"}


def _artifacts(domains: Iterable[str], workspace: Workspace, disk: Disk) -> Iterator[Spare]:
    folders = sorted(BY_DOMAIN | {SCORES})
    records = [r for f in folders for r in sorted(workspace.path(f).glob(f"*/{PROVENANCE}"))]
    for directory in (record.parent for record in records):
        artifact = str(directory.relative_to(workspace.root))
        if has_left(artifact, domains):
            yield Spare(
                artifact,
                "its domain is no longer in the model",
                1,
                disk.freed(_files(directory)),
                partial(workspace.take_away, artifact),
            )


def _pieces(workspace: Workspace, disk: Disk) -> Iterator[Spare]:
    stages = list(workspace.pieces.glob("*"))
    if stages:
        yield Spare(
            "finished pieces",
            "of stages that did not end; what they had done is done again",
            len(stages),
            disk.freed(_files(workspace.pieces)),
            workspace.sweep,
        )


def _models(
    past: Past,
    records: Records,
    registry: Registry,
    keep: KeepConfig,
    disk: Disk,
    refused: list[str],
) -> Iterator[Spare]:
    """Versions and stored models; ``refused`` hears of what stays by now."""

    def free(version: Version) -> None:
        # That it was rolled back outlives it. An earlier release has written it nowhere else.
        catch_up(registry, version.name)
        if not records.delete_version(version):
            refused.append(version.reference)

    for version in past.versions:
        yield Spare(
            version.reference,
            f"no alias points at it, and {keep.versions} such versions are newer",
            1,
            disk.freed(records.model_files(version.model_id)),
            partial(free, version),
        )
    for model in past.models:
        yield Spare(
            f"models:/{model}",
            "no version names it: its registration did not end",
            1,
            disk.freed(records.model_files(model)),
            partial(records.delete_model, model),
        )


def _unless(refused: Sequence[str], found: Iterable[Spare]) -> Iterator[Spare]:
    """What goes only if every version went that was to go: one that stays needs it."""

    def free(spare: Spare) -> None:
        if refused:
            stays = "%s: stays this time; an alias points at %s by now, or a process reads it"
            _logger.warning(stays, spare.what, ", ".join(refused))
        else:
            spare.free()

    for spare in found:
        yield replace(spare, free=partial(free, spare))


def _runs(past: Past, records: Records, keep: KeepConfig, disk: Disk) -> Iterator[Spare]:
    def free() -> None:
        for run in past.runs:
            records.delete_run(run)

    if past.runs:
        yield Spare(
            "MLflow runs",
            f"made no version that stays, and {keep.runs} flows ran later",
            len(past.runs),
            disk.freed(file for run in past.runs for file in records.run_files(run)),
            free,
        )


def _cache(
    domains: Iterable[str] | None,
    workspace: Workspace,
    named: Sequence[Output],
    remote: str | None,
    disk: Disk,
) -> Iterator[Spare]:
    cache = Cache(workspace.root, workspace.staging / KEPT)
    here, left = recorded_outputs(workspace.root), set[str]()
    if domains is not None:
        left = {s for s, outs in here.items() if any(has_left(o["path"], domains) for o in outs)}
    kept = [*named, *(out for stage, outs in here.items() if stage not in left for out in outs)]
    unused = cache.unused(kept)

    def free() -> None:
        if remote is not None and "://" not in remote:  # which holds alone what leaves the cache
            mend(workspace.root, Path(remote_of(remote, workspace.root.parent)))
        Recorded(workspace.root).forget(left)  # what comes back is recorded anew
        cache.collect(kept)

    if unused:
        yield Spare(
            "DVC cache",
            "named neither by the workspace nor by a version that stays",
            len(unused),
            disk.freed(unused),
            free,
        )


def _of_version(version: Version, registry: Registry) -> list[Output]:
    """What ``version`` is restored from."""
    lock, recipe = (registry.text(version, file) or "" for file in ("dvc.lock", "recipe.yaml"))
    try:
        every = [out for outs in outputs(lock).values() for out in outs]
        domains = (yaml.safe_load(recipe) or {}).get("domains")
        needed = [out for out in every if not has_left(out["path"], domains or ())]
    except (AttributeError, KeyError, TypeError, yaml.YAMLError):  # not what was written there
        every, domains, needed = [], None, []
    # A power cut may have left a file without its content: it would need nothing.
    if (OURS in version.tags or lock or recipe) and (not every or domains is None):
        remedy = "stays, and its dvc.lock or recipe.yaml is not with it or damaged, so that what "
        remedy += "it needs cannot be told; bring MLflow's files back, or delete the version"
        raise InputError(Fault("version", version.reference, remedy))
    return needed


def _files(directory: Path) -> list[Path]:
    return [file for file in directory.rglob("*") if file.is_file()]
