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
import shutil
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from benchmarks.children import ROOT
from benchmarks.common import parser_of, print_result, versions
from benchmarks.page import API, Page

NIGHTS = ("nightly", "strangers", "answers")
"""The recipes: of DUME, Symphony-MoE and SIMoE."""
WAITING = re.compile(r"(?:[Ww]ait|turn)")

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


class Life(Page):
    """What happens, in order; the home's texts lie in it."""

    def __init__(self, folder: Path, file: Path) -> None:
        super().__init__(folder, file, HEAD.format(where=_where()))
        self.texts = folder / "texts"

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
        catcher = _catcher(received)
        block = (
            "from infra import settings; settings.configure(); "
            "from prefect.blocks.webhook import Webhook; "
            f"Webhook(url='http://127.0.0.1:{catcher.server_port}/hook').save('on-call')"
        )
        self.quietly_python(block)
        self.say(
            "A webhook was saved in Prefect as the block `on-call`. The held-out text is moved "
            "away:"
        )
        self.show("make deploy RECIPE=my.yaml NOTICE=webhook/on-call")
        self.show("mv texts/heldout texts/elsewhere", "")
        known = self.runs()
        run = ".venv/bin/python -m prefect deployment run retrain/nightly-every-night"
        self.show(f"PREFECT_API_URL={API} {run}")
        self.ended(known, count=1)
        self.until(lambda: bool(received), "a notice")
        self.say("What the webhook got:")
        self.code(json.dumps(received[0], indent=1), "json")
        self.show("mv texts/elsewhere texts/heldout", "")
        catcher.shutdown()

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


if __name__ == "__main__":
    main()
