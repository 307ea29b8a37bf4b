"""``dvc commit`` of several stages that writes dvc.lock once. Checked with DVC 3.67.

    python -P infra/versioning/commit.py commit --force STAGE ...

DVC reads and writes the whole lock for each stage that it is told to commit, in Python alone: a
second for a hundred kilobytes, and a lock grows with its stages. Here what it would write is kept
until the last one. And DVC writes over the lock: what a kill or Ctrl-C leaves of it is YAML too, in
which stages are missing and the last has no outputs. Here a whole one takes its place. All else is
DVC's own command. ``USES`` is as in ``infra.tracking.private``.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dvc.cli import main
from dvc.commands.commit import CmdCommit
from dvc.dvcfile import ProjectFile
from dvc.repo import lock_repo
from dvc.utils.serialize import _common

USES = {
    "dvc.cli:main": "the command",
    "dvc.commands.commit:CmdCommit": "holds what it runs",
    "dvc.commands.commit:CmdCommit.run": "commits one stage after the other",
    "dvc.dvcfile:ProjectFile": "is dvc.yaml with its lock",
    "dvc.dvcfile:ProjectFile.dump_stages": "writes stages into the lock",
    "dvc.utils.serialize:_common": "holds how files of a project are written",
    "dvc.utils.serialize._common:_dump_data": "writes a YAML file",
    "dvc.repo:lock_repo": "holds the project from the first stage to the lock's end",
}
"""{module:name: what it is for}."""
_commit_each = CmdCommit.run


def commit_together(command: Any) -> int:
    """Commit every target, then write the lock of those that went well."""
    with lock_repo(command.repo), _kept():
        return _commit_each(command)


@contextmanager
def _kept() -> Iterator[None]:
    """What is written of stages is written at the end, file by file."""
    write, kept = ProjectFile.dump_stages, defaultdict(list)

    def keep(file: Any, stages: list[Any], **settings: Any) -> None:
        kept[file.path].append((file, stages, settings))

    kind: Any = ProjectFile
    kind.dump_stages = keep
    try:
        yield
    finally:
        kind.dump_stages = write
        for dumps in kept.values():
            file, _, settings = dumps[-1]
            write(file, [stage for _, stages, _ in dumps for stage in stages], **settings)


def dump_whole(path: Any, data: Any, dumper: Any, fs: Any = None, **options: Any) -> None:
    """Write a file of the project's beside it, and put it in its place when it is on the disk."""
    target = Path(path).absolute()
    partial = target.parent / ".dvc" / "tmp" / f"{target.name}.partial"
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w", encoding="utf-8") as file:
        dumper(data, file, **options)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)


if __name__ == "__main__":
    kind: Any = CmdCommit
    kind.run = commit_together
    writers: Any = _common
    writers._dump_data = dump_whole
    sys.exit(main())
