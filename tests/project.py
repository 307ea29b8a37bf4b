"""Runs the project as a user does: commands in processes of their own."""

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from databases import with_database
from prefect_server import prefect_server

from tests import warm

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600


class Project:
    """A home folder and a recipe, and the commands a user would type.

    Args:
        folder: Temporary folder; ``folder/home`` becomes the home.
        recipe: A recipe file.
        name: The recipe's name.
        module: The flow that it is for.
        own_server: Whether each flow brings its own Prefect server and makes its own database, as
            users' flows do where none is; else they share one, and begin with tables.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Path,
        name: str = "pico",
        module: str = "flows.dume",
        own_server: bool = False,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.module = module
        self.own_server = own_server
        self.home = folder / "home"
        self.recipe = recipe
        self.workspace = self.home / name
        self.calls_file = folder / "calls"

    def environment(self, **more: str) -> dict[str, str]:
        """Of every process: this home, and the watcher of ``watching/sitecustomize.py``."""
        watching = str(ROOT / "tests" / "watching")
        own = {
            "UPCYCLE_HOME": str(self.home),
            "PREFECT_HOME": str(self.home / "prefect"),
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.home / 'mlflow' / 'mlflow.db'}",
            "UPCYCLE_TEST_CALLS": str(self.calls_file),
            "PYTHONPATH": os.pathsep.join([watching, str(ROOT)]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        if not self.own_server:
            own["PREFECT_API_URL"] = prefect_server()
        return {**os.environ, **own, **more}

    def flow(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``python -m flows.dume RECIPE ...``, or another flow."""
        return self.run(
            sys.executable, "-m", self.module, str(self.recipe), *arguments, check=check
        )

    def refused(self, *arguments: str, module: str = "", recipe: Path | None = None) -> str:
        """What a command says of bad input; in this process, for another takes ten seconds."""
        main = importlib.import_module(module or self.module).main
        with (
            pytest.MonkeyPatch.context() as patched,
            contextlib.redirect_stderr(io.StringIO()) as said,
        ):
            for name, value in self.environment().items():
                patched.setenv(name, value)
            assert main([str(recipe or self.recipe), *arguments]) == 2, said.getvalue()
        return said.getvalue()

    def run(
        self, *command: str, check: bool = True, cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        """Any command; its output is shown if it fails."""
        if not self.own_server:
            with_database(self.home)
        env = self.environment()
        given: Any = {"cwd": cwd, "env": env, "timeout": TIMEOUT}
        # What is watched as it is imported has to be imported anew.
        if self.own_server or "UPCYCLE_TEST_READS" in env or command[0] != sys.executable:
            done = subprocess.run(command, capture_output=True, text=True, **given)
        else:
            env["UPCYCLE_TEST_WARM"] = warm.address()
            done = warm.run(command[1:], **given)
        if check and done.returncode != 0:
            raise AssertionError(f"{command} failed\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done

    def kill_flow(self, pause: str, *arguments: str) -> None:
        """Start the flow, let a piece pause (``WHAT:N``), and kill the flow's process there."""
        paused = self.calls_file.with_name("calls.paused")
        paused.unlink(missing_ok=True)
        flow = subprocess.Popen(
            [sys.executable, "-m", self.module, str(self.recipe), *arguments],
            cwd=ROOT,
            env=self.environment(UPCYCLE_TEST_PAUSE=pause),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            deadline = time.monotonic() + TIMEOUT
            while not paused.exists():
                if flow.poll() is not None:
                    raise AssertionError(f"ended before it paused\n{flow.stdout.read()[-4000:]}")
                assert time.monotonic() < deadline, f"never paused at {pause}"
                time.sleep(0.05)
        finally:
            flow.send_signal(signal.SIGKILL)
            flow.wait()

    def calls(self) -> Counter[str]:
        """Core functions called since the last look."""
        if not self.calls_file.exists():
            return Counter()
        names = self.calls_file.read_text().split()
        self.calls_file.unlink()
        return Counter(names)

    def digests(self) -> dict[str, str]:
        """sha256 of every published file, those that name a fingerprint included."""
        from upcycle_core.checkpoints.hashing import tree_digest

        return {
            f"{artifact}/{name}": digest
            for artifact in (
                "documents",
                "tokenizer",
                "corpora",
                "seed",
                "experts",
                "backbone",
                "repaired",
                "statistics",
                "router",
                "routed",
                "vocabulary",
                "united",
                "pairs",
                "starts",
                "model",
                "report",
            )
            if (self.workspace / artifact).exists()
            for name, digest in tree_digest(self.workspace / artifact).items()
        }
