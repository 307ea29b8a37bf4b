"""A workspace: the folder one recipe's artifacts live in, how they are published and checked."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from infra.cluster.calls import near
from infra.cluster.pieces import remove
from infra.durable import sync_tree, write_atomically
from infra.permissions import permission_faults
from upcycle_core.checkpoints.hashing import sha256_file, tree_digest
from upcycle_core.checkpoints.known import FILE, KnownFiles
from upcycle_core.durable import sync
from upcycle_core.errors import Fault, InputError, raise_faults

PROVENANCE = "provenance.json"
STAGE = ".stage"
"""In a folder of pieces: whose they are."""
RESTORING = ".restoring"
"""In a workspace while a version is brought back into it."""
LINKING = ".linking"
"""In an artifact that is made, while a piece's files are linked into it."""
NO_LINKS = {
    *(errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP),
    *(errno.EXDEV, errno.EMLINK, errno.EINVAL),
}
"""What file systems say that have no hard links, none of such files, or no more of them."""


class Held(InputError):
    """Another process is at work in the workspace."""


class Workspace:
    """Paths of one workspace.

    Args:
        root: The folder; made if it is missing.

    Attributes:
        known: Hashes of files that have not changed since they were read.
    """

    def __init__(self, root: Path) -> None:
        self._named = root.absolute()
        self.root = root.resolve()
        self.staging = self.root / ".staging"
        self.pieces = self.root / ".pieces"
        self.known = KnownFiles(self.models / FILE, near=near)

    @property
    def models(self) -> Path:
        """Where given models are kept, for all workspaces."""
        return self.root.parent / "models"

    def path(self, artifact: str) -> Path:
        """Where ``artifact`` (``experts/law``) is published."""
        return self.root / artifact

    @contextmanager
    def lock(self, holder: str, *, restores: bool = False) -> Iterator[None]:
        """Hold the workspace for this process; the kernel lets go if the process dies.

        Args:
            holder: Who holds it, for the others.
            restores: Whether the holder brings all of it back from a remote.

        Raises:
            Held: If another process holds it.
            InputError: If a symbolic link leads out of it, it is another user's, or a restore that
                was killed has left parts of a version.
        """
        with permission_faults("workspace"):
            raise_faults(self._link_faults())
            self.root.mkdir(parents=True, exist_ok=True)
            opened = (self.root / ".lock").open("a+")
        with opened as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                by = self.holder() or "another process"
                remedy = f"held by {by}; wait until it ends, or stop it"
                raise Held(Fault("workspace", str(self.root), remedy)) from None
            if not restores and (self.root / RESTORING).exists():
                remedy = "holds parts of a version alone: its restore was cut off; run that again"
                raise InputError(Fault("workspace", str(self.root), remedy))
            file.truncate(0)
            with suppress(OSError):  # a full disk holds nobody's name, and is tidied all the same
                os.write(file.fileno(), f"{holder}, process {os.getpid()}".encode())
            self._repair()
            try:
                yield
            finally:
                # What a thread that does not hear of its end was about to make.
                self._repair()
                file.truncate(0)

    def holder(self) -> str:
        """Who holds the workspace; empty if nobody does, or has not said so yet."""
        try:
            return (self.root / ".lock").read_text().strip()
        except FileNotFoundError:
            return ""

    def publish(self, staged: Path, artifact: str, provenance: Mapping[str, Any]) -> None:
        """Put ``staged`` in the place of ``artifact``, so that one of the two is always whole.

        Args:
            staged: Finished directory in ``self.staging``.
            artifact: Its published name.
            provenance: What made it; the files' hashes are added.
        """
        files = tree_digest(staged, exclude=(PROVENANCE,), known=self.known, own=True)
        record = json.dumps({**provenance, "files": files}, indent=1, sort_keys=True)
        (staged / PROVENANCE).write_text(record + "\n")
        sync_tree(staged)
        target, old = self.path(artifact), self._old(artifact)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rename(old)
        staged.rename(target)
        sync(target.parent)
        if old.exists():
            with self.linking([artifact]):  # some of its files may be those of before
                remove(old)

    def stage(self, artifact: str) -> Path:
        """An empty directory to make ``artifact`` in.

        Nobody had it before: what a killed flow sent to a cluster may still write into its own.
        """
        staged = self.staging / f"{_flat(artifact)}.{secrets.token_hex(4)}"
        staged.mkdir(parents=True)
        return staged

    def take_away(self, artifact: str) -> None:
        """Remove a published artifact, whole; the next lock clears away what a kill leaves."""
        leaving = self.stage(artifact)
        self.path(artifact).rename(leaving)
        shutil.rmtree(leaving)

    def record(self, artifact: str) -> dict[str, Any] | None:
        """What was written beside ``artifact`` when it was published, whatever became of its files.

        None if it is absent, or a disk left anything else in its place.
        """
        try:
            record = json.loads((self.path(artifact) / PROVENANCE).read_text())
            return record if isinstance(record["files"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def inputs(self, artifact: str) -> dict[str, str]:
        """{input: sha256} that ``artifact`` was made from; none if that cannot be read."""
        return (self.record(artifact) or {}).get("inputs", {})

    def provenance(self, artifact: str) -> dict[str, Any] | None:
        """What made ``artifact``; None if it is absent or not as it was published."""
        record = self.record(artifact)
        if record is None:
            return None
        files = self._hashes(artifact, record["files"])
        return record if files == record["files"] else None

    def artifact_of(self, path: str) -> str | None:
        """The artifact that an input (``corpora/law/train``) is, or lies in; None if in none."""
        return next((n for n in enclosing(path) if (self.path(n) / PROVENANCE).exists()), None)

    def damaged(self, artifact: str) -> list[Path]:
        """Files of ``artifact`` that are not as they were published."""
        directory = self.path(artifact)
        if not directory.is_dir():
            return []
        record = self.record(artifact)
        if record is None:
            return [directory / PROVENANCE]
        files = self._hashes(artifact, record["files"])
        return [directory / name for name in files if files[name] != record["files"].get(name)]

    def _hashes(self, artifact: str, hidden: Collection[str]) -> dict[str, str]:
        place, own = self.path(artifact), (PROVENANCE,)
        return tree_digest(place, exclude=own, known=self.known, hidden=hidden)

    def digest(self, path: str) -> str | None:
        """Identity of an artifact, a folder in it or a file, as an input; None if it is absent.

        It is that of the bytes, as they were published, whatever made them.
        """
        full = self.path(path)
        if not full.exists():
            return None
        artifact = self.artifact_of(path)
        record = None if artifact is None else self.record(artifact)
        if artifact is None or record is None:
            if full.is_dir():
                return fingerprint(tree_digest(full, known=self.known))
            return self.known.sha256(full)
        files = record["files"]
        if path == artifact:
            return fingerprint(files)
        inside = path.removeprefix(f"{artifact}/")
        if full.is_file():
            return files.get(inside) or self.known.sha256(full)
        below = {n: file for n, file in files.items() if n.startswith(f"{inside}/")}
        return fingerprint({n.removeprefix(f"{inside}/"): file for n, file in below.items()})

    def record_digest(self, artifact: str) -> str | None:
        """sha256 of an artifact's record, its files and what made them; None if it has none.

        Earlier versions called artifacts by it, in lineages and in tags of registered models.
        """
        record = self.path(artifact) / PROVENANCE
        return sha256_file(record) if record.is_file() else None

    def digests(self, artifact: str) -> set[str]:
        """Every digest that names what is published as ``artifact``: of now, and of earlier."""
        now = {self.digest(artifact), self.record_digest(artifact)}
        return {digest for digest in now if digest is not None} | set(self._former(artifact))

    def has_digest(self, artifact: str, digest: str | None) -> bool:
        """Whether ``digest`` names what is published as ``artifact``."""
        return digest in self.digests(artifact)

    def take_over(self, artifact: str, provenance: Mapping[str, Any]) -> None:
        """Record that ``artifact``, whose files are as they were published, is what this makes."""
        record = self.record(artifact)
        assert record is not None  # whose files were just held against it
        former = [*self._former(artifact), *filter(None, [self.record_digest(artifact)])]
        values = {**provenance, "files": record["files"], "former_digests": former}
        text = json.dumps(values, indent=1, sort_keys=True) + "\n"
        write_atomically(self.path(artifact) / PROVENANCE, text)

    @contextmanager
    def linking(self, artifacts: Iterable[str]) -> Iterator[None]:
        """Know the files of ``artifacts`` again, which are linked to from elsewhere meanwhile."""
        folders = [self.path(artifact) for artifact in artifacts]
        with self.known.linking([file for folder in folders for file in folder.rglob("*")]):
            yield

    def _former(self, artifact: str) -> list[str]:
        return (self.record(artifact) or {}).get("former_digests", [])

    def pieces_of(self, label: str, mark: str) -> Path:
        """Where a stage's run keeps its pieces until it is published; made, with the stage's name.

        Args:
            label: The stage's, with its item.
            mark: Fingerprint of the run.
        """
        folder = self.pieces / mark
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / STAGE, label)
        return folder

    def sweep(self, made: Collection[str] | None = None) -> int:
        """Delete pieces that nothing goes on from; returns the bytes freed.

        Args:
            made: Labels of stages that are up to date: what they left on the way. What another
                stopped flow goes on from stays. All is deleted by default.
        """
        freed = 0
        for folder in list(self.pieces.glob("*")):
            stage = folder / STAGE
            if made is None or not stage.is_file() or stage.read_text() in made:
                files = [f.stat() for f in folder.rglob("*") if f.is_file()]
                freed += sum(status.st_size for status in files if status.st_nlink == 1)
                shutil.rmtree(folder, ignore_errors=True)
        return freed

    def _link_faults(self) -> Iterator[Fault]:
        """What would be written elsewhere. Artifacts lie two levels deep at most; a file of theirs
        is replaced, never written to, and DVC may link it to its cache."""
        if self._named.is_symlink():
            remedy = f"a symbolic link to {self.root}; move that here, or name its parent as "
            yield Fault("workspace", str(self._named), remedy + "UPCYCLE_HOME")
        folders = (entry for entry in self.root.glob("*/*") if entry.is_dir())
        for entry in sorted([*self.root.glob("*"), *folders]):
            if entry.is_symlink() and not entry.resolve().is_relative_to(self.root):
                remedy = f"a symbolic link out of the workspace, to {entry.resolve()}; remove it"
                yield Fault("workspace", str(entry), remedy)

    def _old(self, artifact: str) -> Path:
        return self.staging / f"{_flat(artifact)}.old"

    def _repair(self) -> None:
        """Finish or undo what was left half done: an artifact moved aside goes back."""
        if not self.staging.exists():
            return
        for old in self.staging.glob("*.old"):
            target = self.path(old.name.removesuffix(".old").replace("@", "/"))
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                old.rename(target)
        shutil.rmtree(self.staging, ignore_errors=True)


def enclosing(path: str) -> Iterator[str]:
    """``path`` and all that it lies in, the innermost first."""
    parts = path.split("/")
    return ("/".join(parts[:length]) for length in range(len(parts), 0, -1))


def fingerprint(parts: Mapping[str, Any]) -> str:
    """sha256 of plain values, whatever their order."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def take(source: Path, target: Path) -> None:
    """Bring the content of ``source`` into the directory ``target``; a file brings itself.

    As hard links where there are any: the piece is finished still if what comes after it fails.
    Else it is moved, and a kill on the way leaves no half of ``source`` that a finished piece could
    be taken for.
    """
    if _linked(source, target):
        return
    if source.is_file():
        shutil.move(source, target / source.name)
        return
    leaving = source.with_name(f"{source.name}.taken")
    shutil.rmtree(leaving, ignore_errors=True)
    source.rename(leaving)
    for entry in sorted(leaving.iterdir()):
        if entry.name != PROVENANCE:
            shutil.move(entry, target / entry.name)
    shutil.rmtree(leaving)


def _linked(source: Path, target: Path) -> bool:
    """Whether all that is in ``source`` is in ``target`` as well now; else nothing is."""
    aside = target / LINKING
    aside.mkdir()
    try:
        if source.is_file():
            os.link(source, aside / source.name)
        for entry in sorted(source.rglob("*")):
            place = aside / entry.relative_to(source)
            if entry.is_dir() and not entry.is_symlink():
                place.mkdir()
            elif entry != source / PROVENANCE:
                os.link(entry, place, follow_symlinks=False)
    except OSError as error:
        shutil.rmtree(aside)
        if error.errno in NO_LINKS:
            return False
        raise
    for entry in aside.iterdir():
        entry.rename(target / entry.name)
    aside.rmdir()
    return True


def _flat(artifact: str) -> str:
    return artifact.replace("/", "@")
