"""What another user owns is said in a line that names him."""

import errno
import os
from contextlib import contextmanager

import pytest

from flows.running.command_line import command
from infra import settings
from infra.permissions import permission_faults
from infra.services import commands
from tasks.engine.workspace import Workspace
from upcycle_core.errors import InputError

NOBODY = 65534


@pytest.fixture
def closed(tmp_path):
    """A folder that nobody but its owner may write to, and not even he."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    yield folder
    folder.chmod(0o700)


@contextmanager
def unprivileged():
    """Root may do everything: be nobody meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_home_that_is_another_user_s_is_named_with_its_owner(closed):
    with unprivileged(), pytest.raises(InputError) as error:
        settings.configure({"UPCYCLE_HOME": str(closed / "home")})
    said = str(error.value)
    assert said.startswith(f"UPCYCLE_HOME = '{closed}/home")
    assert f" belongs to {closed.owner()}, and this is " in said
    assert len(said.splitlines()) == 1


def test_a_home_that_is_mounted_read_only_is_named_with_that(closed, monkeypatch):
    statvfs = os.statvfs(closed)
    flags = (*statvfs[:8], statvfs.f_flag | os.ST_RDONLY, statvfs.f_namemax)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(flags))
    with unprivileged(), pytest.raises(InputError) as error:
        settings.configure({"UPCYCLE_HOME": str(closed / "home")})
    said = f"UPCYCLE_HOME = '{closed}/home': lies on a file system that is mounted read-only: have "
    assert str(error.value).startswith(said)


def test_a_workspace_that_is_another_user_s_is_named(closed):
    workspace = Workspace(closed / "pico")
    with (
        unprivileged(),
        pytest.raises(InputError, match=r"workspace = .*Permission denied; .* belongs to "),
        workspace.lock("a flow"),
    ):
        pass


def test_a_command_ends_with_a_line_where_a_file_is_another_user_s(closed, capsys):
    @command
    def main(arguments):
        (closed / "file").write_text("x")

    with unprivileged():
        assert main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"file = '{closed}/file': Permission denied; ")
    assert len(said.splitlines()) == 1


def test_make_down_ends_with_a_line_where_a_file_is_another_user_s(closed, monkeypatch):
    def refused(place):
        raise PermissionError(errno.EACCES, "Permission denied", str(closed))

    monkeypatch.setattr(commands, "down", refused)
    with pytest.raises(SystemExit, match=r"^file = .*/closed': Permission denied; it belongs to "):
        commands.main(["down"])


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "gone", "x"), PermissionError(errno.EPERM, "no")]
)
def test_what_is_no_refusal_of_a_file_stays_what_it_is(error):
    with pytest.raises(type(error)), permission_faults("file"):
        raise error
