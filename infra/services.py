"""The servers and the worker: ``python -m infra.services up|deploy|down|status``.

Everything listens on loopback only. What is started is remembered by process id and start time, and
nothing else is ever stopped.
"""

import argparse
import fcntl
import json
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.deployments import DeploymentError, deploy
from infra.processes import ProcessRecord, find, launch, read_records, stop, write_records
from infra.settings import REPOSITORY, Settings, configure, environment_of
from upcycle_core.errors import Fault, InputError, raise_faults

HOST = "127.0.0.1"
WORK_POOL = "local"
START_SECONDS = 300.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.25
LOG_LINES = 20


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
    """

    name: str
    arguments: tuple[str, ...]
    ready: Callable[[], bool]
    url: str = ""


def up(settings: Settings) -> None:
    """Start the two servers, then the worker, and print where they are.

    Raises:
        InputError: A port is in use, or MLflow's database is not ours to serve.
        ServiceError: Something did not start. Nothing that was started is left.
    """
    services = [_prefect(settings), _mlflow(settings), _worker(settings)]
    with _lock(settings):
        if running(settings).keys() >= {service.name for service in services}:
            print("Already up.")
        else:
            _stop_all(settings)
            raise_faults(_faults(settings))
            _create_database(settings)
            try:
                _start(settings, services[:2])
                _start(settings, services[2:])
            except BaseException:
                _stop_all(settings)
                raise
        _print_running(settings)


def down(settings: Settings) -> None:
    """Stop what ``up`` started, the worker's flows included, and nothing else."""
    with _lock(settings):
        names = _stop_all(settings)
    print(f"Stopped {', '.join(names)}." if names else "Nothing is running.")


def status(settings: Settings) -> None:
    """Print what runs and where."""
    if running(settings):
        _print_running(settings)
    else:
        print("Nothing is running. Start it: make up")


def running(settings: Settings) -> dict[str, ProcessRecord]:
    """Return what ``up`` started and still runs, by name."""
    records = read_records(settings.services_state)
    return {name: record for name, record in records.items() if find(record) is not None}


def _create_database(settings: Settings) -> None:
    from infra.tracking import open_database  # imports MLflow, which the other commands do without

    open_database(settings)


def _prefect(settings: Settings) -> Service:
    url = f"http://{HOST}:{settings.prefect_port}"
    place = ("--host", HOST, "--port", str(settings.prefect_port))
    return Service(
        "prefect",
        ("-m", "prefect", "server", "start", *place),
        lambda: _answers(f"{url}/api/health"),
        url,
    )


def _mlflow(settings: Settings) -> Service:
    url = f"http://{HOST}:{settings.mlflow_port}"
    database = settings.mlflow_tracking_uri
    files = str(settings.mlflow_artifacts)
    place = ("--host", HOST, "--port", str(settings.mlflow_port), "--workers", "1")
    storage = ("--backend-store-uri", database, "--artifacts-destination", files)
    return Service(
        "mlflow",
        ("-m", "mlflow", "server", *place, *storage, "--serve-artifacts"),
        lambda: _answers(f"{url}/health"),
        url,
    )


def _worker(settings: Settings) -> Service:
    api = f"http://{HOST}:{settings.prefect_port}/api"
    # One flow at a time: each takes the whole machine. The pool is made if it is missing.
    pool = ("--pool", WORK_POOL, "--type", "process", "--limit", "1")
    return Service(
        "worker",
        ("-m", "prefect", "worker", "start", *pool),
        lambda: _worker_is_online(api),
    )


def _start(settings: Settings, services: Sequence[Service]) -> None:
    """Start ``services`` side by side and wait until all are ready."""
    api = f"http://{HOST}:{settings.prefect_port}/api"
    for service in services:
        record = launch(
            (sys.executable, *service.arguments),
            log=_log(settings, service.name),
            directory=REPOSITORY,
            environment=environment_of(settings, PREFECT_API_URL=api, PYTHONPATH=str(REPOSITORY)),
            url=service.url,
        )
        records = read_records(settings.services_state)
        write_records(settings.services_state, records | {service.name: record})
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
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise ServiceError(f"{service.name} {problem}. The end of {log}:\n{tail}")


def _stop_all(settings: Settings) -> list[str]:
    """Stop the worker first, so that its flows can still report to the server."""
    records = read_records(settings.services_state)
    stopped = []
    for name in sorted(records, key=lambda name: name != "worker"):
        process = find(records[name])
        if process is not None:
            stop(process, grace=STOP_SECONDS)
            stopped.append(name)
    settings.services_state.unlink(missing_ok=True)
    return stopped


def _faults(settings: Settings) -> Iterator[Fault]:
    ports = {
        "UPCYCLE_PREFECT_PORT": settings.prefect_port,
        "UPCYCLE_MLFLOW_PORT": settings.mlflow_port,
    }
    for name, port in ports.items():
        if not _is_free(port):
            yield Fault(
                name,
                port,
                f"in use by another program; stop that, or choose: make up {name}=PORT",
            )
    if settings.prefect_port == settings.mlflow_port:
        yield Fault("UPCYCLE_MLFLOW_PORT", settings.mlflow_port, "is Prefect's too; choose another")
    if settings.mlflow_tracking_uri.startswith("http"):
        yield Fault(
            "MLFLOW_TRACKING_URI",
            settings.mlflow_tracking_uri,
            "names a server, so there is no database to serve here; unset it",
        )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the servers do: what a closed server leaves behind is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _answers(url: str) -> bool:
    try:
        with _open(url) as answer:
            return answer.status == 200
    except OSError:
        return False


def _worker_is_online(api: str) -> bool:
    try:
        with _open(f"{api}/work_pools/{WORK_POOL}/workers/filter", body=b"{}") as answer:
            return any(worker["status"] == "ONLINE" for worker in json.load(answer))
    except OSError:  # the pool is not there yet
        return False


def _open(url: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    # Without proxies: the user's proxy knows nothing of our loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=10)


@contextmanager
def _lock(settings: Settings) -> Iterator[None]:
    """Let one ``up`` or ``down`` work at a time."""
    settings.services.mkdir(parents=True, exist_ok=True)
    with (settings.services / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _log(settings: Settings, name: str) -> Path:
    return settings.services / f"{name}.log"


def _print_running(settings: Settings) -> None:
    records = running(settings)
    print(f"Logs    {settings.services}")
    print(f"Worker  {'ready for deployed flows' if 'worker' in records else 'not running'}")
    for name, title in {"prefect": "Prefect", "mlflow": "MLflow"}.items():
        print(f"{title:7} {records[name].url if name in records else 'not running'}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says; end with a message and code 1 if that is not possible."""
    parser = argparse.ArgumentParser(prog="python -m infra.services", description=__doc__)
    parser.add_argument("command", choices=["up", "deploy", "down", "status"])
    command = parser.parse_args(arguments).command
    try:
        settings = configure()
        if command == "deploy":
            _deploy(settings)
        else:
            {"up": up, "down": down, "status": status}[command](settings)
    except (InputError, ServiceError, DeploymentError) as error:
        sys.exit(str(error))


def _deploy(settings: Settings) -> None:
    names = deploy(settings)
    for name in names:
        print(f"Deployed {name}")
    print("Run one:")
    run = f"{sys.executable} -m prefect deployment run {names[0]}"
    print(f"  PREFECT_API_URL={settings.prefect_api_url} {run}")


if __name__ == "__main__":
    main()
