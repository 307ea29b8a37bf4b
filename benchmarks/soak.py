"""Weeks in an hour: scheduled runs in a row, and what they leave behind.

    python -m benchmarks.soak [--noops N] [--retrains N] [--models N] [--minutes M]
                              [--folder FOLDER]

Servers and worker as `make up` starts them, small models side by side, and
of each model its deployment `retrain`. Night after night the worker starts one run of each model,
all at once: runs that find nothing new, and, spread among them, runs for which a text has changed.
With a folder, everything stays in it, and the same command goes on after the last night, with
servers that are started anew. The text stays as long as it is and `keep` is small, so that what
grows is not what is asked for. After every tenth night `flows.tidy` clears up. After every night:
processes, open files and memory of servers and worker, and the size of the home, of its databases
and of the temporary directory; the time of the list of runs in Prefect and in MLflow; apart from
these the DVC remote, an archive that nothing clears. Prefect drops events after a week, here after
as many nights. ``ratio`` is the median of the last quarter over that of the second (the first warms
up); the slope is that of a line through all samples after the first quarter, for a thousand runs.
"""

import json
import os
import socket
import sqlite3
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.children import ROOT, run_python
from benchmarks.common import median, parser_of, print_result, print_table
from infra.durable import write_atomically
from infra.services.deployments import PREFECT_FILE
from infra.services.processes import ProcessRecord, read_records

BOUNDED = ("processes", "open files", "memory MB", "disk MB")
FIGURES = (*BOUNDED, "databases MB", "rows", "list of runs s", "temporary MB", "remote MB")
PACKAGES = {"first": ("email", "json", "logging", "unittest"), "second": ("asyncio", "http")}
TRAINING = {"steps": 20, "batch_size": 4, "sequence_length": 64, "warmup_steps": 2}
STRIDE = 7
DEPLOYMENT = "every-night"
LOOK_SECONDS = 0.5
BUSY_SECONDS = 120  # Prefect's database is locked now and then, which clients are told to wait for
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
CHARACTERS = 100_000
TIDY_EVERY = 10
END_SECONDS = 30  # after its last state a run's process may still put things away
WEEK = "PT150S"  # seven nights of some twenty seconds
ALLOWED = 1.1


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--noops", type=int, default=100, help="of all models together")
    parser.add_argument("--retrains", type=int, default=10, help="of all models together")
    parser.add_argument("--models", type=int, default=1, help="side by side")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no night after that")
    parser.add_argument("--folder", type=Path, help="stays, and is gone on with; /tmp by default")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-"))
        soak = Soak(Path(folder).absolute(), options.models)
        stack.callback(soak.command, "infra.services", "down")
        soak.begin()
        samples = soak.run(options.noops, options.retrains, until=60 * options.minutes)
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    before, after = (
        {name: median([sample[name] for sample in part]) for name in FIGURES}
        for part in (early, late)
    )
    slopes = {name: slope([sample[name] for sample in samples[quarter:]]) for name in FIGURES}
    thousand = 1000 / options.models
    rows = [[name, before[name], after[name], thousand * slopes[name]] for name in FIGURES]
    ratio = {name: after[name] / before[name] for name in BOUNDED}
    runs = options.models * len(samples)
    print_table(
        f"{runs} runs of {options.models} models",
        ["", "second quarter", "last quarter", "in 1,000 more"],
        rows,
    )
    print_result(
        "soak", ratio, {"goal": {"at_most": ALLOWED}, "slopes": slopes, "samples": samples}
    )


def slope(values: list[float]) -> float:
    """Of the line of least squares through ``values``, a step apart; 0 of fewer than two."""
    middle, mean = (len(values) - 1) / 2, sum(values) / max(1, len(values))
    above = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return above / (sum((i - middle) ** 2 for i in range(len(values))) or 1.0)


class Soak:
    """A home with servers, and models that are retrained there.

    Args:
        folder: Temporary; texts and the home lie there.
        models: How many, side by side.
    """

    def __init__(self, folder: Path, models: int = 1) -> None:
        self.folder, self.home = folder, folder / "home"
        self.models = [f"soak-{number}" for number in range(1, 1 + models)]
        ports = {f"UPCYCLE_{name}_PORT": str(_free_port()) for name in ("PREFECT", "MLFLOW")}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))},
            **ports,
            "PYTHONPATH": str(ROOT),
            "UPCYCLE_HOME": str(self.home),
            # Ray's sockets have short names alone.
            **dict.fromkeys(("TMPDIR", "RAY_TMPDIR"), str(folder / "t")),
            "PREFECT_API_URL": f"http://127.0.0.1:{ports['UPCYCLE_PREFECT_PORT']}/api",
            "UPCYCLE_FLOWS_AT_ONCE": str(models),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": WEEK,
            "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": "30",
        }

    def begin(self) -> None:
        """Write texts and recipes, start the servers, build the models, deploy."""
        (self.folder / "t").mkdir(parents=True, exist_ok=True)
        self.command("infra.services", "up")
        for model in self.models:
            recipe = self.recipe(model)
            if not recipe.exists():
                self.write_text(model, 0)
                recipe.write_text(yaml.safe_dump(_recipe(model, self.folder / model)))
            self.command("flows.dume", str(recipe))
            self._deploy(recipe)

    def recipe(self, model: str) -> Path:
        """Its file."""
        return self.folder / f"{model}.yaml"

    def _deploy(self, recipe: Path) -> None:
        deployments = yaml.safe_load(PREFECT_FILE.read_text())
        [nightly] = [d for d in deployments["deployments"] if d.get("schedules")]
        nightly |= {"parameters": {"recipe": str(recipe)}, "schedules": []}
        file = self.folder / "prefect.yaml"
        file.write_text(yaml.safe_dump({**deployments, "deployments": [nightly]}))
        deploy = (
            "from infra.settings import configure; from infra.services.deployments import deploy; "
        )
        deploy += f"from pathlib import Path; deploy(configure(), prefect_file=Path({str(file)!r}))"
        run_python(["-c", deploy], environment=self.environment)

    def run(
        self, noops: int, retrains: int, *, until: float = float("inf")
    ) -> list[dict[str, float]]:
        """All nights, as far as ``until`` seconds reach; what there is after each, from the first.

        Args:
            noops, retrains: Of all models together; each night is one run of each model.
        """
        until += time.monotonic()
        nights, every = -(-(noops + retrains) // len(self.models)), 0
        if retrains:
            every = max(1, (noops + retrains) // retrains)
        record = self.folder / "samples.json"
        samples = json.loads(record.read_text()) if record.exists() else []
        for night in range(len(samples), nights):
            if time.monotonic() > until:
                break
            for run in range(night * len(self.models), (night + 1) * len(self.models)):
                if every and run % every == every - 1:
                    release = 1 + run // every
                    self.write_text(self.models[release % len(self.models)], release)
            self.scheduled()
            if night % TIDY_EVERY == TIDY_EVERY - 1:
                for model in self.models:
                    self.command("flows.tidy", str(self.recipe(model)), "--apply")
            samples.append(self._sample())
            write_atomically(record, json.dumps(samples))
            print(night, samples[-1], file=sys.stderr, flush=True)
        return samples

    def scheduled(self) -> None:
        """A run of each model's deployment, all at once, by the worker, to its end.

        Raises:
            RuntimeError: One did not end well.
        """
        prefect = self.environment["PREFECT_API_URL"]
        runs = []
        for model in self.models:
            name = f"{prefect}/deployments/name/retrain/{model}-{DEPLOYMENT}"
            asked = f"{prefect}/deployments/{_ask(name)['id']}/create_flow_run"
            runs.append(_ask(asked, {})["id"])
        for run in runs:
            while (found := _ask(f"{prefect}/flow_runs/{run}"))["state_type"] not in ENDED:
                time.sleep(LOOK_SECONDS)
            if found["state_type"] != "COMPLETED":
                raise RuntimeError(f"a scheduled run: {found['state']}")

    def write_text(self, model: str, release: int) -> None:
        """Texts of one length; each release of the first begins with another module's source."""
        folder = self.folder / model
        folder.mkdir(exist_ok=True)
        library = Path(sysconfig.get_paths()["stdlib"])
        for domain, packages in PACKAGES.items():
            files = [file for name in packages for file in sorted((library / name).glob("*.py"))]
            turn = release * STRIDE % len(files) if domain == "first" else 0
            sources = (f.read_text(errors="replace")[:8_000] for f in files[turn:] + files[:turn])
            (folder / f"{domain}.txt").write_text("\n<|doc|>\n".join(sources)[:CHARACTERS])

    def command(self, module: str, *arguments: str) -> None:
        """``python -m MODULE ARGUMENTS``."""
        run_python(["-m", module, *arguments], environment=self.environment)

    def _sample(self) -> dict[str, float]:
        deadline = time.monotonic() + END_SECONDS
        while _flows(self.home) and time.monotonic() < deadline:
            time.sleep(0.2)
        servers = _family(self.home)
        memory = sum(p.memory_info().rss for p in servers)
        remote = _size(self.home / "remote")
        disk = _size(self.home) - remote
        files = sum(p.num_fds() for p in servers)
        databases = [path for path in self.home.rglob("*.db*") if path.is_file()]
        figures = (
            *(len(servers), files, memory / 1e6, disk / 1e6),
            sum(path.stat().st_size for path in databases) / 1e6,
            sum(_rows(path) for path in databases if path.suffix == ".db"),
            self._list_seconds(),
            _size(self.folder / "t") / 1e6,
            remote / 1e6,
        )
        return dict(zip(FIGURES, map(float, figures), strict=True))

    def _list_seconds(self) -> float:
        """What the pages of all runs ask for: flow runs of Prefect, and runs of MLflow."""
        mlflow = f"http://127.0.0.1:{self.environment['UPCYCLE_MLFLOW_PORT']}/api/2.0/mlflow"
        prefect = self.environment["PREFECT_API_URL"]
        began = time.perf_counter()
        page = {"limit": 50, "page": 1, "sort": "START_TIME_DESC"}
        _ask(f"{prefect}/flow_runs/paginate", page)
        for experiment in _ask(f"{mlflow}/experiments/search", {"max_results": 100})["experiments"]:
            asked = {"experiment_ids": [experiment["experiment_id"]], "max_results": 100}
            _ask(f"{mlflow}/runs/search", asked)
        return time.perf_counter() - began


def _ask(address: str, values: Any = None) -> Any:
    """What a server answers: to GET, or to POST of ``values``; asked again while it is busy."""
    headers = {"Content-Type": "application/json"}
    body = None if values is None else json.dumps(values).encode()
    request = urllib.request.Request(address, body, headers)
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > until:
                raise
        except TimeoutError:
            if time.monotonic() > until:
                raise
        time.sleep(LOOK_SECONDS)


def _rows(database: Path) -> int:
    """Of all tables."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as found:
        kinds = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        tables = [name for (name,) in found.execute(kinds)]
        return sum(found.execute(f'SELECT COUNT(*) FROM "{t}"').fetchone()[0] for t in tables)


def _recipe(name: str, texts: Path) -> dict[str, Any]:
    shape = {"hidden_size": 32, "intermediate_size": 64, "layers": 2}
    heads = {"attention_heads": 2, "key_value_heads": 2}
    sweeps: dict[str, Any] = {f"sweep_{key}": [] for key in ("top_k", "ridge_lambda", "window")}
    domains = {name: {"train": {"files": [str(texts / f"{name}.txt")]}} for name in PACKAGES}
    return {
        "name": name,
        "domains": domains,
        "tokenizer": {"vocabulary_size": 512},
        "seed_model": {"shape": {**shape, **heads}, "training": TRAINING},
        "experts": {"training": TRAINING},
        "statistics": {"tokens": 4000, "sequence_length": 64},
        "evaluation": {"tokens": 4000, "sequence_length": 64, **sweeps},
        "registry": {"certificate": "none"},  # readers take minutes, and leave nothing behind
        "keep": {"versions": 1, "runs": 1, "flow_runs": 5},
    }


def _family(home: Path) -> list[psutil.Process]:
    """Servers and worker, and whatever they have started and not ended."""
    found = []
    for record in _services(home).values():
        process = psutil.Process(record.pid)
        found += [process, *process.children(recursive=True)]
    return found


def _flows(home: Path) -> list[psutil.Process]:
    """Processes that the worker has started and that have not ended."""
    return psutil.Process(_services(home)["worker"].pid).children()


def _services(home: Path) -> dict[str, ProcessRecord]:
    return read_records(home / "services" / "state.json")


def _size(folder: Path) -> int:
    """Bytes on the disk; each file counts once however many links it has."""
    sizes = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a database's journal comes and goes
            file = path.lstat()
            sizes[file.st_ino] = file.st_blocks * 512
    return sum(sizes.values())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
