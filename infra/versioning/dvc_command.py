"""DVC's command, for projects of many stages. Checked with DVC 3.67.

    python -P infra/versioning/dvc_command.py commit --force STAGE ...

DVC reads and writes the whole lock for each stage that it is told of, in Python alone: a second for
a hundred kilobytes, and a lock grows with its stages. Here a text is read once, and what DVC would
write of stages is kept until the last one. And DVC writes over the lock: what a kill or Ctrl-C
leaves of it is YAML too, in which stages are missing and the last has no outputs. Here a whole one
takes its place. All else is DVC's own. ``USES`` is as in ``infra.tracking.private``.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dvc.cli import main
from dvc.commands.commit import CmdCommit
from dvc.dvcfile import ProjectFile
from dvc.repo import lock_repo
from dvc.utils import strictyaml
from dvc.utils.serialize import _common, _yaml

USES = {
    "dvc.cli:main": "the command",
    "dvc.commands.commit:CmdCommit": "holds what it runs",
    "dvc.commands.commit:CmdCommit.run": "commits one stage after the other",
    "dvc.dvcfile:ProjectFile": "is dvc.yaml with its lock",
    "dvc.dvcfile:ProjectFile.dump_stages": "writes stages into the lock",
    "dvc.utils.serialize:_common": "holds how files of a project are written",
    "dvc.utils.serialize:_yaml": "holds how they are read",
    "dvc.utils.serialize._yaml:parse_yaml": "reads a text",
    "dvc.utils:strictyaml": "holds how those are read that have a schema, and what is wrong in one",
    "dvc.utils.strictyaml:parse_yaml": "the same function, under a name of its own",
    "dvc.utils.strictyaml:parse_yaml_for_update": "reads one again, to say where it is wrong",
    "dvc.utils.serialize._common:_dump_data": "writes a YAML file",
    "dvc.repo:lock_repo": "holds the project from the first stage to the lock's end",
}
"""{module:name: what it is for}."""
LOCK = "dvc.lock"
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


class ReadOnce:
    """``parse_yaml`` that reads a text once: DVC reads the whole project anew for each stage.

    And the lock is read without its comments, which it has none of, where it is written anew: a
    tenth of the time.
    """

    def __init__(self, parse: Callable[..., Any]) -> None:
        self._parse = parse
        self._known: dict[str, Any] = {}

    def __call__(self, text: str, path: Any, typ: str = "safe") -> Any:
        """What ``text`` holds; the caller may change it."""
        if typ != "safe" and Path(path).name != LOCK:
            return self._parse(text, path, typ=typ)
        if text not in self._known:
            self._known[text] = self._parse(text, path)
        return _copy(self._known[text])


def _copy(value: Any) -> Any:
    """What YAML holds, ten times as fast as ``deepcopy``."""
    if isinstance(value, dict):
        return {key: _copy(own) for key, own in value.items()}
    return [_copy(own) for own in value] if isinstance(value, list) else value


if __name__ == "__main__":
    readers: Any = (_yaml, strictyaml)
    parse, once = _yaml.parse_yaml, ReadOnce(_yaml.parse_yaml)
    for reader in readers:
        reader.parse_yaml = once
    readers[1].parse_yaml_for_update = partial(parse, typ="rt")  # it says where a fault is
    kind: Any = CmdCommit
    kind.run = commit_together
    writers: Any = _common
    writers._dump_data = dump_whole
    sys.exit(main())
