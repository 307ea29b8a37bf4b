"""A page of commands and what they print: run as a user types them, in a home of their own."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT

PORTS = {"UPCYCLE_PREFECT_PORT": "14200", "UPCYCLE_MLFLOW_PORT": "15000"}
API = f"http://127.0.0.1:{PORTS['UPCYCLE_PREFECT_PORT']}/api"
PATIENCE_SECONDS = 3600.0
"""For a scheduled run to end."""
LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \| ")
LONGEST_LINE = 400
"""What is longer is cut: a run's parameters are its recipe."""
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Page:
    """A home, and the page about what is done there, written anew after each command.

    Args:
        folder: The home.
        file: The page.
        head: What stands above all.
    """

    def __init__(self, folder: Path, file: Path, head: str) -> None:
        self.folder, self.file = folder, file
        self.parts = [head]
        self.seconds: dict[str, float] = {}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))},
            **PORTS,
            "UPCYCLE_HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "140",
        }

    def recipe(self, name: str) -> Path:
        """Where a recipe of the page lies."""
        return self.folder / f"{name}.yaml"

    def title(self, text: str) -> None:
        """A section."""
        self.parts.append(f"## {text}\n")

    def say(self, text: str) -> None:
        """A paragraph."""
        self.parts.append(f"{_wrapped(text)}\n")
        self.write()

    def code(self, text: str, language: str = "") -> None:
        """A block as it is."""
        said = text.replace(str(self.folder), "FOLDER")
        self.parts.append(f"```{language}\n{said}\n```\n")
        self.write()

    def show(self, command: str, shown: str | None = None) -> None:
        """Run a command of the page in the home, or in the checkout where it is `make`'s.

        Args:
            command: As the page shows it.
            shown: Its output; what it prints by default.
        """
        is_ours = command.startswith(("make", ".venv", "PREFECT_API_URL"))
        real = re.sub(r"RECIPE=(\w+)", rf"RECIPE={self.folder}/\1", command)
        done = self.call(["bash", "-c", real], cwd=ROOT if is_ours else self.folder)
        self.printed(command, done.stdout if shown is None else shown)

    def flow(self, module: str, *arguments: str, log: re.Pattern[str] | None = None) -> None:
        """Run a flow, which may say no.

        Args:
            module: The command.
            *arguments: As the page shows them: files and folders lie in the home.
            log: What is shown of its log.
        """
        done = self.call(self.command(module, *arguments), is_checked=False)
        lines = [line for line in done.stderr.splitlines() if log is not None and log.search(line)]
        said = done.stdout
        if done.returncode:
            said += "\n".join(line for line in done.stderr.splitlines() if not LOG_LINE.match(line))
            said += f"\n(code {done.returncode})"
        self.printed(
            f".venv/bin/python -m {module} {shlex.join(arguments)}", "\n".join([*lines, said])
        )

    def command(self, module: str, *arguments: str) -> list[str]:
        """With the places of the home's files."""
        own = [
            str(self.folder / a) if a.endswith(".yaml") or a == "elsewhere" else a
            for a in arguments
        ]
        return [sys.executable, "-m", module, *own]

    def start(self, module: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Begin a flow beside what follows."""
        return subprocess.Popen(
            self.command(module, *arguments),
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def quietly(self, module: str, *arguments: str) -> None:
        """Run a command that the page does not show."""
        self.call(self.command(module, *arguments))

    def quietly_python(self, program: str) -> None:
        """Run a program that the page does not show."""
        self.call([sys.executable, "-c", program])

    def call(
        self, command: Sequence[str], *, cwd: Path = ROOT, is_checked: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command.

        Raises:
            RuntimeError: It failed.
        """
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True
        )
        name = " ".join(Path(word).name for word in command)[:80]
        self.seconds[name] = time.monotonic() - began
        print(
            f"{self.seconds[name]:6.0f} s  {done.returncode}  {name}", file=sys.stderr, flush=True
        )
        if is_checked and done.returncode:
            raise RuntimeError(f"{name} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return done

    def printed(self, command: str, output: str) -> None:
        """A command and what it printed, with the home as FOLDER, empty lines left out."""
        text = output.replace(sys.executable, ".venv/bin/python").replace(f"{ROOT}/", "")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        lines = [line if len(line) < LONGEST_LINE else f"{line[:100]} ..." for line in lines]
        self.code("\n".join([f"$ {command}", *lines]))

    def runs(self) -> dict[str, Mapping[str, Any]]:
        """{id: run} of all flow runs that Prefect knows."""
        request = urllib.request.Request(
            f"{API}/flow_runs/filter",
            data=json.dumps({"sort": "START_TIME_ASC", "limit": 200}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return {run["id"]: run for run in json.load(answer)}

    def ended(self, known: Mapping[str, Any], *, count: int) -> None:
        """Wait until ``count`` runs that are not of ``known`` have ended."""

        def is_over() -> bool:
            mine = [run for id, run in self.runs().items() if id not in known]
            return sum(run["state_type"] in ENDED for run in mine) >= count

        self.until(is_over, f"{count} runs that have ended")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for something.

        Raises:
            RuntimeError: It takes too long.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            if time.monotonic() > end:
                raise RuntimeError(f"not seen within {PATIENCE_SECONDS:.0f} s: {what}")
            time.sleep(2)

    def table(self, known: Mapping[str, Any]) -> None:
        """Runs that are not of ``known``: name, state, message."""
        rows = ["| run | state | says |", "| --- | --- | --- |"]
        for id, run in self.runs().items():
            state = run["state"] or {}
            if id not in known and state.get("type") in ENDED:
                said = " ".join((state.get("message") or "").split()).replace("|", "/")[:120]
                said = said.replace(str(self.folder), "FOLDER")
                rows.append(f"| {run['name']} | {state['name']} | {said} |")
        self.parts.append("\n".join(rows) + "\n")
        self.write()

    def write(self) -> None:
        """The page as far as it is."""
        self.file.write_text("\n".join(self.parts))


def _wrapped(text: str, width: int = 120) -> str:
    """A paragraph in lines."""
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))
