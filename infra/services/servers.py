"""The servers and the worker of this machine.

Everything listens on loopback only. What is started is remembered by process id and start time, and
nothing else is ever stopped.
"""

import fcntl
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil

from infra.recipe.names import masked
from infra.services.pools import LOCAL
from infra.services.ports import HOST, answers, is_free, worker_is_online
from infra.services.processes import (
    ProcessRecord,
    find,
    launch,
    read_records,
    stop,
    tail,
    write_records,
)
from infra.settings import REPOSITORY, Settings, environment_of
from upcycle_core.errors import Fault, raise_faults

START_SECONDS = 300.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.25
# Where models are: MLflow's front door is a page for generative AI.
PAGES = {
    "prefect": ("Prefect", ""),
    "mlflow": ("MLflow", "/#/models?workflowType=machine_learning"),
}


DATABASES = ("MLFLOW_BACKEND_STORE_URI", "MLFLOW_TRACKING_URI")
"""Of an environment, what says where MLflow's data is; the first that a service is given holds."""
ACCESS = ("AWS_", "AZURE_", "GOOGLE_", "HF_")
"""What flows have from their worker's environment, to reach models and remotes: names begin so."""
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}


class ServiceError(RuntimeError):
    """A service did not start or did not do as it was told; the message ends with its log."""


@dataclass(frozen=True)
class Service:
    """A process that ``up`` starts.

    Args:
        name: Of its log and its record.
        arguments: Of the Python interpreter.
        ready: Whether it works by now.
        url: What people open; empty for the worker.
        environment: What it gets beside the settings. Passwords stand here, and not in
            ``arguments``: those are recorded, and every user of the machine can list them.
    """

    name: str
    arguments: tuple[str, ...]
    ready: Callable[[], bool]
    url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def up(settings: Settings) -> None:
    """Start the two servers, then the worker, and print where they are.

    What runs already stays: where one of them has died, a night that runs goes on.

    Raises:
        InputError: A port is in use, MLflow's database is not ours to serve, one runs with other
            settings, or they run on another machine that has the same home.
        ServiceError: Something did not start. Nothing that was started is left.
    """
    services = [_prefect(settings), _mlflow(settings), _worker(settings)]
    with _lock(settings):
        there = running(settings)
        raise_faults(_other_faults(settings, there, services))
        lacking = [service for service in services if service.name not in there]
        if not lacking:
            print("Already up.")
        else:
            raise_faults(_elsewhere_faults(settings))
            raise_faults(_faults(settings, there))
            _create_database(settings)
            try:
                _start(settings, [service for service in lacking if service.name in PAGES])
                _start(settings, [service for service in lacking if service.name not in PAGES])
            except BaseException:
                _stop(settings, [service.name for service in lacking])
                raise
        _print_running(running(settings), settings)
        if other := _other_access(settings, there):
            print(f"Worker  has other values of {', '.join(other)}; make down, then make up")


def down(settings: Settings) -> None:
    """Stop what ``up`` started, the worker's flows included, and nothing else.

    Raises:
        InputError: It was started on another machine.
    """
    with _lock(settings):
        raise_faults(_elsewhere_faults(settings))
        names = _stop(settings)
    print(f"Stopped {', '.join(names)}." if names else "Nothing is running.")


def status(settings: Settings) -> bool:
    """Print what runs and where.

    Returns:
        Whether all that ``up`` starts runs here, and answers.
    """
    records = running(settings)
    if records:
        silent = list(_silent(records))
        _print_running(records, settings, silent=silent)
        return not silent and records.keys() >= {*PAGES, "worker"}
    faults = list(_elsewhere_faults(settings))
    print(faults[0] if faults else "Nothing is running. Start it: make up")
    return False


def running(settings: Settings) -> dict[str, ProcessRecord]:
    """Return what ``up`` started and still runs, by name."""
    records = read_records(settings.services_state)
    return {name: record for name, record in records.items() if find(record) is not None}


def _silent(records: Mapping[str, ProcessRecord]) -> Iterator[str]:
    """Names of what runs, and does not answer where it was started."""
    for name, path in HEALTH.items():
        if name in records and not answers(records[name].url + path):
            yield name
    server = records.get("prefect")
    if server and "worker" in records and not worker_is_online(f"{server.url}/api", LOCAL):
        yield "worker"


def _elsewhere_faults(settings: Settings) -> Iterator[Fault]:
    """Of servers that were started on another machine: two would write into one database."""
    records = read_records(settings.services_state).values()
    for host in dict.fromkeys(record.host for record in records if record.is_elsewhere):
        remedy = f"its servers were started on the machine {host}; use them there, and stop them "
        remedy += f"there first (make down). If that is gone: delete {settings.services_state}"
        yield Fault("UPCYCLE_HOME", str(settings.home), remedy)


def _create_database(settings: Settings) -> None:
    # It imports MLflow, which the other commands do without.
    from infra.tracking.renaming import rename_folders

    for name in rename_folders(settings):
        print(f"{name}: its files in MLflow are found from other machines too now")


def _prefect(settings: Settings) -> Service:
    url = f"http://{HOST}:{settings.prefect_port}"
    place = ("--host", HOST, "--port", str(settings.prefect_port))
    return Service(
        "prefect",
        ("-m", "prefect", "server", "start", *place),
        lambda: answers(url + HEALTH["prefect"]),
        url,
    )


def _mlflow(settings: Settings) -> Service:
    url = f"http://{HOST}:{settings.mlflow_port}"
    files, logs = str(settings.mlflow_artifacts), str(settings.services)
    place = ("--host", HOST, "--port", str(settings.mlflow_port), "--workers", "1")
    storage = ("--artifacts-destination", files, "--serve-artifacts")
    return Service(
        "mlflow",
        ("-m", "infra.tracking.asgi", "--logs", logs, "server", *place, *storage),
        lambda: answers(url + HEALTH["mlflow"]),
        url,
        {"MLFLOW_BACKEND_STORE_URI": settings.mlflow_tracking_uri},
    )


def _worker(settings: Settings) -> Service:
    api = f"http://{HOST}:{settings.prefect_port}/api"
    # One flow at a time by default: each takes the whole machine. The pool is made if missing.
    pool = ("--pool", LOCAL, "--type", "process", "--limit", str(settings.flows_at_once))
    return Service(
        "worker",
        ("-m", "prefect", "worker", "start", *pool),
        lambda: worker_is_online(api, LOCAL),
    )


def _start(settings: Settings, services: Sequence[Service]) -> None:
    """Start ``services`` side by side and wait until all are ready."""
    api = f"http://{HOST}:{settings.prefect_port}/api"
    for service in services:
        record = launch(
            (sys.executable, *service.arguments),
            log=_log(settings, service.name),
            directory=REPOSITORY,
            environment=environment_of(
                settings,
                PREFECT_API_URL=api,
                PYTHONPATH=str(REPOSITORY),
                **service.environment,
            ),
            url=service.url,
        )
        try:
            records = read_records(settings.services_state)
            write_records(settings.services_state, records | {service.name: record})
        except BaseException:
            if (process := find(record)) is not None:  # which nobody would know of
                stop(process, grace=STOP_SECONDS)
            raise
    deadline = time.monotonic() + START_SECONDS
    for service in services:
        _wait(settings, service, deadline)


def _wait(settings: Settings, service: Service, deadline: float) -> None:
    while not service.ready():
        if service.name not in running(settings):
            problem = "ended while it started"
        elif time.monotonic() > deadline:
            problem = f"did not answer within {START_SECONDS:.0f} s"
        else:
            time.sleep(POLL_SECONDS)
            continue
        log = _log(settings, service.name)
        raise ServiceError(f"{service.name} {problem}. The end of {log}:\n{tail(log)}")


def _stop(settings: Settings, names: Collection[str] | None = None) -> list[str]:
    """Stop some, or all; the worker first, so that its flows can still report to the server."""
    records = read_records(settings.services_state)
    stopped = []
    for name in sorted(records, key=lambda name: name != "worker"):
        process = find(records[name]) if names is None or name in names else None
        if process is not None:
            stop(process, grace=STOP_SECONDS)
            stopped.append(name)
    rest = {name: record for name, record in records.items() if find(record) is not None}
    if rest:
        write_records(settings.services_state, rest)
    else:
        settings.services_state.unlink(missing_ok=True)
    return stopped


def _other_faults(
    settings: Settings, there: Mapping[str, ProcessRecord], services: Sequence[Service]
) -> Iterator[Fault]:
    """Of what runs, and was started with other ports, places, limits or for another database."""
    remedy = "runs with other settings: make down, then make up"
    for service in services:
        record = there.get(service.name)
        if record is None:
            continue
        if record.command[1:] != service.arguments:
            yield Fault(service.name, " ".join(record.command[1:]), remedy)
        now, wanted = _environment(record), environment_of(settings, **service.environment)
        name = next((n for n in DATABASES if n in service.environment), DATABASES[-1])
        if name in now and now[name] != wanted[name]:
            yield Fault(service.name, masked(f"{name}={now[name]}"), remedy)


def _other_access(settings: Settings, there: Mapping[str, ProcessRecord]) -> list[str]:
    """What is told here, and was told otherwise to the worker; what is not told here may be so."""
    now = _environment(there["worker"]) if "worker" in there else {}
    told = {n: v for n, v in environment_of(settings).items() if n.startswith(ACCESS)}
    return [name for name in sorted(told) if now and now.get(name) != told[name]]


def _environment(record: ProcessRecord) -> Mapping[str, str]:
    """What a process was started with; empty where the system does not say."""
    process = find(record)
    try:
        return process.environ() if process is not None else {}
    except psutil.Error:
        return {}


def _faults(settings: Settings, there: Collection[str]) -> Iterator[Fault]:
    """What keeps the others from being started."""
    ports = {
        "UPCYCLE_PREFECT_PORT": ("prefect", settings.prefect_port),
        "UPCYCLE_MLFLOW_PORT": ("mlflow", settings.mlflow_port),
    }
    for name, (service, port) in ports.items():
        if service not in there and not is_free(port):
            remedy = f"in use by another program; stop that, or choose: make up {name}=PORT"
            yield Fault(name, port, remedy)
    if settings.prefect_port == settings.mlflow_port:
        yield Fault("UPCYCLE_MLFLOW_PORT", settings.mlflow_port, "is Prefect's too; choose another")
    database = settings.mlflow_tracking_uri
    if database.startswith("http"):
        remedy = "names a server, so there is no database to serve here; unset it"
        yield Fault("MLFLOW_TRACKING_URI", masked(database), remedy)
    if database.startswith("postgresql") and find_spec("psycopg2") is None:
        remedy = "needs a driver; install it: pip install -c constraints.txt -e '.[postgres]'"
        yield Fault("MLFLOW_TRACKING_URI", masked(database), remedy)


@contextmanager
def _lock(settings: Settings) -> Iterator[None]:
    """Let one ``up`` or ``down`` work at a time."""
    settings.services.mkdir(parents=True, exist_ok=True)
    with (settings.services / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _log(settings: Settings, name: str) -> Path:
    return settings.services / f"{name}.log"


def _print_running(
    records: Mapping[str, ProcessRecord], settings: Settings, *, silent: Collection[str] = ()
) -> None:
    def said(name: str, words: str) -> str:
        if name not in records:
            return "not running"
        return "runs, and does not answer" if name in silent else words

    print(f"Logs    {settings.services}")
    print(f"Worker  {said('worker', 'ready for deployed flows')}")
    for name, (title, page) in PAGES.items():
        print(f"{title:7} {said(name, records[name].url + page if name in records else '')}")
