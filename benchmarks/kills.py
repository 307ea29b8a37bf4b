"""Flows that are killed at random moments, and files with flipped bytes: the same bytes in the end?

    python -m benchmarks.kills [--kills N] [--flips N] [--flows dume symphony ...] [--minutes M]

Six flows on small models: ``dume``, ``symphony``, ``ders``, ``simoe``, ``retrain`` and ``grow``;
the last two begin with a model that is there. Each runs once in peace. Then it is started again and
again in a copy of where it began, and ended by SIGKILL after a time drawn with a seed: three times
of four the flow's own process, else one that it has started (a worker, Ray, Prefect's server). When
a run comes to its end, its files are held against those of the run in peace, and it begins anew.

Then bits are flipped in published files, ten files at a time: each must be found by the hashes of
its artifact, and the same command must make what was there. (A bit of a record may lie in what the
hashes do not cover; then it is found if it is healed.) Files of the last two are looked at alone:
what is built upon is not made again. ``kills``, ``found`` and ``healed`` are shares that went well;
the goal is 1.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.children import ROOT
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.killed_recipes import RECIPES, teach, write_texts
from tasks.engine.workspace import PROVENANCE, Workspace
from upcycle_core.checkpoints.hashing import tree_digest

FLOWS = ("dume", "symphony", "ders", "simoe", "retrain", "grow")
OWN_SHARE = 0.75
START_SECONDS = 2.0  # before that nothing of ours has run
HANGS_SECONDS = 900.0
TOGETHER = 10
DONE = {"grow": "is in the model already"}
"""What a flow says to whoever asks for what it has done, killed as it was about to end."""


@dataclass
class Flow:
    """One of the flows, with a home for the run in peace and one for those that are killed.

    Args:
        name: Of ``FLOWS``.
        folder: Temporary, its own.
        draw: Seeded.
    """

    name: str
    folder: Path
    draw: random.Random
    kills: int = 0
    ends: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def prepare(self) -> None:
        """Texts, recipes, what the flow begins with, and the run in peace."""
        self.folder.mkdir()
        self.texts = write_texts(self.folder / "texts")
        made = RECIPES[self.name](self.texts)
        self.files = {n: self.folder / f"{n}.yaml" for n in made.recipes}
        for name, values in made.recipes.items():
            self.files[name].write_text(yaml.safe_dump(values))
        self.command = [part.format(**self.files) for part in made.command]
        begun = self.folder / "begun"
        begun.mkdir()
        self.heals = not made.before
        if made.before:
            self.end(self.start([part.format(**self.files) for part in made.before], begun))
            teach(self.texts, self.name)
        peace = self._home("peace")
        began = time.monotonic()
        self.end(self.start(self.command, peace))
        self.seconds = time.monotonic() - began
        self.wanted = digests(peace / "kills")
        self.home = self._home("killed")

    def _home(self, name: str) -> Path:
        home = self.folder / name
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(self.folder / "begun", home, symlinks=True)
        return home

    def start(self, command: Sequence[str], home: Path) -> subprocess.Popen[bytes]:
        """``python -m COMMAND`` in a home."""
        left_out = ("PREFECT_", "MLFLOW_", "RAY_", "UPCYCLE_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        environment |= {"UPCYCLE_HOME": str(home), "PYTHONPATH": str(ROOT)}
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a run that must end well."""
        process.wait(HANGS_SECONDS)
        if not self._is_over(process):
            raise RuntimeError(f"{self.name} failed undisturbed:\n{self._said()[-4000:]}")

    def _is_over(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether it ended well, now or when it was killed after all was done."""
        return not process.returncode or (self.name in DONE and DONE[self.name] in self._said())

    def _said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")

    def disturb(self) -> None:
        """Start it, and kill it after a while; where it is faster, look at what it has made."""
        process = self.start(self.command, self.home)
        pause = self.draw.uniform(START_SECONDS, self.seconds)
        try:
            process.wait(pause)
        except subprocess.TimeoutExpired:
            killed = self._kill(process)
            self.kills += 1
            began = time.monotonic()
            process.wait(HANGS_SECONDS)  # one whose helper was killed goes on, or says why not
            after = f"{killed} killed after {pause:.1f} s, {process.returncode} after "
            say(f"{self.name}: {after}{time.monotonic() - began:.1f} s more")
        if not self._is_over(process):
            return
        self.ends += 1
        self._compare()

    def _compare(self) -> None:
        found = digests(self.home / "kills")
        names = found.keys() | self.wanted.keys()
        self.wrong += [name for name in names if found.get(name) != self.wanted.get(name)]
        self.home = self._home("killed")

    def finish(self) -> None:
        """Let what was killed last come to its end."""
        self.end(self.start(self.command, self.home))
        self.ends += 1
        self._compare()

    def _kill(self, process: subprocess.Popen[bytes]) -> str:
        """Kill it or one that it has started; which."""
        victim, name = psutil.Process(process.pid), "the flow"
        helpers = victim.children(recursive=True)
        if helpers and self.draw.random() > OWN_SHARE:
            victim = self.draw.choice(helpers)
        with suppress(psutil.NoSuchProcess):
            if victim.pid != process.pid:
                name = " ".join(victim.cmdline())[-60:]
            victim.send_signal(signal.SIGKILL)
        return name

    def flip(self, count: int) -> tuple[int, int]:
        """Flip bytes of published files; how many were found, and how many were healed."""
        root, found, healed = self.folder / "peace" / "kills", 0, 0
        workspace = Workspace(root)
        files = sorted(f for a in artifacts(root) for f in (root / a).rglob("*") if f.is_file())
        files = [file for file in files if file.stat().st_size]
        for start in range(0, count, TOGETHER):
            chosen = self.draw.sample(files, min(TOGETHER, count - start, len(files)))
            before = {file: file.read_bytes() for file in chosen}
            names = {file: file.relative_to(root).as_posix() for file in chosen}
            owners = {file: workspace.artifact_of(name) for file, name in names.items()}
            unseen = []
            for file, artifact in owners.items():
                flip(file, self.draw)
                if artifact is not None and workspace.provenance(artifact) is not None:
                    unseen.append(file)
            wrong = self._healed(before)
            healed += len(chosen) - len(wrong)
            missed = [file for file in unseen if file.name != PROVENANCE or file in wrong]
            found += len(chosen) - len(missed)
            self.wrong += [f"{file}, flipped" for file in (*missed, *wrong)]
        return found, healed

    def _healed(self, before: Mapping[Path, bytes]) -> list[Path]:
        """Run the command on damaged files; those that are not as they were."""
        if not self.heals:
            for file, content in before.items():
                file.write_bytes(content)
            return []
        self.end(self.start(self.command, self.folder / "peace"))
        return [file for file, content in before.items() if file.read_bytes() != content]


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def artifacts(root: Path) -> list[str]:
    """Everything published in a workspace, but what lies outside it."""
    found = sorted(path.parent.relative_to(root).as_posix() for path in root.rglob(PROVENANCE))
    return [name for name in found if not name.startswith((".", "sources"))]


def digests(root: Path) -> dict[str, str]:
    """sha256 of every published file."""
    return {
        f"{artifact}/{name}": digest
        for artifact in artifacts(root)
        for name, digest in tree_digest(root / artifact).items()
    }


def flip(file: Path, draw: random.Random) -> None:
    """Turn one bit, under another inode: DVC's cache may share the old one."""
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content))
    content[place] ^= 1 << draw.randrange(8)
    file.unlink()
    file.write_bytes(content)


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of all flows together")
    parser.add_argument("--flips", type=int, default=200, help="of all flows together")
    parser.add_argument("--flows", nargs="+", choices=FLOWS, default=FLOWS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no kill after that")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    until, count = time.monotonic() + 60 * options.minutes, len(options.flows)
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        for number, name in enumerate(options.flows):
            left = (until - time.monotonic()) / (count - number)
            own = Flow(name, Path(folder) / name, random.Random(f"{options.seed} {name}"))
            own.prepare()
            last = time.monotonic() + left - own.seconds
            asked, flips = -(-options.kills // count), -(-options.flips // count)
            while own.kills < asked and time.monotonic() < last:
                own.disturb()
            if own.kills:
                own.finish()
            found, healed = own.flip(flips) if flips else (0, 0)
            rows.append([name, own.kills, own.ends, len(own.wrong), flips, found, healed])
            say(" ".join(map(str, (*rows[-1], *own.wrong[:5]))))
            shutil.rmtree(own.folder)
    columns = ["flow", "SIGKILLs", "ends", "files that differ", "flips", "found", "healed"]
    print_table("Killed and damaged", columns, rows)
    kills, ends, wrong, flips, found, healed = (sum(row[i] for row in rows) for i in range(1, 7))
    ratio = {"kills": float(not wrong and ends > 0)}
    if flips:
        ratio |= {"found": found / flips, "healed": healed / flips}
    print_result("kills", ratio, {"goal": {"at_least": 1.0}, "kills": kills, "rows": rows})


if __name__ == "__main__":
    main()
