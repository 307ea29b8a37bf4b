"""A full disk is told wherever it shows, and said with what to do."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import httpx
import pytest
from mlflow.exceptions import MlflowException
from ray.exceptions import RayTaskError
from safetensors import SafetensorError

from flows.running.command_line import command, reach_server
from flows.running.refused import in_a_line
from infra import disk, settings
from infra.disk import disk_faults, full_home
from infra.services import commands
from upcycle_core.errors import InputError

SQLITE = MlflowException("(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT ...]")
SAID = "': the disk is full (0 MB free), or a file larger than allowed, and the databases of "


@pytest.fixture
def full(tmp_path, monkeypatch):
    """A home on a full disk, beside others that are not."""
    home = tmp_path / "home"
    monkeypatch.setenv("UPCYCLE_HOME", str(home))
    usage = shutil.disk_usage(tmp_path)
    there = home.resolve()
    free = lambda path: 0 if Path(path).resolve() in (there, tmp_path) else 10**9  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free(path)))
    return home


def carried_by_ray(error):
    """What ``ray.get`` raises where a worker has raised ``error``."""
    return RayTaskError("piece", "traceback", error).as_instanceof_cause()


def test_full_disk_is_said_with_what_to_do(tmp_path):
    with (
        pytest.raises(InputError, match=r"the disk is full .* finished pieces are kept"),
        disk_faults("experts@law", tmp_path),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EFBIG, os.strerror(errno.EFBIG)),
        SafetensorError("Error while serializing: I/O error: No space left (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
        OSError("100000 requested and 6250 written"),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
        carried_by_ray(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    ],
    ids=["limit", "safetensors", "torch", "numpy", "sqlite", "worker"],
)
def test_full_disk_is_told_wherever_it_shows(tmp_path, error):
    with (
        pytest.raises(InputError, match="the disk is full"),
        disk_faults("experts@law", tmp_path),
    ):
        raise error


def test_other_errors_pass_through(tmp_path):
    with pytest.raises(PermissionError), disk_faults("experts@law", tmp_path):
        raise PermissionError(errno.EACCES, "no")


def failing(arguments):
    raise SQLITE


def test_a_command_that_meets_a_full_disk_names_the_home(full, capsys):
    assert command(failing)([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"UPCYCLE_HOME = '{full}{SAID}")
    assert "python -m flows.tidy RECIPE shows what else may go" in said
    assert len(said.splitlines()) == 1


def test_a_server_whose_database_finds_no_room_is_no_traceback(full, capsys, monkeypatch):
    request = httpx.Request("POST", "http://127.0.0.1:4200/api/flow_runs")

    @command
    def main(arguments):
        response = httpx.Response(500, request=request)
        raise httpx.HTTPStatusError("Server error", request=request, response=response)

    assert main([]) == 2
    assert capsys.readouterr().err.startswith(f"UPCYCLE_HOME = '{full}{SAID}")
    monkeypatch.undo()
    with pytest.raises(httpx.HTTPStatusError):  # of another fault nobody says so
        main([])


def test_make_up_that_meets_a_full_disk_names_the_home(full, monkeypatch):
    monkeypatch.setattr(commands, "up", failing)
    with pytest.raises(SystemExit, match=r"^UPCYCLE_HOME = .*the disk is full"):
        commands.main(["up"])


def test_a_flow_that_meets_a_full_disk_fails_in_a_line(full):
    state = in_a_line(failing)([])
    assert state.message.startswith(f"UPCYCLE_HOME = '{full}{SAID}")


def test_a_flow_whose_databases_find_no_room_does_not_begin(full):
    with pytest.raises(InputError, match=r"^UPCYCLE_HOME = .*the disk is full"):
        reach_server(settings.read({"UPCYCLE_HOME": str(full)}))


def test_a_full_disk_of_temporary_files_is_not_the_home_s(tmp_path, monkeypatch):
    there = Path(tempfile.gettempdir())
    monkeypatch.setattr(disk, "_free", lambda path: 0 if path == there else 10**9)
    fault = full_home(tmp_path / "home")
    assert (fault.field, fault.value) == ("TMPDIR", str(there))
    monkeypatch.setattr(disk, "_free", lambda path: 0)
    assert full_home(tmp_path / "home").field == "UPCYCLE_HOME"
