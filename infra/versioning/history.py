"""The workspace as a Git repository of small files, one commit a flow: what DVC compares.

DVC keeps data by its hashes; that ``dvc metrics diff``, ``params diff``, ``exp show`` and ``get``
know a yesterday takes a Git history of the files that hold those hashes. No more than these few can
ever be added: all others are ignored.
"""

import shutil
import subprocess
from pathlib import Path

from infra.settings import program_environment

IGNORED = """\
# Written by the flows. Git keeps these small files alone; DVC keeps data and models.
/*
!/.gitignore
!/.dvcignore
!/.dvc
/.dvc/*
!/.dvc/config
!/dvc.yaml
!/dvc.lock
!/params.yaml
!/metrics.json
!/lineage.json
"""
# The user's own settings stay out of it: nobody signs, no hook runs, and a name is there.
OWN = (
    *("-c", "user.name=upcycle", "-c", "user.email=upcycle@localhost"),
    *("-c", "commit.gpgSign=false", "-c", "core.hooksPath=/dev/null"),
    *("-c", "core.excludesFile=", "-c", "core.autocrlf=false"),
)
# Git's, of a commit on main and of `git init`.
LOCKS = ("index.lock", "HEAD.lock", "refs/heads/main.lock", "config.lock")
# Set by a Git that calls us, as from a hook: they would name its repository.
OTHERS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


class History:
    """The Git history of one workspace.

    Args:
        root: The workspace, whose lock is held.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def is_there(self) -> bool:
        """Whether the workspace is a repository of its own."""
        return (self.root / ".git").is_dir()

    def prepare(self) -> None:
        """Make the repository if there is none; without Git there is no history, and no fault."""
        if shutil.which("git") is None:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        ignored = self.root / ".gitignore"
        if not ignored.exists() or ignored.read_text() != IGNORED:
            ignored.write_text(IGNORED)
        if not self.is_there or self._git("rev-parse", "--git-dir").returncode != 0:
            # Again, where a kill or a power cut came into the first time: what is there stays.
            self._remove_empty_head()
            self._remove_locks()
            self._git("init", "--quiet", "--initial-branch=main")

    def commit(self, message: str) -> str | None:
        """Record the small files as they are.

        Args:
            message: What was done.

        Returns:
            What Git says where it could not.
        """
        if not self.is_there or shutil.which("git") is None:
            return None
        self._remove_locks()
        for arguments in (("add", "--all"), ("commit", "--quiet", "--allow-empty", "-m", message)):
            done = self._git(*arguments)
            if done.returncode != 0:
                return " ".join((done.stderr or done.stdout).split())
        return None

    def _remove_locks(self) -> None:
        """Remove what a flow that was killed has left; nobody else is at work here."""
        for lock in LOCKS:
            (self.root / ".git" / lock).unlink(missing_ok=True)

    def _remove_empty_head(self) -> None:
        head = self.root / ".git" / "HEAD"
        if head.is_file() and not head.read_bytes().strip(b"\0\n "):
            head.unlink()

    def _git(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Git in this repository and in no other, also where it is damaged and lies in another."""
        variables = {k: v for k, v in program_environment({}).items() if k not in OTHERS}
        variables["GIT_DIR"] = str(self.root / ".git")
        variables["GIT_WORK_TREE"] = str(self.root)
        words = ["git", *OWN, *arguments]
        return subprocess.run(words, cwd=self.root, env=variables, capture_output=True, text=True)
