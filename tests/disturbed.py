"""Flows that are held at chosen moments, so that something can be done to them there."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from project import ROOT, TIMEOUT, Project

HOLDS = {
    # The seed has 20 steps, so only experts come to a 21st; their last checkpoint is step 20.
    "experts": "training:21",
    "statistics": "statistics:1",
    "assembly": "assembly:1",
    "registration": "create_model_version",
    "promotion": "set_registered_model_alias",
}
"""What each phase is held at: the progress of a piece, or a call of MLflow's client."""
Disturb = Callable[[subprocess.Popen, int], int]
"""Gets the flow and the process that waits; returns how many processes it ended."""


class Disturbed(Project):
    """A project whose flows wait at the phases of ``HOLDS``, each once, until they are let go.

    Args:
        folder: As for ``Project``.
        recipe: As for ``Project``.
        own_server: As for ``Project``.
        environment: Variables of every process.
    """

    def __init__(
        self, folder: Path, recipe: Path, *, own_server: bool = False, **environment: str
    ) -> None:
        super().__init__(folder, recipe, own_server=own_server)
        self.more = environment
        self.killed: dict[str, int] = {}

    def environment(self, **more: str) -> dict[str, str]:
        """As the project's, with ``disturbing/sitecustomize.py`` before that of ``watching``."""
        found = super().environment(**{**self.more, **more})
        disturbing = str(ROOT / "tests" / "disturbing")
        return found | {"PYTHONPATH": os.pathsep.join([disturbing, found["PYTHONPATH"]])}

    def start(self, *phases: str, **more: str) -> subprocess.Popen:
        """Start the flow; it will wait at ``phases``."""
        holds = ",".join(f"{phase}={HOLDS[phase]}" for phase in phases)
        with self.calls_file.with_name("output").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", self.module, str(self.recipe)],
                cwd=ROOT,
                env=self.environment(UPCYCLE_TEST_HOLDS=holds, **more),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def held(self, phase: str) -> int | None:
        """The process that waits, or has waited, at a phase."""
        file = self.calls_file.with_name(f"held-{phase}")
        text = file.read_text() if file.exists() else ""
        return int(text) if text else None

    def let_go(self, phase: str) -> None:
        """Let what waits at a phase go on."""
        self.calls_file.with_name(f"go-{phase}").touch()

    def wait_for(self, flow: subprocess.Popen, phase: str) -> int | None:
        """Wait until the flow comes to a phase; returns who waits there, or None if it ended."""
        deadline = time.monotonic() + TIMEOUT
        while (process := self.held(phase)) is None and flow.poll() is None:
            assert time.monotonic() < deadline, f"never came to {phase}\n{self.said()}"
            time.sleep(0.05)
        return process

    def said(self) -> str:
        """The end of what the flows printed."""
        return self.calls_file.with_name("output").read_text(errors="replace")[-6000:]

    def run_through(
        self,
        kills: Mapping[str, Disturb],
        before: Callable[[], None] = lambda: None,
    ) -> int:
        """Run the flow, disturb it once at each phase, and start it again whenever it has ended.

        Args:
            kills: For each phase, in their order, what gets the flow and the process that waits.
            before: Called before each start.

        Returns:
            How often it was started until it ended well.
        """
        rest = list(kills)
        for starts in range(1, len(kills) + 3):
            before()
            flow = self.start(*rest)
            try:
                while rest and (process := self.wait_for(flow, rest[0])) is not None:
                    self.killed[rest[0]] = kills[rest[0]](flow, process)
                    self.let_go(rest.pop(0))
                if flow.wait(TIMEOUT) == 0:
                    assert not rest, f"never came to {rest}\n{self.said()}"
                    return starts
            finally:
                flow.kill()
                flow.wait()
        raise AssertionError(f"does not end well\n{self.said()}")


def kill(pid: int) -> bool:
    """SIGKILL, and wait until it has ended, by whomever it is reaped; whether it was there."""
    try:
        process = psutil.Process(pid)
        process.kill()
    except psutil.NoSuchProcess:
        return False
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
    return True


def kill_flow(flow: subprocess.Popen, holder: int) -> int:
    """End the flow's own process."""
    flow.kill()
    flow.wait()
    return 1


def kill_worker(flow: subprocess.Popen, holder: int) -> int:
    """End the worker that computes, or else one that waits for work."""
    workers = below(flow.pid, "ray::")
    assert holder == flow.pid or holder in workers, "who computes is no worker of Ray"
    return sum(map(kill, [holder] if holder in workers else workers[:1]))


def kill_prefect(flow: subprocess.Popen, holder: int) -> int:
    """End the Prefect server that the flow has brought along, if it is still there."""
    return sum(map(kill, below(flow.pid, "prefect.server.api.server")))


def below(pid: int, command: str = "") -> list[int]:
    """Processes below another whose command line has ``command`` in it."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            found += [process.pid] if command in " ".join(process.cmdline()) else []
        except psutil.Error:
            continue
    return found
