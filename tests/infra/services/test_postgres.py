"""Prefect and MLflow on a real PostgreSQL, which runs as a user of its own and on loopback."""

import dataclasses
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import psycopg2
import pytest
from prefect_server import free_port
from project import ROOT

from infra import settings
from infra.services.processes import read_records
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.renaming import rename_folders
from infra.tracking.runs import Tracker
from upcycle_core.errors import InputError

pytestmark = pytest.mark.faults

PASSWORD = secrets.token_hex(16)
START_SECONDS = 120
FLOW = """
from infra import settings

SETTINGS = settings.configure()

from pathlib import Path

from prefect import flow

from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.renaming import rename_folders
from infra.tracking.runs import Tracker

@flow
def hello():
    with Tracker(SETTINGS, "hello").start_run("flow") as run:
        version = Registry(SETTINGS).register("hello", FOLDER, Registration(), run=run)
    Registry(SETTINGS).set_alias(version, "champion")

FOLDER = Path(__file__).parent
if __name__ == "__main__":
    hello()
"""


def programs() -> Path:
    """Where PostgreSQL's server is: Debian keeps it off the PATH."""
    places = [Path(found).parent for found in [shutil.which("initdb")] if found]
    if shutil.which("pg_config"):
        done = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=True)
        places.append(Path(done.stdout.strip()))
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = [place for place in places if (place / "initdb").exists()]
    if not found:
        pytest.fail("needs the programs of a PostgreSQL server: apt install postgresql")
    return found[0]


def another_user() -> dict[str, object]:
    """Whom the server runs as: it refuses root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = names.get("postgres") or names["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@pytest.fixture(scope="module")
def databases():
    """The addresses of two empty databases, by name."""
    bin_folder, user = programs(), another_user()
    # Not in the session's folder, which is closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir=os.environ["UPCYCLE_TESTS_SYSTEM_FOLDER"]))
    (folder / "password").write_text(PASSWORD)
    if user:
        for path in (folder, folder / "password"):
            os.chown(path, user["user"], user["group"])
    data, port = folder / "data", free_port()
    access = ["--username=upcycle", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}"]
    make = [bin_folder / "initdb", f"--pgdata={data}", *access, "--locale=C", "--encoding=UTF8"]
    start = [bin_folder / "postgres", "-D", data, "-p", str(port), "-k", folder]
    options = ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
    server = None
    try:
        subprocess.run([*make, "--no-sync"], cwd=folder, check=True, capture_output=True, **user)
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(
                [*start, *options], cwd=folder, stdout=log, stderr=log, **user
            )
        place = {"host": "127.0.0.1", "port": port, "user": "upcycle", "password": PASSWORD}
        create_databases(place, server, folder / "log")
        address = f"upcycle:{PASSWORD}@127.0.0.1:{port}"
        yield {
            "prefect": f"postgresql+asyncpg://{address}/prefect",
            "mlflow": f"postgresql://{address}/mlflow",
            "sql": place,
        }
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)  # PostgreSQL's "fast" shutdown
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def create_databases(place, server, log):
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connection = psycopg2.connect(dbname="postgres", **place)
            break
        except psycopg2.OperationalError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
    connection.autocommit = True
    with connection.cursor() as cursor:
        for name in ("prefect", "mlflow"):
            cursor.execute(f"CREATE DATABASE {name}")
    connection.close()


def ask(databases, name, query):
    connection = psycopg2.connect(dbname=name, **databases["sql"])
    try:
        with connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()
    finally:
        connection.close()


def change(databases, name, table, column, folder):
    """Let a column name ``folder`` in place of the address that holds anywhere."""
    connection = psycopg2.connect(dbname=name, **databases["sql"])
    values = ("mlflow-artifacts:", folder.as_uri())
    with connection, connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET {column} = replace({column}, %s, %s)", values)
    connection.close()


@pytest.fixture
def environment(databases, tmp_path):
    ours = ("PREFECT_", "MLFLOW_TRACKING_URI", "UPCYCLE_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {
        **inherited,
        "UPCYCLE_HOME": str(tmp_path / "home"),
        "UPCYCLE_PREFECT_PORT": str(free_port()),
        "UPCYCLE_MLFLOW_PORT": str(free_port()),
        "PREFECT_API_DATABASE_CONNECTION_URL": databases["prefect"],
        "MLFLOW_TRACKING_URI": databases["mlflow"],
        "PYTHONPATH": str(ROOT),
    }


def python(*arguments, environment):
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_run_a_version_and_an_alias_are_kept_there(databases, environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = settings.read(environment)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with Tracker(place, "direct").start_run("run") as run:
        run.log_metrics({f"metric{i}": float(i) for i in range(1001)})
        run.log_params({"router": {"ridge_lambda": 0.01}})
        registration = Registration(metrics={"score": 0.5}, files={"recipe.yaml": "name: pico"})
        registry = Registry(place)
        version = registry.register("direct", tmp_path / "model", registration, run=run)
    registry.set_alias(version, "champion")
    found = registry.find("direct", "champion")
    assert (found.number, found.metrics) == (1, {"score": 0.5})
    folder = registry.download("models:/direct@champion", tmp_path / "back")
    assert (folder / "upcycle" / "recipe.yaml").read_text() == "name: pico"

    assert ask(databases, "mlflow", "SELECT name, version FROM model_versions") == [("direct", 1)]
    runs = f"SELECT status FROM runs WHERE run_uuid = '{run.id}'"
    assert ask(databases, "mlflow", runs) == [("FINISHED",)]
    other = settings.read({**environment, "UPCYCLE_HOME": str(tmp_path / "home" / "other")})
    with pytest.raises(InputError, match="another home uses it"):
        Tracker(other, "direct")

    # As earlier versions named files.
    change(databases, "mlflow", "experiments", "artifact_location", place.mlflow_artifacts)
    change(databases, "mlflow", "runs", "artifact_uri", place.mlflow_artifacts)
    assert rename_folders(other) == []
    assert rename_folders(place) == ["direct"]
    assert ask(databases, "mlflow", "SELECT artifact_uri FROM runs") == [
        (f"mlflow-artifacts:/direct/{run.id}/artifacts",)
    ]

    # Files where they belong, and neither a database nor a file of MLflow's own choice.
    assert list(place.mlflow_artifacts.rglob("config.json"))
    assert not list(place.home.rglob("*.db"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "home", "model"]


def test_servers_and_flows_work_on_it_and_its_password_shows_nowhere(
    databases, environment, tmp_path
):
    (tmp_path / "flow").mkdir()
    (tmp_path / "flow" / "hello.py").write_text(FLOW)
    place = settings.read(environment)
    shown = []
    try:
        shown.append(python("-m", "infra.services", "up", environment=environment))
        records = read_records(place.services_state).values()
        leaders = [psutil.Process(record.pid) for record in records]
        family = [p for leader in leaders for p in [leader, *leader.children(recursive=True)]]
        commands = [" ".join(process.cmdline()) for process in family]
        shown.append(python(tmp_path / "flow" / "hello.py", environment=environment))
        mlflow = f"http://127.0.0.1:{place.mlflow_port}"
        remote = dataclasses.replace(place, mlflow_tracking_uri=mlflow)
        assert Registry(remote).find("hello", "champion").number == 1
        with Tracker(remote, "remote").start_run("through the server") as run:
            run.log_metrics({"score": 1.0})
    finally:
        shown.append(python("-m", "infra.services", "down", environment=environment))
    states = "SELECT state_type FROM flow_run"
    assert ask(databases, "prefect", states) == [("COMPLETED",)]
    names = "SELECT name FROM experiments WHERE name <> 'Default' ORDER BY name"
    assert [name for (name,) in ask(databases, "mlflow", names)][-2:] == ["hello", "remote"]

    texts = {f"command {command}": command for command in commands}
    texts |= {f"output {i}": done.stdout + done.stderr for i, done in enumerate(shown)}
    files = [path for path in place.home.rglob("*") if path.is_file()]
    texts |= {str(path): path.read_bytes().decode(errors="replace") for path in files}
    assert len(commands) >= 3
    assert any(path.name == "state.json" or path.suffix == ".log" for path in files)
    assert not [where for where, text in texts.items() if PASSWORD in text]


def test_a_driver_that_is_missing_is_told_before_anything_starts(environment, monkeypatch):
    from infra.services import servers

    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"\.\[postgres\]") as error:
        servers.up(settings.read(environment))
    assert PASSWORD not in str(error.value)
    assert "://upcycle:***@127.0.0.1" in str(error.value)
