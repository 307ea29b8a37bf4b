"""DVC: versions of what stages publish.

Every workspace is a DVC project of its own: its ``dvc.yaml`` and ``params.yaml`` are written from
the stages and the resolved recipe, its ``dvc.lock`` from what was published.
"""

import configparser
import importlib.util
import logging
import os
import re
import subprocess
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from infra.cluster.calls import near, pause
from infra.durable import write_atomically
from infra.recipe.names import masked
from infra.recipe.strict_yaml import Dumper, Loader
from infra.versioning.cache import (
    DELETE_LOCK,
    objects_of,
    recorded_outputs,
    remove_left_lock,
    run_dvc,
    run_near,
)
from infra.versioning.history import History
from infra.versioning.remote import push_to
from upcycle_core.errors import Fault, InputError

# Not "reflink" first: DVC would take every file away for a moment to link it anew, while pieces
# read it. So it links what it finds, where the disk can.
CACHE = {"type": "hardlink, copy"}
REMOTE = "upcycle"
PACKAGES = {
    "azure": "dvc_azure",
    "gdrive": "dvc_gdrive",
    "gs": "dvc_gs",
    "hdfs": "dvc_hdfs",
    "http": "dvc_http",
    "https": "dvc_http",
    "oss": "dvc_oss",
    "s3": "dvc_s3",
    "ssh": "dvc_ssh",
    "webdav": "dvc_webdav",
    "webdavs": "dvc_webdav",
    "webhdfs": "dvc_webhdfs",
}
"""{scheme that DVC knows: what it imports for that}"""
EXTRAS = {"s3": "-e '.[s3]'"}
"""What of them pip is asked for otherwise than by its name: an extra of ours."""
NAMED = "remote"
"""Scheme of a remote that the machine's own settings of DVC describe."""
LOCK_FAULT = re.compile(r"dvc\.lock' validation failed|unable to read: '[^']*dvc\.lock'")
"""What DVC says of a dvc.lock that is YAML, and nothing that it has written."""

NETWORK = re.compile(
    r"cannot connect to host|could not connect|connection (?:was |is )?(?:refused|reset|closed|"
    r"aborted|error|timed out)|connect ?timeout|read ?timeout|timed out|unreachable|broken pipe|"
    r"name resolution|server disconnected|service ?unavailable|slow ?down|request ?time-?out|"
    r"internal server error|bad gateway|gateway time-?out|\b50[0234]\b",
    re.IGNORECASE,
)
"""What DVC and its stores say of a network or a server that may do better in a minute. A password,
a name or a bucket that is wrong is said in other words, and stays wrong."""
WAITS = (5.0, 30.0, 120.0)
"""Seconds before each further try."""
LONGEST_DETAIL = 300
LOST = re.compile(r"^md5: ([0-9a-f]{32}(?:\.dir)?)\b", re.MULTILINE)
"""How DVC names what neither the cache nor a remote has. A push ends well all the same."""

_logger = logging.getLogger(__name__)


class Versions:
    """The DVC project in one workspace. Calls are serialised: DVC holds one lock a project.

    Args:
        root: The workspace.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.history = History(root)
        self._config = root / ".dvc" / "config"
        self._lock = threading.Lock()

    def prepare(self, *, pipeline: str, params: str) -> None:
        """Make the project and its history if there are none, and write what DVC reads.

        Raises:
            InputError: What DVC would read there cannot be read.
        """
        self.history.prepare()
        # Who runs DVC here by hand reports to nobody either, nor leaves a report in /tmp.
        core = {"no_scm": str(not self.history.is_there), "analytics": "False"}
        self._configure({"core": core, "cache": CACHE})
        _write_if_changed(self.root / ".dvcignore", "/.staging\n/.pieces\n/.waiting\n")
        _write_if_changed(self.root / "params.yaml", params)
        _write_if_changed(self.root / "dvc.yaml", pipeline)
        if self._lock.acquire(blocking=False):  # else one of ours is at work
            try:
                remove_left_lock(self.root)
            finally:
                self._lock.release()
        self.recorded()

    def recorded(self) -> set[str]:
        """Stages that dvc.lock names with all that they have made.

        A lock that was cut while it was written may have lost the outputs of its last stage.

        Raises:
            InputError: It cannot be read.
        """
        recorded = recorded_outputs(self.root)
        return {name for name, outs in recorded.items() if outs and all("md5" in o for o in outs)}

    def commit(self, stages: Sequence[str]) -> None:
        """Record the published outputs of ``stages`` (``experts@law``) in cache and dvc.lock."""
        if stages:
            self._dvc("commit", "--force", *stages, is_near=True)

    def push(self, remote: str) -> None:
        """Send what dvc.lock names to ``remote``, an absolute directory or a URL.

        What dvc.yaml has ``push: false`` at stays here. What the cache has lost is recorded anew.
        """
        self._use(remote)
        lost = self._send(remote)
        if lost:
            self._record_again(lost)
            lost = self._send(remote)
        if lost:
            said = "%s lacks %d objects of dvc.lock that the cache has lost, and the workspace too"
            _logger.warning(said, masked(remote), len(lost))

    def _send(self, remote: str) -> set[str]:
        """Run ``dvc push``; returns what of it is nowhere."""
        if "://" in remote:  # who has the keys of a store sends to it
            done = self._dvc("push", waits=WAITS)
        else:
            try:
                with self._lock:  # a folder is of the storage that all share
                    done = near(push_to, self.root, Path(remote))
            except OSError as error:
                remedy = f"cannot be used ({error}); see that its disk is there and has room, and "
                remedy += "run the same again, which sends what is missing"
                raise InputError(Fault("versions.remote", remote, remedy)) from error
            self._raise_failed("push", done)
        return set(LOST.findall(done.stderr + done.stdout))

    def _record_again(self, lost: set[str]) -> None:
        """Take what the cache has lost from the workspace, as far as it is there."""
        for stage, outs in recorded_outputs(self.root).items():
            if any(lost & objects_of(self.root, out) for out in outs):
                with self._lock:  # it may be none of the recipe's any more: the next push tells
                    run_near(self.root, "commit", "--force", stage)

    def pull(
        self,
        lock: str,
        remote: str,
        stages: Mapping[str, str],
        *,
        only: Collection[str] | None = None,
    ) -> None:
        """Bring the outputs of stages from a remote to their places.

        DVC holds every file against the hash that the lock names.

        Args:
            lock: Text of a dvc.lock. It may know stages of domains that have left, and by names
                that they had in an earlier version.
            remote: An absolute directory, or a URL.
            stages: {name: what it publishes} of those of the recipe; what its flow did not run
                stands in no lock.
            only: Names of those that are brought; all by default.

        Raises:
            InputError: Something is not there, or not as it was.
        """
        content = Loader(lock).get_single_data()
        made = {out["path"]: e for e in content["stages"].values() for out in e.get("outs", [])}
        known = {stage: made[out] for stage, out in stages.items() if out in made}
        # A digest of digits and one e stays a text, and 1e-05 a number.
        renamed = yaml.dump({**content, "stages": known}, Dumper=Dumper, sort_keys=False)
        (self.root / "dvc.lock").write_text(renamed)
        self._use(remote, verify=True)
        asked = [stage for stage in known if only is None or stage in only]
        self._dvc("pull", *asked, waits=WAITS if "://" in remote else ())

    def _use(self, remote: str, *, verify: bool = False) -> None:
        place = {"url": _quoted(self._seen(remote)), **({"verify": "True"} if verify else {})}
        self._configure({"core": {"remote": REMOTE}, f"'remote \"{REMOTE}\"'": place})

    def _seen(self, remote: str) -> str:
        """A remote as the project's settings name it: in its home, which may be moved, from there.

        DVC looks for a relative one from the folder of its settings.
        """
        home = self.root.parent.resolve()
        if "://" in remote or not Path(remote).resolve().is_relative_to(home):
            return remote
        return os.path.relpath(Path(remote).resolve(), self._config.parent.resolve())

    def _configure(self, settings: Mapping[str, Mapping[str, str]]) -> None:
        """Add to the project's settings. Each command of DVC takes two seconds to do it, and none
        of them can write a place with letters beyond ASCII in its name.
        """
        self._config.parent.mkdir(parents=True, exist_ok=True)
        config = configparser.ConfigParser(interpolation=None)
        try:
            config.read(self._config, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            remedy = f"cannot be read ({error}); mend it, or remove it to have it written anew"
            raise InputError(Fault("versions", str(self._config), remedy)) from error
        before = {name: dict(section) for name, section in config.items()}
        config.read_dict(settings)
        if before != {name: dict(section) for name, section in config.items()}:
            partial = self._config.with_suffix(".partial")
            with partial.open("w", encoding="utf-8") as file:
                config.write(file)
            partial.replace(self._config)

    def lock_text(self) -> str:
        """Content of dvc.lock; empty before the first commit."""
        lock = self.root / "dvc.lock"
        return lock.read_text() if lock.exists() else ""

    def _dvc(
        self, *arguments: str, waits: Sequence[float] = (), is_near: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run DVC; what the network did is tried again after each of ``waits``, in seconds.

        On a cluster it runs there if ``is_near``.
        """
        call = run_near if is_near else run_dvc
        with self._lock:
            done = call(self.root, *arguments)
            for seconds in waits:
                if done.returncode == 0 or not NETWORK.search(done.stderr + done.stdout):
                    break
                detail = masked(" ".join(done.stderr.split())[-LONGEST_DETAIL:])
                _logger.warning(
                    "dvc %s again in %g s, for it failed: %s", arguments[0], seconds, detail
                )
                pause(seconds)
                done = call(self.root, *arguments)
        self._raise_failed(arguments[0], done)
        return done

    def _raise_failed(self, command: str, done: subprocess.CompletedProcess[str]) -> None:
        """Raise what DVC says of a command that has failed."""
        if done.returncode == 0:
            return
        lines = (done.stderr or done.stdout).strip().splitlines()
        detail = masked(" ".join(lines[-6:]))
        mend = "mend what it says and run the same again"
        if any(LOCK_FAULT.search(line) for line in lines):
            mend = f"dvc.lock is damaged; {DELETE_LOCK}"
        remedy = f"failed in {self.root}: {detail}; {mend}"
        raise InputError(Fault("versions", f"dvc {command}", remedy))


def remote_of(remote: str, home: Path) -> str:
    """A remote as DVC finds it from any folder; a relative directory is seen from ``home``."""
    return remote if "://" in remote else str((home / Path(remote).expanduser()).resolve())


def remote_faults(where: str, remote: str | None, home: Path) -> Iterator[Fault]:
    """What keeps DVC from a remote, named at ``where``, whoever answers there.

    It is said before the work whose results the remote is to hold.

    Args:
        where: Where it is named.
        remote: A directory, or a URL; there may be none.
        home: Where a relative directory is seen from.
    """
    scheme, mark, _ = (remote or "").partition("://")
    scheme = scheme.lower()
    if remote and not mark:
        yield from _file_faults(where, Path(remote_of(remote, home)))
    if not mark or scheme == NAMED:
        return
    package = PACKAGES.get(scheme)
    if package is None:
        remedy = f"no scheme that DVC knows; use one of {', '.join(sorted(PACKAGES))}, or give a "
        yield Fault(where, masked(remote), f"{remedy}directory without one")
    elif importlib.util.find_spec(package) is None:
        asked = EXTRAS.get(scheme, package.replace("_", "-"))
        remedy = f"DVC lacks its package for {scheme}://: "
        remedy += f".venv/bin/pip install -c constraints.txt {asked}"
        yield Fault(where, masked(remote), remedy)


def _file_faults(where: str, directory: Path) -> Iterator[Fault]:
    """A file in the place of a directory, or of one above it: DVC would say so after the work."""
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not there.is_dir():
        which = "is a file" if there == directory else f"lies below {there}, which is a file"
        yield Fault(where, str(directory), f"{which}; name a directory")


def _quoted(place: str) -> str:
    """A place as DVC's settings hold it."""
    quote = "'" if '"' in place else '"'
    if quote in place:
        remedy = "holds both ' and \"; rename it"
        raise InputError(Fault("versions.remote", masked(place), remedy))
    return f"{quote}{place}{quote}"


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_bytes() != text.encode():
        write_atomically(path, text)  # DVC may be reading it


def code_version(root: Path) -> str:
    """Git commit of the checkout, ``-modified`` if its files differ; ``unknown`` without Git."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-modified" if changed else commit


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
