"""One life of models: the commands of docs/life.md and what they print, played from the beginning.

    python -m benchmarks.life --folder FOLDER [--out docs/life.md] [--stay]

The commands run in the checkout, as a user types them, with FOLDER as the home and servers on
ports of its own: three models of three methods side by side, with nights, a night that fails and
its notice, a flow that waits, refused text, a rollback, a domain more and less, tidying and
restoring. The page is written anew after each command, so that one that breaks shows how far it
came.
"""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from benchmarks.children import ROOT
from benchmarks.common import parser_of, print_result, versions

PORTS = {"UPCYCLE_PREFECT_PORT": "14200", "UPCYCLE_MLFLOW_PORT": "15000"}
API = f"http://127.0.0.1:{PORTS['UPCYCLE_PREFECT_PORT']}/api"
NIGHTS = ("nightly", "strangers", "answers")
"""The recipes: of DUME, Symphony-MoE and SIMoE."""
PATIENCE_SECONDS = 3600.0
"""For a scheduled run to end."""
LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \| ")
WAITING = re.compile(r"(?:[Ww]ait|turn)")
LONGEST_LINE = 400
"""What is longer is cut: a run's parameters are its recipe."""
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}

HEAD = """\
# One life of three models

Commands and their outputs as they were, {where}, other programs beside it. All of it is played by

```
python -m benchmarks.life --folder FOLDER --out docs/life.md
```

`my.yaml` is [`recipes/nightly.yaml`](../recipes/nightly.yaml) (DUME),
`strangers.yaml` [`recipes/nightly-symphony.yaml`](../recipes/nightly-symphony.yaml) (Symphony-MoE),
`answers.yaml` [`recipes/nightly-simoe.yaml`](../recipes/nightly-simoe.yaml) (SIMoE): small enough
for two cores, and too small to be of use. `FOLDER` stands for the home (`UPCYCLE_HOME`). Left out:
the log, but for lines that are shown for themselves, empty lines, and the ends of very long ones.
"""


def main() -> None:
    """Play it, and write the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the home, which is empty")
    parser.add_argument("--out", type=Path, help="the page; FOLDER/life.md by default")
    parser.add_argument("--stay", action="store_true", help="leave the servers running at the end")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--folder {folder}: is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    life = Life(folder, (options.out or folder / "life.md").resolve())
    began = time.monotonic()
    try:
        life.play()
    finally:
        if not options.stay:
            life.quietly("infra.services", "down")
    print_result("life", {}, {"minutes": (time.monotonic() - began) / 60, "steps": life.seconds})


class Life:
    """A home, and the page about what happens there.

    Args:
        folder: The home.
        page: The page.
    """

    def __init__(self, folder: Path, page: Path) -> None:
        self.folder, self.page = folder, page
        self.texts = folder / "texts"
        self.parts = [HEAD.format(where=_where())]
        self.seconds: dict[str, float] = {}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))},
            **PORTS,
            "UPCYCLE_HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "140",
        }

    def play(self) -> None:
        """All of it."""
        self.prepare()
        self.build()
        self.nights()
        self.waiting()
        self.judged()
        self.domains()
        self.failing()
        self.put_away()

    def prepare(self) -> None:
        """Texts, and the three recipes."""
        self.quietly("flows.first_night", str(self.texts))
        write_answers(self.texts / "answers" / "monday.jsonl", seed=1)
        for name, source in zip(
            ("my", "strangers", "answers"), ("", "-symphony", "-simoe"), strict=True
        ):
            values = yaml.safe_load((ROOT / f"recipes/nightly{source}.yaml").read_text())
            values["folder"] = str(self.texts)
            if source == "":  # here a domain's text is what a night has
                values["domains"]["documentation"] = {
                    "train": {"harvest": "documentation", "max_bytes": 2_000_000}
                }
                self.recipe("grown").write_text(yaml.safe_dump(values, sort_keys=False))
                del values["domains"]["documentation"]
            self.recipe(name).write_text(yaml.safe_dump(values, sort_keys=False))

    def build(self) -> None:
        """Three models, servers, deployments."""
        self.title("Build")
        self.say(
            "`texts/` is what `python -m flows.first_night` lays out, and "
            "`texts/answers/monday.jsonl` "
            "two hundred sums and their answers."
        )
        self.flow("flows.simoe", "answers.yaml")
        self.flow("flows.symphony", "strangers.yaml")
        self.flow("flows.dume", "my.yaml")
        self.title("Deploy")
        self.say("Each recipe has deployments of its own; nothing of one touches another.")
        self.show("make up")
        self.environment["PREFECT_API_URL"] = API
        for recipe in ("my", "strangers", "answers"):
            self.show(f"make deploy RECIPE={recipe}.yaml")

    def nights(self) -> None:
        """One without news, and one of all three."""
        self.title("Nothing new")
        self.flow("flows.retrain", "my.yaml")
        self.title("A night with news")
        self.say(
            "The sources of `asyncio` come to `texts/python`, where two of the recipes read, and "
            "two hundred "
            "answers to `texts/answers`. The schedule would find them at three in the morning; "
            "the event starts "
            "the nights of all three at once, on the worker, one after the other."
        )
        self.show("mv texts/tonight/asyncio.txt texts/python/", "")
        write_answers(self.texts / "answers" / "tuesday.jsonl", seed=2)
        known = self.runs()
        self.show(".venv/bin/python -m flows.announce")
        self.ended(known, count=len(NIGHTS))
        self.say("The runs, as Prefect's list calls them:")
        self.table(known)
        self.say("The summary of the first:")
        self.show("cat nightly/summary.txt")

    def waiting(self) -> None:
        """Two flows on one workspace."""
        self.title("A flow that waits")
        self.say(
            "The text is touched again, and two flows are started for it within a second of each "
            "other. The "
            "second says for whom it waits, and finds nothing left to do. Here its log is shown:"
        )
        extra = self.texts / "python" / "more.txt"
        extra.write_text("".join(f"def sum_{n}(a):\n    return a + {n}\n" for n in range(4000)))
        first = self.start("flows.retrain", "my.yaml")
        time.sleep(20)
        self.flow("flows.retrain", "my.yaml", log=WAITING)
        first.communicate()
        self.say(f"(The first ended with code {first.returncode}.)")

    def judged(self) -> None:
        """Text that is damaged, and text that is corrected."""
        self.title("Damaged text is refused")
        kept = self.folder / "kept"
        shutil.copytree(self.texts / "python", kept)
        self.say("All of `texts/python` is replaced by two megabytes of noise.")
        noise = random.Random(0)
        for file in (self.texts / "python").iterdir():
            file.unlink()
        for number in range(60):
            line = "".join(noise.choices("abcdefghijklmnopqrstuvwxyz0123456789+/\n", k=30_000))
            (self.texts / "python" / f"noise-{number}.txt").write_text(line)
        self.flow("flows.retrain", "my.yaml")
        self.title("Corrected text is accepted or not, by what it brings")
        self.say(
            "The noise goes, the old text comes back, and the sources of `tkinter` and `email` "
            "with it. The expert "
            "is continued from the last one that was a champion's, not from the refused one."
        )
        shutil.rmtree(self.texts / "python")
        kept.rename(self.texts / "python")
        library = Path(os.__file__).parent
        for package in ("tkinter", "email"):
            texts = [file.read_text() for file in sorted((library / package).rglob("*.py"))]
            (self.texts / "python" / f"{package}.txt").write_text("\n<|doc|>\n".join(texts))
        self.flow("flows.retrain", "my.yaml")

    def domains(self) -> None:
        """One more, and one less."""
        self.title("A domain more")
        self.say("`grown.yaml` is `my.yaml` with a domain more:")
        self.code(
            "  documentation:\n    train: {harvest: documentation, max_bytes: 2_000_000}", "yaml"
        )
        self.flow("flows.grow", "grown.yaml", "documentation")
        self.title("A domain less")
        self.flow("flows.shrink", "grown.yaml", "documentation")

    def failing(self) -> None:
        """A night that fails, and its notice."""
        self.title("A night that fails, and its notice")
        received: list[Any] = []
        with_server = _catcher(received)
        block = (
            "from infra import settings; settings.configure(); "
            "from prefect.blocks.webhook import Webhook; "
            f"Webhook(url='http://127.0.0.1:{with_server.server_port}/hook').save('on-call')"
        )
        self.quietly_python(block)
        self.say(
            "A webhook was saved in Prefect as the block `on-call`. The held-out text is moved "
            "away:"
        )
        self.show("make deploy RECIPE=my.yaml NOTICE=webhook/on-call")
        self.show("mv texts/heldout texts/elsewhere", "")
        known = self.runs()
        self.show(".venv/bin/python -m prefect deployment run retrain/nightly-every-night")
        self.ended(known, count=1)
        self.until(lambda: bool(received), "a notice")
        self.say("What the webhook got:")
        self.code(json.dumps(received[0], indent=1), "json")
        self.show("mv texts/elsewhere texts/heldout", "")
        with_server.shutdown()

    def put_away(self) -> None:
        """Tidy, restore, and a champion that is taken back."""
        self.title("Tidy")
        self.flow("flows.tidy", "my.yaml")
        self.flow("flows.tidy", "my.yaml", "--apply")
        self.title("Restored")
        self.say("Into an empty folder; each of the three:")
        for name in NIGHTS:
            self.flow("flows.restore", f"upcycle-{name}", "champion", "--into", "elsewhere")
        self.show("ls elsewhere elsewhere/nightly elsewhere/nightly/experts")
        self.title("Rollback")
        self.flow("flows.rollback", "upcycle-strangers", "--because", "asyncio is answered wrongly")
        self.title("What came of them")
        self.say("Every run of this page that a flow began, in Prefect:")
        self.table({})

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
        is_ours = command.startswith(("make", ".venv"))
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
        self.page.write_text("\n".join(self.parts))


def write_answers(file: Path, *, seed: int) -> None:
    """Two hundred sums of two small numbers, as instructions."""
    draw = random.Random(seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as out:
        for _ in range(200):
            a, b = draw.randrange(10), draw.randrange(10)
            asked = {"prompt": f"What is {a} plus {b}?", "response": str(a + b)}
            labels = {"category": "sums", "domain": "arithmetic"}
            out.write(json.dumps(asked | labels) + "\n")


def _catcher(received: list[Any]) -> ThreadingHTTPServer:
    """A server on loopback that keeps what is posted to it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def _where() -> str:
    return f"on {os.cpu_count()} cores without a GPU (torch {versions()['torch']})"


def _wrapped(text: str, width: int = 120) -> str:
    """A paragraph in lines."""
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))


if __name__ == "__main__":
    main()
