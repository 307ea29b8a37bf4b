import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows import restore
from tasks.engine.workspace import PROVENANCE, RESTORING, Held, Workspace, take
from upcycle_core.errors import InputError


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "demo")


def publish(workspace, text="one", artifact="experts/law"):
    staged = workspace.stage(artifact)
    (staged / "weights").write_text(text)
    workspace.publish(staged, artifact, {"fingerprint": text})


def test_published_artifact_carries_what_made_it(workspace):
    publish(workspace)
    assert workspace.provenance("experts/law")["fingerprint"] == "one"
    assert list(workspace.provenance("experts/law")["files"]) == ["weights"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "weights").write_text("other"),
        lambda d: (d / "weights").unlink(),
        lambda d: (d / "more").write_text("x"),
        lambda d: (d / "._weights").write_text("found by who looks for weights"),
    ],
    ids=["changed", "missing", "added", "a twin"],
)
def test_artifact_that_is_not_as_published_has_no_provenance(workspace, damage):
    publish(workspace)
    damage(workspace.path("experts/law"))
    assert workspace.provenance("experts/law") is None


@pytest.mark.parametrize("left", [".DS_Store", ".weights.swp", ".nfs0001", ".ipynb/weights"])
def test_what_is_hidden_beside_published_files_is_no_damage(workspace, left):
    """Of who looks into a folder: an expert would be trained again for it."""
    publish(workspace)
    place = workspace.path("experts/law") / left
    place.parent.mkdir(exist_ok=True)
    place.write_text("left")
    assert workspace.provenance("experts/law")["fingerprint"] == "one"
    assert workspace.damaged("experts/law") == []
    hidden = workspace.stage("router")
    (hidden / ".own").write_text("published")
    workspace.publish(hidden, "router", {})
    (workspace.path("router") / ".own").write_text("other")
    assert workspace.provenance("router") is None


def test_publishing_again_replaces_and_leaves_no_staging(workspace):
    publish(workspace, "one")
    publish(workspace, "two")
    assert (workspace.path("experts/law") / "weights").read_text() == "two"
    assert list(workspace.staging.iterdir()) == []


def test_digest_changes_with_content(workspace):
    publish(workspace, "one")
    first = workspace.digest("experts/law")
    publish(workspace, "two")
    assert workspace.digest("experts/law") not in (first, None)
    assert workspace.digest("experts/none") is None


def test_kill_between_the_two_moves_gives_the_old_artifact_back(workspace):
    publish(workspace, "one")
    old = workspace.staging / "experts@law.old"
    workspace.path("experts/law").rename(old)
    (workspace.stage("experts/law") / "weights").write_text("half")
    with workspace.lock("a test"):
        assert workspace.provenance("experts/law")["fingerprint"] == "one"
        assert not workspace.staging.exists()


def test_kill_after_the_second_move_keeps_the_new_artifact(workspace):
    publish(workspace, "one")
    kept = workspace.path("experts/law")
    old = workspace.staging / "experts@law.old"
    kept.rename(old)
    staged = workspace.stage("experts/law")
    (staged / "weights").write_text("two")
    staged.rename(kept)
    with workspace.lock("a test"):
        assert (kept / "weights").read_text() == "two"
        assert not workspace.staging.exists()


HOLD = """
import sys, time
from pathlib import Path
from tasks.engine.workspace import Workspace
with Workspace(Path(sys.argv[1])).lock("the other flow"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_workspace_is_held_by_one_process_until_it_dies(workspace):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(workspace.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(InputError, match=f"held by the other flow, process {holder.pid}"),
            workspace.lock("a test"),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with workspace.lock("a test"):
                return
        except InputError:
            time.sleep(0.1)
    pytest.fail("the lock of a dead process still holds")


def test_half_a_restore_is_held_by_the_next_restore_alone(workspace):
    workspace.root.mkdir(parents=True, exist_ok=True)
    (workspace.root / ".restoring").touch()
    refused = pytest.raises(InputError, match="its restore was cut off; run that again")
    with refused, workspace.lock("a flow"):
        pass
    with workspace.lock("the flow restore", restores=True):
        assert workspace.holder().startswith("the flow restore")


def test_a_workspace_on_a_full_disk_can_be_held_and_so_be_tidied(workspace, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with workspace.lock("the flow tidy"):
            assert workspace.holder() == ""
            with pytest.raises(Held, match="held by another process"), workspace.lock("a flow"):
                pass
    with workspace.lock("a flow"):
        assert workspace.holder().startswith("a flow, process ")


def test_a_restore_that_is_killed_while_it_clears_away_is_still_half_a_restore(
    workspace, monkeypatch
):
    for name in (RESTORING, "a", "b", "c"):
        (workspace.root / name).mkdir(parents=True, exist_ok=True)
    (workspace.root / RESTORING).rmdir()
    (workspace.root / RESTORING).touch()
    removed = []

    def killed(path):
        removed.append(path.name)
        if len(removed) == 3:
            raise KeyboardInterrupt
        path.rmdir()

    monkeypatch.setattr(restore, "remove", killed)
    with pytest.raises(KeyboardInterrupt), restore.all_or_nothing(workspace):
        pass
    assert RESTORING not in removed
    assert (workspace.root / RESTORING).exists()


def test_a_restore_that_fails_removes_its_mark_after_all_that_it_has_brought(
    workspace, monkeypatch
):
    there = []

    def watched(remove):
        def call(*arguments, **options):
            there.append({path.name for path in workspace.root.iterdir()})
            remove(*arguments, **options)

        return call

    def bring():
        for name in (".waiting", "a", "b"):
            (workspace.root / name).mkdir()
        (workspace.root / "c").touch()
        for name in ("unlink", "rmdir"):
            monkeypatch.setattr(os, name, watched(getattr(os, name)))
        raise ValueError("fails")

    with (
        pytest.raises(ValueError, match="fails"),
        workspace.lock("the flow restore", restores=True),
        restore.all_or_nothing(workspace),
    ):
        bring()
    assert len(there) >= 7
    assert all(".lock" in names for names in there[:-1])
    assert all(RESTORING in names for names in there if names & {"a", "b", "c"})
    assert not workspace.root.exists()


def test_a_restore_that_fails_removes_what_it_can_and_leaves_its_mark_where_it_cannot(
    workspace, monkeypatch
):
    def failing(path, remove=restore.remove):
        if path.name == "a":
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        remove(path)

    def bring():
        for name in ("a", "b", "c"):
            (workspace.root / name).mkdir()
        raise ValueError("fails")

    monkeypatch.setattr(restore, "remove", failing)
    with (
        pytest.raises(ValueError, match="fails"),
        workspace.lock("the flow restore", restores=True),
        restore.all_or_nothing(workspace),
    ):
        bring()
    left = {path.name for path in workspace.root.iterdir()}
    assert left == {"a", ".lock", RESTORING}


@pytest.mark.parametrize("place", ["experts", "experts/law", ".pieces", ".lock", "params.yaml"])
def test_link_out_of_the_workspace_is_refused_before_anything_is_written(
    workspace, tmp_path, place
):
    outside = tmp_path / "outside"
    is_file = place in (".lock", "params.yaml")
    outside.write_text("kept") if is_file else outside.mkdir()
    link = workspace.root / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with (
        pytest.raises(InputError, match=rf"{link}.*a symbolic link out of the workspace"),
        workspace.lock("a test"),
    ):
        pass
    assert outside.read_text() == "kept" if is_file else not list(outside.iterdir())


def test_workspace_that_is_a_link_is_refused_and_a_link_above_or_inside_is_not(tmp_path):
    (tmp_path / "elsewhere" / "demo").mkdir(parents=True)
    (tmp_path / "demo").symlink_to(tmp_path / "elsewhere" / "demo")
    with (
        pytest.raises(InputError, match=r"demo.*a symbolic link to .*UPCYCLE_HOME"),
        Workspace(tmp_path / "demo").lock("a test"),
    ):
        pass
    (tmp_path / "home").symlink_to(tmp_path / "elsewhere")
    inside = Workspace(tmp_path / "home" / "demo")
    (inside.root / "link").symlink_to(inside.root / ".dvc")
    with inside.lock("a test"):
        pass


def no_links(*_args, **_more):
    raise OSError(errno.EOPNOTSUPP, "no links")


@pytest.mark.parametrize("is_file", [True, False])
def test_what_was_taken_is_there_for_the_next_attempt(tmp_path, is_file):
    """Between the end of a piece of hours and its publishing MLflow may go, or a kill come."""
    source, target = tmp_path / "piece", tmp_path / "out"
    target.mkdir()
    if is_file:
        source.write_text("b")
    else:
        (source / "below").mkdir(parents=True)
        (source / "below" / "piece").write_text("b")
        (source / PROVENANCE).write_text("{}")
    for _ in range(2):
        take(source, target)
        files = [p.relative_to(target) for p in target.rglob("*") if p.is_file()]
        assert files == [Path("piece" if is_file else "below/piece")]
        assert (target / files[0]).read_text() == "b"
        shutil.rmtree(target)
        target.mkdir()


def test_files_that_cannot_all_be_linked_are_moved_whole(tmp_path, monkeypatch):
    source, target = tmp_path / "piece", tmp_path / "out"
    (source / "below").mkdir(parents=True)
    target.mkdir()
    for name in ("a", "b"):
        (source / "below" / name).write_text(name)
    link, made = os.link, []

    def once(*args, **more):
        if made:
            raise OSError(errno.EMLINK, "no more")
        made.append(link(*args, **more))

    monkeypatch.setattr("tasks.engine.workspace.os.link", once)
    take(source, target)
    files = sorted(str(p.relative_to(target)) for p in target.rglob("*"))
    assert files == ["below", "below/a", "below/b"]


def test_a_kill_while_files_are_taken_leaves_no_half_of_them(tmp_path, monkeypatch):
    """A piece counts as finished while its folder is there: it must not be there half-empty."""
    source, target = tmp_path / "piece", tmp_path / "out"
    source.mkdir()
    target.mkdir()
    for name in ("a", "b"):
        (source / name).write_text(name)

    def killed(entry, place):
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.engine.workspace.os.link", no_links)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.engine.workspace.shutil.move", killed)
        with pytest.raises(KeyboardInterrupt):
            take(source, target)
    assert not source.exists()
    source.mkdir()  # the piece is run again
    (source / "a").write_text("again")
    take(source, target)
    assert [path.name for path in target.iterdir()] == ["a"]
    assert (target / "a").read_text() == "again"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
