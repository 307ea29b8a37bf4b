"""What is published comes back from a DVC remote, whatever its place is called."""

import configparser
import errno
import importlib.util
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml
from dvc.config_schema import REMOTE_SCHEMAS
from dvc.fs import known_implementations as SCHEMES
from dvc.utils.serialize import _yaml
from zc.lockfile import LockFile

from infra import settings
from infra.cluster.calls import heeding
from infra.versioning import remote as remote_module
from infra.versioning import versions as module
from infra.versioning.cache import remove_left_lock
from infra.versioning.dvc_command import ReadOnce, dump_whole
from infra.versioning.versions import NAMED, PACKAGES, Versions, remote_faults
from upcycle_core.errors import Fault, InputError

PIPELINE = "stages:\n  model: {cmd: 'true', outs: [model]}\n"
PLACES = ("plain", "Bücher & Rechte #2, 100% 'neu'")

BOTH = {"comparison": "comparison", "model": "model"}


def pushed(folder, remote, pipeline=PIPELINE):
    """A project whose model lies in a remote, and another that has none yet."""
    here, there = (Versions(folder / side) for side in ("here", "there"))
    for versions in (here, there):
        versions.prepare(pipeline=pipeline, params="")
    (here.root / "model").mkdir()
    (here.root / "model" / "weights").write_text("weights")
    here.commit(["model"])
    here.push(str(remote))
    return here, there


def test_who_reads_what_is_written_anew_reads_the_old_text_to_its_end(tmp_path):
    versions = Versions(tmp_path)
    versions.prepare(pipeline=PIPELINE, params="a: 1\n")
    with (tmp_path / "params.yaml").open() as reader:
        assert reader.read(1) == "a"
        reader.seek(0)
        versions.prepare(pipeline=PIPELINE, params="b: 2\n")
        assert reader.read() == "a: 1\n"
    assert (tmp_path / "params.yaml").read_text() == "b: 2\n"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("place", PLACES)
def test_what_was_pushed_comes_back_elsewhere(tmp_path, place):
    remote = tmp_path / place
    here, there = pushed(tmp_path / f"in {place}", remote)
    shutil.rmtree(here.root / ".dvc" / "cache")
    there.pull(here.lock_text(), str(remote), {"model": "model"})
    assert (there.root / "model" / "weights").read_text() == "weights"


def test_what_is_pushed_to_a_directory_is_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(remote_module, "sync", synced.append)
    remote = tmp_path / "remote"
    here, _ = pushed(tmp_path, remote)
    everything = {*remote.rglob("*"), remote, tmp_path}
    assert len(everything) > 6
    assert set(synced) == everything
    synced.clear()
    here.push(str(remote))
    assert synced == []
    (here.root / "model" / "more").write_text("more weights")
    here.commit(["model"])
    here.push(str(remote))
    assert {path for path in synced if path.is_file()} == {*remote.rglob("*")} - everything - {
        path.parent for path in synced if path.is_file()
    }


LEFT = [
    pytest.param("nothing", marks=pytest.mark.faults),
    "its list",
    pytest.param("its weights", marks=pytest.mark.faults),
]


@pytest.mark.parametrize("left", LEFT)
def test_what_the_cache_has_lost_is_sent_to_another_remote_all_the_same(tmp_path, left):
    """DVC says that the push went well, and what is restored from there later is missing."""
    here, there = pushed(tmp_path, tmp_path / "remote")
    (here.root / "model" / "more").write_text("more weights")
    here.commit(["model"])
    kept = [file for file in (here.root / ".dvc" / "cache").rglob("*") if file.is_file()]
    stays = {"nothing": (), "its list": (".dir",), "its weights": ("",)}[left]
    for file in kept:
        if file.suffix not in stays:
            file.unlink()
    here.push(str(tmp_path / "other"))
    there.pull(here.lock_text(), str(tmp_path / "other"), {"model": "model"})
    assert (there.root / "model" / "weights").read_text() == "weights"
    assert (there.root / "model" / "more").read_text() == "more weights"


def test_what_neither_cache_nor_workspace_has_is_said_and_the_rest_is_sent(tmp_path, caplog):
    pipeline = f"{PIPELINE}  seed: {{cmd: 'true', outs: [seed]}}\n"
    here, there = pushed(tmp_path, tmp_path / "remote", pipeline)
    (here.root / "seed").mkdir()
    (here.root / "seed" / "weights").write_text("others")
    here.commit(["seed"])
    shutil.rmtree(here.root / ".dvc" / "cache")
    shutil.rmtree(here.root / "seed")
    here.push(str(tmp_path / "other"))
    assert "lacks 1 objects" in caplog.text
    there.pull(here.lock_text(), str(tmp_path / "other"), {"model": "model"})
    assert (there.root / "model" / "weights").read_text() == "weights"


@pytest.mark.faults
def test_what_a_power_cut_left_short_in_a_directory_is_pushed_again(tmp_path):
    remote = tmp_path / "remote"
    here, there = pushed(tmp_path, remote)
    for file in [file for file in remote.rglob("*") if file.is_file()]:
        file.chmod(0o644)
        file.write_bytes(b"")
    here.push(str(remote))
    there.pull(here.lock_text(), str(remote), {"model": "model"})
    assert (there.root / "model" / "weights").read_text() == "weights"


def test_what_a_killed_push_was_writing_goes_after_a_day(tmp_path):
    folder = tmp_path / "remote" / "files" / "md5" / "ab"
    folder.mkdir(parents=True)
    names = (".old.tmp", ".young.tmp", "c" * 30)
    for name in names:
        (folder / name).write_text("half")
    for name in (".old.tmp", "c" * 30):
        os.utime(folder / name, (0, time.time() - 25 * 3600))
    remote_module.mend(tmp_path, tmp_path / "remote")
    assert sorted(file.name for file in folder.iterdir()) == sorted(names[1:])


def test_an_object_that_is_damaged_here_is_not_written_to_a_remote(tmp_path):
    remote = tmp_path / "remote"
    here, _ = pushed(tmp_path, remote)
    sent = {file: file.read_bytes() for file in remote.rglob("*") if file.is_file()}
    for file in (here.root / ".dvc" / "cache").rglob("*.dir"):
        file.chmod(0o644)
        file.write_bytes(b"")
    remote_module.mend(here.root, remote)
    assert {file: file.read_bytes() for file in sent} == sent


def test_a_remote_whose_disk_is_not_mounted_is_not_begun_anew_in_its_place(tmp_path):
    remote = tmp_path / "disk" / "remote"
    here, _ = pushed(tmp_path, remote)
    remote.rename(tmp_path / "elsewhere")
    here.push(str(remote))  # of the same disk: somebody has emptied it
    record = here.root / remote_module.PUSHED
    record.write_text(json.dumps({**json.loads(record.read_text()), "disk": -1}))
    here.push(str(remote))  # a disk that got another number, with all that it held
    record.write_text(json.dumps({**json.loads(record.read_text()), "disk": -1}))
    shutil.rmtree(remote.parent)
    with pytest.raises(InputError, match="mount that one"):
        here.push(str(remote))
    assert not remote.exists()
    record.unlink()
    here.push(str(remote))  # who wants a new one says so


def test_a_directory_that_the_system_cannot_reach_is_said_in_a_line(tmp_path, monkeypatch):
    """Of a server that is away; pathlib passes on what it does not know."""

    def away(remote):
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(remote))

    here = Versions(tmp_path / "here")
    here.prepare(pipeline=PIPELINE, params="")
    monkeypatch.setattr(remote_module, "_objects", away)
    with pytest.raises(InputError, match=r"versions\.remote = .* not connected.* run the same"):
        here.push(str(tmp_path / "remote"))


def test_what_the_pipeline_keeps_here_is_neither_pushed_nor_asked_for(tmp_path):
    pipeline = PIPELINE.replace("[model]", "[model: {push: false}]")
    pipeline += "  seed: {cmd: 'true', outs: [seed]}\n"
    here, there = pushed(tmp_path, tmp_path / "remote", pipeline)
    (here.root / "seed").mkdir()
    (here.root / "seed" / "weights").write_text("others")
    here.commit(["seed"])
    here.push(str(tmp_path / "remote"))
    kept = [file.read_text() for file in (tmp_path / "remote").rglob("*") if file.is_file()]
    assert "others" in kept
    assert "weights" not in kept
    outs = {"model": "model", "seed": "seed"}
    there.pull(here.lock_text(), str(tmp_path / "remote"), outs, only=["seed"])
    assert [path.name for path in sorted(there.root.iterdir()) if path.is_dir()][-1] == "seed"
    assert not (there.root / "model").exists()
    with pytest.raises(InputError, match="dvc pull"):
        there.pull(here.lock_text(), str(tmp_path / "remote"), outs, only=["model"])


def test_a_stage_that_was_not_run_is_left_out(tmp_path):
    pipeline = f"{PIPELINE}  comparison: {{cmd: 'true', outs: [comparison]}}\n"
    here, there = pushed(tmp_path, tmp_path / "remote", pipeline)
    there.pull(
        here.lock_text(), str(tmp_path / "remote"), {"comparison": "comparison", "model": "model"}
    )
    assert (there.root / "model" / "weights").exists()


def test_what_looks_like_a_number_in_a_lock_is_what_dvc_wrote(tmp_path):
    """Of a million digests one has digits alone, but for an e."""
    here, there = pushed(tmp_path, tmp_path / "remote")
    lock, digest = yaml.safe_load(here.lock_text()), "1234567890123456789012345678e123"
    lock["stages"]["model"]["deps"] = [{"path": "x", "hash": "md5", "md5": digest, "size": 3}]
    lock["stages"]["model"]["params"] = {"params.yaml": {"rate": 1e-05, "name": "1e-05"}}
    there.pull(json.dumps(lock), str(tmp_path / "remote"), {"model": "model"})
    assert (there.root / "model" / "weights").read_text() == "weights"
    written = _yaml.parse_yaml(there.lock_text(), "dvc.lock")["stages"]["model"]
    assert written["deps"][0]["md5"] == digest
    assert written["params"] == lock["stages"]["model"]["params"]


def test_what_was_changed_in_a_remote_does_not_come_back(tmp_path):
    here, there = pushed(tmp_path, tmp_path / "remote")
    files = [f for f in (tmp_path / "remote").rglob("*") if f.is_file()]
    [kept] = [file for file in files if file.read_text() == "weights"]
    kept.chmod(0o644)
    kept.write_text("Weights")
    with pytest.raises(InputError, match=r"dvc pull.*Checkout failed .* model"):
        there.pull(
            here.lock_text(),
            str(tmp_path / "remote"),
            {"comparison": "comparison", "model": "model"},
        )
    assert not (there.root / "model").exists()


def test_what_dvc_remembers_lies_where_no_one_else_writes(tmp_path, monkeypatch):
    """It is read as pickles."""
    environment = {"UPCYCLE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    settings.configure(environment)
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", environment["DVC_SITE_CACHE_DIR"])
    versions = Versions(tmp_path / "here")
    versions.prepare(pipeline=PIPELINE, params="")
    (versions.root / "model").mkdir()
    versions.commit({"model": "model"})
    own = tmp_path / "upcycle" / "dvc"
    assert list(own.rglob("*.db"))
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


@pytest.mark.faults
@pytest.mark.parametrize("left", [b"\0" * 4096, b"SQLite format 3\0" + b"x" * 4080])
def test_a_damaged_database_that_dvc_remembers_in_is_made_anew(tmp_path, monkeypatch, left):
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    neighbour = tmp_path / "site" / "repo" / "neighbour" / "cache.db"
    neighbour.parent.mkdir(parents=True)
    with closing(sqlite3.connect(neighbour)) as connection:
        connection.execute("CREATE TABLE kept (x)")
    here, _ = pushed(tmp_path, tmp_path / "remote")
    databases = [path for path in (tmp_path / "site").rglob("*.db") if path != neighbour]
    assert len(databases) > 2
    for database in databases:
        database.write_bytes(left)
    (here.root / "model" / "more").write_text("more weights")
    here.commit(["model"])
    for database in (tmp_path / "site").rglob("index/*/*.db"):
        database.write_bytes(left)
    here.push(str(tmp_path / "remote"))
    assert here.recorded() == {"model"}
    assert neighbour.exists()


def test_settings_of_others_stay_and_the_file_is_written_for_changes_alone(tmp_path):
    versions = Versions(tmp_path)
    config = tmp_path / ".dvc" / "config"
    versions.prepare(pipeline=PIPELINE, params="")
    with config.open("a") as file:
        file.write("['remote \"upcycle\"']\n    endpointurl = http://127.0.0.1:9\n")
    versions._use("s3://bucket/models")
    versions.prepare(pipeline=PIPELINE, params="")
    written = configparser.ConfigParser()
    written.read(config)
    assert dict(written["'remote \"upcycle\"'"]) == {
        "url": '"s3://bucket/models"',
        "endpointurl": "http://127.0.0.1:9",
    }
    assert written["cache"]["type"] == "hardlink, copy"
    assert not written["core"].getboolean("analytics")
    before = config.stat()
    versions._use("s3://bucket/models")
    assert config.stat().st_ino == before.st_ino


def test_settings_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("[core]\nremote = a\nremote = b\n")
    with pytest.raises(InputError, match=r"\.dvc/config'?: cannot be read"):
        Versions(tmp_path).prepare(pipeline=PIPELINE, params="")


@pytest.mark.parametrize("left", [b"[core]\nurl = \xff\n", b"\0\xff"])
def test_settings_that_are_no_text_are_named(tmp_path, left):
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_bytes(left)
    with pytest.raises(InputError, match=r"\.dvc/config'?: cannot be read"):
        Versions(tmp_path).prepare(pipeline=PIPELINE, params="")


def test_files_that_are_written_anew_may_hold_anything(tmp_path):
    for name in ("dvc.yaml", "params.yaml", ".dvcignore"):
        (tmp_path / name).write_bytes(b"\xff")
    Versions(tmp_path).prepare(pipeline=PIPELINE, params="")
    assert (tmp_path / "dvc.yaml").read_text() == PIPELINE


@pytest.mark.parametrize("left", [b"\xff\xfe", b"stages: [", b"- model\n", b"stages: 3\n", None])
def test_a_lock_that_cannot_be_read_is_named_before_anything_is_done(tmp_path, left):
    lock = tmp_path / "dvc.lock"
    lock.mkdir() if left is None else lock.write_bytes(left)
    with pytest.raises(InputError, match=r"dvc\.lock'?: cannot be read .*; delete it: the next"):
        Versions(tmp_path).prepare(pipeline=PIPELINE, params="")


def left_by(pid, path):
    """The record of a DVC that was killed while it wrote ``path``."""
    holder = {"pid": pid, "cmd": "dvc commit --force model"}
    return json.dumps({"write": {str(path): holder}, "read": {}})


@pytest.mark.parametrize("left", ["", "\0\0", "[]", '{"write": {"a": {}}}', left_by(1, "{model}")])
def test_a_record_of_writers_that_a_killed_dvc_left_stops_nobody(tmp_path, left):
    versions = Versions(tmp_path)
    versions.prepare(pipeline=PIPELINE, params="")
    (tmp_path / "model").mkdir()
    (tmp_path / ".dvc" / "tmp").mkdir()
    (tmp_path / ".dvc" / "tmp" / "rwlock").write_text(left.replace("{model}", f"{tmp_path}/model"))
    versions.prepare(pipeline=PIPELINE, params="")
    versions.commit(["model"])
    assert versions.recorded() == {"model"}


def test_a_dvc_that_is_at_work_keeps_its_record(tmp_path):
    record = tmp_path / ".dvc" / "tmp" / "rwlock"
    record.parent.mkdir(parents=True)
    command = [sys.executable, "-c", "print('up', flush=True); input()", "dvc"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as dvc:
        dvc.stdout.readline()
        record.write_text(left_by(dvc.pid, tmp_path / "model"))
        remove_left_lock(tmp_path)
        assert record.exists()
        dvc.communicate(b"\n")
    remove_left_lock(tmp_path)
    assert not record.exists()


PATIENCE = 6
"""How often DVC tries once more for the project's lock, if it is not told to wait."""
TELLS = """\
import sys, time
sleep = time.sleep
def told(seconds):
    if sys._getframe(1).f_globals["__name__"] == "dvc.lock":
        with open({path!r}, "a") as file:
            file.write(".")
        seconds = 0.01
    sleep(seconds)
time.sleep = told
"""
"""A DVC with this writes a point before each next try, and is soon there."""


def test_who_commits_waits_for_a_dvc_that_is_at_work_however_long_it_is(tmp_path, monkeypatch):
    tries, place = tmp_path / "tries", tmp_path / "place"
    place.mkdir()
    (place / "sitecustomize.py").write_text(TELLS.format(path=str(tries)))
    monkeypatch.setenv("PYTHONPATH", str(place))
    versions = Versions(tmp_path / "here")
    versions.prepare(pipeline=PIPELINE, params="")
    (versions.root / "model").mkdir()
    lock = versions.root / ".dvc" / "tmp" / "lock"
    lock.parent.mkdir()
    held = LockFile(str(lock))  # as another process: it is the open file's

    def ended() -> None:
        if tries.exists() and len(tries.read_text()) > PATIENCE:
            held.close()

    with heeding(ended):
        versions.commit(["model"])
    assert len(tries.read_text()) > PATIENCE
    assert versions.recorded() == {"model"}


@pytest.mark.faults
@pytest.mark.parametrize(("word", "damaged"), [("outs", "oups"), ("schema", "schemb")])
def test_a_lock_that_dvc_refuses_is_written_again_once_it_is_deleted(tmp_path, word, damaged):
    versions = Versions(tmp_path)
    versions.prepare(pipeline=PIPELINE, params="")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("weights")
    versions.commit({"model": "model"})
    before = versions.lock_text()
    (tmp_path / "dvc.lock").write_text(before.replace(word, damaged))
    with pytest.raises(InputError, match=r"dvc commit'.*dvc\.lock is damaged; delete it: the next"):
        versions.commit({"model": "model"})
    (tmp_path / "dvc.lock").unlink()
    assert versions.recorded() == set()
    versions.commit({"model": "model"})
    assert versions.lock_text() == before
    assert versions.recorded() == {"model"}


def test_a_place_that_dvc_cannot_be_told_is_named(tmp_path):
    with pytest.raises(InputError, match=r"versions\.remote"):
        Versions(tmp_path).push("""a "b" 'c'""")


def test_a_stage_that_had_another_name_is_brought_back_by_what_it_made(tmp_path):
    here, there = pushed(tmp_path, tmp_path / "remote")
    lock = here.lock_text().replace("  model:\n", "  of_before:\n", 1)
    assert "of_before" in lock
    there.pull(lock, str(tmp_path / "remote"), {"model": "model"})
    assert (there.root / "model").exists()
    assert "of_before" not in there.lock_text()


class Store(BaseHTTPRequestHandler):
    """A store over HTTP, as DVC uses it."""

    files: dict
    refuses = False

    def do_HEAD(self):
        self.answer(403 if self.refuses else 200 if self.path in self.files else 404)

    do_GET = do_HEAD

    def do_POST(self):
        chunks = iter(lambda: self.rfile.read(int(self.rfile.readline(), 16) + 2)[:-2], b"")
        body = b"".join(chunks)
        self.answer(403 if self.refuses else 200)
        if not self.refuses:
            self.files[self.path] = body

    def answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def store():
    """Its class, its address, and how to start it."""
    handler = type("OwnStore", (Store,), {"files": {}})
    server = HTTPServer(("127.0.0.1", 0), handler, bind_and_activate=False)
    server.server_bind()  # a port that is ours, and where nobody answers yet
    thread = threading.Thread(target=server.serve_forever, daemon=True)

    def start(*_):
        if not thread.is_alive():
            server.server_activate()
            thread.start()

    yield handler, f"http://127.0.0.1:{server.server_port}/store", start
    if thread.is_alive():
        server.shutdown()
    server.server_close()


@pytest.fixture
def tries(monkeypatch):
    """What DVC was asked."""
    asked = []

    def run(root, *arguments, original=module.run_dvc):
        asked.append(arguments[0])
        return original(root, *arguments)

    monkeypatch.setattr(module, "run_dvc", run)
    return asked


@pytest.mark.faults
def test_a_store_that_does_not_answer_is_asked_again(tmp_path, store, tries, monkeypatch, caplog):
    handler, url, start = store
    monkeypatch.setattr(module, "pause", start)
    versions = pushed(tmp_path, tmp_path / "remote")[0]
    tries.clear()
    versions.push(url)
    assert tries == ["push", "push"]
    assert b"weights" in handler.files.values()
    assert "dvc push again in 5 s, for it failed: " in caplog.text


def test_who_waits_for_a_store_gives_up_when_the_flow_s_time_is_over(
    tmp_path, store, tries, monkeypatch, caplog
):
    _, url, _ = store
    versions = pushed(tmp_path, tmp_path / "remote")[0]
    tries.clear()
    monkeypatch.setattr(module, "WAITS", (600.0,))

    def late():
        if "push again in" in caplog.text:
            raise InputError(Fault("limit", "1", "is over"))

    with heeding(late), pytest.raises(InputError, match="limit"):
        versions.push(url)
    assert tries == ["push"]


def test_a_store_that_refuses_is_asked_once(tmp_path, store, tries):
    handler, url, start = store
    handler.refuses = True
    start()
    versions = pushed(tmp_path, tmp_path / "remote")[0]
    tries.clear()
    with pytest.raises(InputError, match=r"dvc push.*failed"):
        versions.push(url)
    assert tries == ["push"]


CHAIN = """
stages:
  text:
    foreach: [a, b]
    do: {cmd: 'true', outs: ["text/${item}"]}
  model: {cmd: 'true', deps: [text/a, text/b], outs: [model]}
  report: {cmd: 'true', deps: [model], outs: [report]}
"""


def chain(root):
    versions = Versions(root)
    versions.prepare(pipeline=CHAIN, params="")
    for name in ("text/a", "text/b", "model"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text(name)
    return versions


def test_the_lock_is_dvc_s_own_and_written_once(tmp_path):
    names = ["text@a", "text@b", "model"]
    together, apart = (chain(tmp_path / side) for side in ("together", "apart"))
    said = module.run_dvc(together.root, "commit", "--force", *names)
    command = [sys.executable, "-m", "dvc", "commit", "--force", *names]
    plain = subprocess.run(command, cwd=apart.root, check=True, capture_output=True, text=True)
    assert together.lock_text() == apart.lock_text() != ""
    written = [(done.stdout + done.stderr).count("Updating lock file") for done in (said, plain)]
    assert written == [1, 3]


def test_what_went_well_before_a_stage_that_did_not_is_recorded(tmp_path):
    versions = chain(tmp_path)
    with pytest.raises(InputError, match=r"dvc commit.*report.*does not exist"):
        versions.commit(["text@a", "model", "report"])
    assert versions.recorded() == {"text@a", "model"}


def test_a_lock_is_written_beside_and_put_in_its_place(tmp_path):
    """DVC writes over it: a kill meanwhile would leave a beginning that is YAML too."""
    versions = chain(tmp_path)
    versions.commit(["text@a", "text@b"])
    lock = tmp_path / "dvc.lock"
    before = lock.stat().st_ino
    with lock.open() as reader:  # as a flow that reads meanwhile
        versions.commit(["model"])
        assert "model" not in reader.read()
    assert lock.stat().st_ino != before
    whole = lock.read_text()

    def killed(data, file):
        file.write("schema: '2.0'\n")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dump_whole(lock, {}, killed)
    assert lock.read_text() == whole
    assert not list(tmp_path.glob("*.partial"))


def test_a_text_of_a_project_is_read_once_however_often_it_is_changed():
    read: list[str] = []

    def parse(text, path, typ="safe"):
        read.append(text)
        return _yaml.parse_yaml(text, path, typ=typ)

    once = ReadOnce(parse)
    once("a: [1]", "dvc.yaml")["a"].append(2)
    assert once("a: [1]", "params.yaml") == {"a": [1]}
    assert once("a: [3]", "dvc.yaml") == {"a": [3]}
    assert read == ["a: [1]", "a: [3]"]
    kept = once("a: 1  # why\n", "dvc.yaml", typ="rt")
    assert "# why" in _yaml.dumps_yaml(kept)


VALUES = [1e-5, 3e-4, 0.1, 1e16, -0.0, 1.0, float("inf"), 10**20, "12e34", "0123", "1_000", "1.0"]
VALUES += [None, True, "yes", "~", "", "a: b", "two\nlines", "é", "x " * 100, "2020-01-01", [], {}]


def test_a_lock_that_was_read_once_is_written_as_dvc_writes_it():
    text = _yaml.dumps_yaml({"schema": "2.0", "stages": {"a": {"params": dict(enumerate(VALUES))}}})
    theirs = _yaml.parse_yaml_for_update(text, "dvc.lock")
    ours = ReadOnce(_yaml.parse_yaml)(text, "dvc.lock", typ="rt")
    for lock in (theirs, ours):
        lock["stages"]["b"] = {"params": dict(enumerate(VALUES)), "outs": [{"md5": "1e5"}]}
    assert _yaml.dumps_yaml(ours) == _yaml.dumps_yaml(theirs)


def test_a_stage_that_a_cut_lock_has_no_outputs_of_is_recorded_again(tmp_path):
    versions = chain(tmp_path)
    versions.commit(["text@a", "text@b", "model"])
    whole = versions.lock_text()
    for cut in ("  model:\n    cmd: 'true'\n", "    outs:\n    - path: model\n"):
        start = whole.index(cut, whole.index("  model:\n")) + len(cut)
        (tmp_path / "dvc.lock").write_text(whole[:start])
        assert versions.recorded() == {"text@a", "text@b"}, cut
    versions.commit(["model"])
    assert versions.lock_text() == whole


def test_every_scheme_of_dvc_has_its_package():
    theirs = {scheme: known["class"].partition(".")[0] for scheme, known in SCHEMES.items()}
    places = {"local", "memory", "dvc", "git"}  # none of them is a remote by its scheme
    assert {s: package for s, package in theirs.items() if s not in places} == PACKAGES
    assert {*PACKAGES, NAMED, ""} == set(REMOTE_SCHEMAS)


@pytest.mark.parametrize("scheme", sorted(PACKAGES))
def test_a_remote_whose_package_is_missing_is_said_before_work(scheme, tmp_path):
    remote, package = f"{scheme}://user:secret@place/folder", PACKAGES[scheme]
    found = [str(fault) for fault in remote_faults("versions.remote", remote, tmp_path)]
    if importlib.util.find_spec(package) is not None:
        assert found == []
        return
    install = f".venv/bin/pip install -c constraints.txt {package.replace('_', '-')}"
    shown = f"'{scheme}://user:***@place/folder'"
    lacks = f"DVC lacks its package for {scheme}://: {install}"
    assert found == [f"versions.remote = {shown}: {lacks}"]


@pytest.mark.parametrize("remote", ["ftp://host/a", "file:///data/remote"])
def test_a_scheme_that_dvc_does_not_know_is_refused_before_work(remote, tmp_path):
    [fault] = remote_faults("versions.remote", remote, tmp_path)
    assert "no scheme that DVC knows; use one of azure, gdrive, gs," in fault.remedy
    assert "or give a directory without one" in fault.remedy


def test_a_remote_in_the_place_of_a_file_is_refused_before_work(tmp_path):
    file = tmp_path / "notes.txt"
    file.touch()
    for remote, shown, what in (
        (str(file), file, "is a file"),
        ("notes.txt", file, "is a file"),  # seen from the home
        ("notes.txt/remote", file / "remote", f"lies below {file}, which is a file"),
    ):
        found = [str(fault) for fault in remote_faults("versions.remote", remote, tmp_path)]
        assert found == [f"versions.remote = '{shown}': {what}; name a directory"]
    (tmp_path / "there").mkdir()
    for remote in ("there", "not/yet", str(tmp_path / "there")):
        assert not [*remote_faults("versions.remote", remote, tmp_path)]
