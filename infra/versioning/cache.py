"""The DVC cache of a workspace: which of its objects nothing names any more, and their removal."""

import json
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import yaml

from infra.cluster.calls import near, run_program
from infra.durable import read_json
from infra.settings import dvc_environment
from upcycle_core.errors import Fault, InputError

Output = Mapping[str, Any]
"""An output as dvc.lock names it: ``path``, ``md5``, ..."""
OBJECTS = Path("files", "md5")
"""Where the objects are, in a remote and in a cache."""
DAMAGED = re.compile(r"file is not a database|database disk image is malformed")
"""What SQLite says of a database in DVC's site cache."""
REMOVING = re.compile(r"^Removing (/.*)$", re.MULTILINE)
CONFIG = '[core]\n    no_scm = True\n    analytics = false\n    site_cache_dir = "{site}"\n'
CACHE = '[cache]\n    dir = "{cache}"\n'
COMMAND = Path(__file__).with_name("dvc_command.py")
"""DVC's, but for when it reads and writes a project's files."""
DELETE_LOCK = "delete it: the next run writes it again, from what is published"
"""What to do about a dvc.lock that is damaged."""
# Ten times as fast, where there is one: locks have thousands of lines.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def outputs(lock: str) -> dict[str, list[Output]]:
    """{stage: its outputs} of a dvc.lock's text."""
    return {name: entry.get("outs", []) for name, entry in _entries(lock).items()}


def _entries(lock: str) -> dict[str, dict[str, Any]]:
    loader = LOADER(lock)
    try:
        return (loader.get_single_data() or {}).get("stages", {})
    finally:
        loader.dispose()


def recorded_outputs(root: Path) -> dict[str, list[Output]]:
    """{stage: its outputs} of a workspace's dvc.lock; empty before the first commit.

    Raises:
        InputError: It cannot be read.
    """
    return {name: entry.get("outs", []) for name, entry in _recorded(root).items()}


def behind(root: Path) -> set[str]:
    """Stages of a workspace's dvc.lock that have read what stands in it otherwise by now.

    Raises:
        InputError: It cannot be read.
    """
    entries = _recorded(root)
    made = {out["path"]: out.get("md5") for e in entries.values() for out in e.get("outs", [])}
    return {
        name
        for name, entry in entries.items()
        for dep in entry.get("deps", [])
        if dep["path"] in made and made[dep["path"]] != dep.get("md5")
    }


def _recorded(root: Path) -> dict[str, dict[str, Any]]:
    lock = root / "dvc.lock"
    try:
        entries = _entries(lock.read_text()) if lock.exists() else {}
        return {name: {**entry} for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        detail = " ".join(str(error).split())
        remedy = f"cannot be read ({detail}); {DELETE_LOCK}"
        raise InputError(Fault("versions", str(lock), remedy)) from error


def objects_of(root: Path, out: Output) -> set[str]:
    """md5 of what an output is kept as: its own, and of a folder those that the cache lists in it.

    Args:
        root: The workspace.
        out: As its dvc.lock names it.
    """
    md5 = out.get("md5", "")
    kept = root / ".dvc" / "cache" / OBJECTS / md5[:2] / md5[2:]
    listed = read_json(kept) if md5.endswith(".dir") else None
    return {md5, *(entry["md5"] for entry in listed or ())}


def drop_linked(root: Path, damaged: Iterable[Path]) -> None:
    """Remove from the cache what shares its bytes with damaged files.

    DVC links what it keeps to the workspace, and takes a read-only object for a whole one: damage
    would come back from the cache.

    Args:
        root: The workspace, whose lock is held.
        damaged: Files that are not what they were when DVC recorded them.
    """
    linked = {_inode(file) for file in damaged if file.is_file() and file.stat().st_nlink > 1}
    for kept in (root / ".dvc" / "cache").rglob("*") if linked else ():
        if kept.is_file() and _inode(kept) in linked:
            kept.unlink()


def remove_left_lock(root: Path) -> None:
    """Remove the record of who reads and writes which path that a killed DVC has left.

    DVC takes a process that has the same id by now for its writer, and refuses a record that a
    power cut emptied.

    Args:
        root: The workspace, whose lock is held.
    """
    record = root / ".dvc" / "tmp" / "rwlock"
    try:
        held = json.loads(record.read_text())
        readers = [holder for holders in held.get("read", {}).values() for holder in holders]
        left = not any(
            _is_dvc(holder["pid"]) for holder in (*held.get("write", {}).values(), *readers)
        )
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # not what DVC wrote there
        left = True
    if left:
        record.unlink()


def _is_dvc(pid: int) -> bool:
    """Whether a process is DVC at work, as we or a user run it."""
    try:
        words = psutil.Process(pid).cmdline()
    except (psutil.Error, ValueError):
        return False
    return bool({"dvc", COMMAND.name} & {Path(word).name for word in words})


def _inode(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino


class Cache:
    """What DVC has kept of a workspace.

    DVC's own collector decides: it is given a project of its own over the same cache, which names
    what is to stay. So neither the workspace's dvc.yaml nor how old versions were made matters. A
    cache that projects share lies elsewhere, and stays as it is.

    Args:
        root: The workspace, whose lock is held.
        scratch: A folder for that project; nothing lies there yet.
    """

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.scratch = root, scratch
        self.directory = root / ".dvc" / "cache"

    def unused(self, kept: Iterable[Output]) -> list[Path]:
        """Objects that are not of ``kept``. Changes nothing."""
        if not self.directory.is_dir():
            return []
        return [Path(path) for path in REMOVING.findall(self._collect(kept, "--dry"))]

    def collect(self, kept: Iterable[Output]) -> None:
        """Remove every object that is not of ``kept``."""
        self._collect(kept)

    def _collect(self, kept: Iterable[Output], *options: str) -> str:
        shutil.rmtree(self.scratch, ignore_errors=True)
        (self.scratch / ".dvc").mkdir(parents=True)
        try:
            config = CONFIG.format(site=self.scratch / "site") + CACHE.format(cache=self.directory)
            (self.scratch / ".dvc" / "config").write_text(config)
            outs = list({out["md5"]: out for out in kept if "md5" in out}.values())
            pipeline = {f"kept-{i}": {"cmd": "true", "outs": [f"{i}"]} for i in range(len(outs))}
            lock = {
                f"kept-{i}": {"cmd": "true", "outs": [{**out, "path": f"{i}"}]}
                for i, out in enumerate(outs)
            }
            # As JSON, which is YAML: DVC must not read the digest 12e34 as a number.
            (self.scratch / "dvc.yaml").write_text(json.dumps({"stages": pipeline}))
            (self.scratch / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": lock}))
            arguments = ("gc", "--workspace", "--force", *options)
            done = run_dvc(self.scratch, *arguments)
            if done.returncode != 0:
                detail = " ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
                remedy = f"failed for {self.directory}: {detail}; nothing that is named was removed"
                raise InputError(Fault("versions", f"dvc {' '.join(arguments)}", remedy))
            return done.stdout
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)


def run_dvc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run DVC in ``folder``, to its end; once more where a database of its site cache is damaged.

    What it remembers, it finds out again. It waits for another DVC there, a user's or one that
    outlives its flow: of itself, it waits for three seconds.
    """
    command = [sys.executable, "-P", str(COMMAND), "--wait-for-lock", *arguments]
    variables = dvc_environment(folder)
    done = run_program(command, folder=folder, environment=variables)
    if done.returncode != 0 and DAMAGED.search(done.stderr + done.stdout):
        remove_damaged(Path(variables["DVC_SITE_CACHE_DIR"]))
        done = run_program(command, folder=folder, environment=variables)
    return done


def remove_damaged(site: Path) -> None:
    """Remove what DVC remembers of each project one of whose databases is damaged.

    Args:
        site: DVC's site cache; a folder below its ``repo`` is one project's.
    """
    for project in (site / "repo").glob("*"):
        if any(_is_damaged(database) for database in project.rglob("*.db")):
            shutil.rmtree(project, ignore_errors=True)


def _is_damaged(database: Path) -> bool:
    try:
        with closing(sqlite3.connect(database)) as connection:
            return connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",)
    except sqlite3.OperationalError:  # it is locked, or another user's
        return False
    except sqlite3.DatabaseError:
        return True


def run_near(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run DVC as ``run_dvc`` does, on a machine of the cluster where the flow has one."""
    return near(run_dvc, folder, *arguments)
