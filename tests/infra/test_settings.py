import errno
import os
import pwd
import stat
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from prefect.client.orchestration import SyncPrefectClient

from infra import settings
from infra.services.processes import find, launch, stop, write_records
from upcycle_core.errors import InputError


class Healthy(BaseHTTPRequestHandler):
    """A server that says it is well."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, *_):
        pass


def test_without_an_environment_everything_lies_in_the_checkouts_workspace():
    found = settings.read({})
    assert found.home == settings.REPOSITORY / "workspace"
    assert found.prefect_home == found.home / "prefect"
    assert found.mlflow_tracking_uri == f"sqlite:///{found.home}/mlflow/mlflow.db"
    assert found.mlflow_artifacts == found.home / "mlflow" / "artifacts"
    assert found.ray_address == "local"
    assert found.prefect_api_url is None
    assert (found.prefect_port, found.mlflow_port) == (4200, 5000)
    pages = (found.prefect_pages, found.mlflow_pages)  # where `make up` will put them
    assert pages == ("http://127.0.0.1:4200", "http://127.0.0.1:5000")


def test_the_users_values_win(tmp_path):
    environment = {
        "UPCYCLE_HOME": str(tmp_path),
        "PREFECT_HOME": "/elsewhere/prefect",
        "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "RAY_ADDRESS": "ray://head:10001",
        "PREFECT_API_URL": "http://prefect:4200/api",
        "UPCYCLE_PREFECT_PORT": "4201",
        "UPCYCLE_FLOWS_AT_ONCE": "2",
        "DO_NOT_TRACK": "0",
    }
    completed = dict(environment)
    found = settings.configure(completed)
    assert completed.items() >= environment.items()
    assert str(found.prefect_home) == "/elsewhere/prefect"
    assert found.mlflow_tracking_uri == "http://mlflow:5000"
    assert found.ray_address == "ray://head:10001"
    assert found.prefect_api_url == "http://prefect:4200/api"
    assert (found.prefect_port, found.flows_at_once) == (4201, 2)
    assert (found.prefect_pages, found.mlflow_pages) == (None, None)


def test_configuring_closes_what_would_report_home_or_listen_to_everyone(tmp_path):
    environment = {"UPCYCLE_HOME": str(tmp_path)}
    settings.configure(environment)
    closed = {
        "DO_NOT_TRACK": "1",
        "DVC_NO_ANALYTICS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    assert environment.items() >= closed.items()
    assert environment["PREFECT_HOME"] == str(tmp_path / "prefect")
    assert "PREFECT_API_URL" not in environment


def test_configuring_twice_changes_nothing(tmp_path):
    environment = {"UPCYCLE_HOME": str(tmp_path)}
    first = settings.configure(environment)
    copy = dict(environment)
    assert settings.configure(environment) == first
    assert environment == copy


def test_all_faults_of_the_environment_come_in_one_message(tmp_path):
    (tmp_path / "file").touch()
    environment = {
        "UPCYCLE_HOME": str(tmp_path / "file"),
        "UPCYCLE_PREFECT_PORT": "http",
        "UPCYCLE_MLFLOW_PORT": "70000",
        "UPCYCLE_FLOWS_AT_ONCE": "0",
        "MLFLOW_TRACKING_URI": "https://me:Pl4n/ted@host",
    }
    with pytest.raises(InputError) as error:
        settings.read(environment)
    assert [fault.field for fault in error.value.faults] == [
        "UPCYCLE_PREFECT_PORT",
        "UPCYCLE_MLFLOW_PORT",
        "UPCYCLE_FLOWS_AT_ONCE",
        "MLFLOW_TRACKING_URI",
        "UPCYCLE_HOME",
    ]
    assert "Pl4n" not in str(error.value)
    environment = {"MLFLOW_TRACKING_URI": "postgresql://me:Pl4n/ted@host/mlflow"}  # no other way
    assert settings.read(environment).mlflow_tracking_uri.startswith("postgresql://me")


@pytest.mark.parametrize("name", ["HTTP_PROXY", "https_proxy", "ALL_PROXY"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "example.com, localhost"}, "example.com,localhost,127.0.0.1"),
        ({"no_proxy": "example.com"}, "example.com,127.0.0.1,localhost"),
        ({"no_proxy": "*", "NO_PROXY": "*"}, "*"),
    ],
)
def test_no_proxy_is_asked_for_this_machine(tmp_path, name, before, after):
    environment = {"UPCYCLE_HOME": str(tmp_path), name: "http://proxy:3128", **before}
    for _ in range(2):
        settings.configure(environment)
        assert (environment["NO_PROXY"], environment["no_proxy"]) == (after, after)


def test_without_a_proxy_nothing_is_said_of_one(tmp_path):
    environment = {"UPCYCLE_HOME": str(tmp_path)}
    settings.configure(environment)
    assert not {"NO_PROXY", "no_proxy"} & set(environment)


def test_prefect_reaches_a_server_of_this_machine_past_a_proxy(tmp_path, monkeypatch):
    environment = {"UPCYCLE_HOME": str(tmp_path), "http_proxy": "http://127.0.0.1:9"}
    settings.configure(environment)
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for name in ("http_proxy", "NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, environment.get(name, ""))
        try:
            with SyncPrefectClient(f"http://127.0.0.1:{server.server_port}/api") as client:
                assert client.api_healthcheck() is None
        finally:
            server.shutdown()


@pytest.mark.parametrize("is_there", [True, False])
def test_prefect_s_database_is_for_its_owner_alone(tmp_path, is_there):
    if is_there:
        (tmp_path / "home" / "prefect").mkdir(parents=True)
        (tmp_path / "home" / "prefect").chmod(0o755)
    settings.configure({"UPCYCLE_HOME": str(tmp_path / "home")})
    assert stat.S_IMODE((tmp_path / "home" / "prefect").stat().st_mode) == 0o700


def test_a_folder_of_prefect_s_that_is_the_user_s_stays_as_it_is(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine").chmod(0o755)
    home = str(tmp_path / "home")
    settings.configure({"UPCYCLE_HOME": home, "PREFECT_HOME": str(tmp_path / "mine")})
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o755


def test_a_user_without_a_cache_has_one_in_the_home(tmp_path):
    (tmp_path / "file").touch()
    environment = {"UPCYCLE_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "file")}
    settings.configure(environment)
    assert environment["DVC_SITE_CACHE_DIR"] == str(tmp_path / "home" / "services" / "dvc")
    environment["DVC_SITE_CACHE_DIR"] = "mine"
    settings.configure(environment)
    assert environment["DVC_SITE_CACHE_DIR"] == "mine"


def test_a_cache_that_is_another_user_s_is_not_used(tmp_path, monkeypatch):
    theirs = tmp_path / "cache" / "upcycle" / "dvc"

    def chmod(folder, mode, original=Path.chmod):
        if folder == theirs:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(folder))
        original(folder, mode)

    monkeypatch.setattr(Path, "chmod", chmod)
    home, cache = str(tmp_path / "home"), str(tmp_path / "cache")
    environment = {"UPCYCLE_HOME": home, "XDG_CACHE_HOME": cache}
    settings.configure(environment)
    assert environment["DVC_SITE_CACHE_DIR"] == str(tmp_path / "home" / "services" / "dvc")


def test_a_user_whom_the_system_knows_no_home_of_is_told_to_set_one(tmp_path, monkeypatch):
    def unknown(user):
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(InputError, match=r"HOME = None: is not set, .* set it to a folder"):
        settings.configure({"UPCYCLE_HOME": str(tmp_path)})


def test_a_relative_home_is_seen_from_where_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings.read({"UPCYCLE_HOME": "here"}).home == tmp_path / "here"


def test_a_home_on_s3_is_refused_and_told_what_can_lie_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"= 's3://me:\*\*\*@bucket/home': a URL") as error:
        settings.configure({"UPCYCLE_HOME": "s3://me:Pl4nted@bucket/home"})
    assert "versions.remote" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_our_own_prefect_server_is_used_while_it_lives(tmp_path):
    environment = {"UPCYCLE_HOME": str(tmp_path), "PREFECT_API_URL": "http://prefect:4200/api"}
    place = settings.read(environment)
    record = launch(
        (sys.executable, "-c", "import time; time.sleep(60)"),
        log=place.services / "prefect.log",
        directory=tmp_path,
        environment=os.environ,
        url="http://127.0.0.1:4242",
    )
    write_records(place.services_state, {"prefect": record})
    try:
        assert settings.read(environment).prefect_api_url == "http://127.0.0.1:4242/api"
        assert settings.configure(environment).prefect_api_url == "http://127.0.0.1:4242/api"
        assert environment["PREFECT_API_URL"] == "http://127.0.0.1:4242/api"
    finally:
        stop(find(record), grace=10)
    environment["PREFECT_API_URL"] = "http://prefect:4200/api"
    assert settings.read(environment).prefect_api_url == "http://prefect:4200/api"


def test_prefect_sees_what_configure_set(tmp_path):
    script = (
        "from infra import settings; settings.configure()\n"
        "from prefect.settings import PREFECT_HOME, PREFECT_SERVER_ANALYTICS_ENABLED\n"
        "print(PREFECT_HOME.value(), PREFECT_SERVER_ANALYTICS_ENABLED.value())"
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**inherited, "UPCYCLE_HOME": str(tmp_path)},
        cwd=settings.REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "prefect"), "False"]


@pytest.mark.parametrize("own", [None, "12"])
def test_vllm_is_told_to_leave_memory_to_other_programs(tmp_path, monkeypatch, own):
    """Its own default asks for nearly all of a machine's, and ends where something else runs."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if own is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", own)
    found = settings.environment_of(settings.read({"UPCYCLE_HOME": str(tmp_path)}))
    assert found["VLLM_CPU_KVCACHE_SPACE"] == (own or "4")
