"""DVC's cache links to what is published: once on the disk, and damage in place heals."""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infra.recipe.schema import Lineage
from infra.versioning.known import Recorded
from infra.versioning.versions import Versions
from tasks.engine.sources import CODE
from tasks.engine.stage import Session, Stage
from tasks.engine.workspace import Workspace, take
from tasks.recipes import load_recipe
from upcycle_core.errors import InputError

LABEL = "model"
PIPELINE = f"stages:\n  {LABEL}: {{cmd: 'true', outs: [model]}}\n"
TEXT = "weights " * 1000


def make(run):
    (run.out / "weights").write_text(TEXT)
    (run.out / "config").write_text("whole")


def make_of_a_piece(run):
    piece = run.pieces_directory / "whole"
    piece.mkdir(parents=True)
    (piece / "weights").write_text(TEXT)
    (run.out / "config").write_text("whole")
    take(piece, run.out)


STAGE = Stage(
    make,
    "model",
    inputs=lambda recipe, item: (),
    params=(),
)
TAKING = replace(STAGE, function=make_of_a_piece)
READER = replace(STAGE, function=make, out="report", inputs=lambda recipe, item: ["model/weights"])


class Life:
    """A workspace with one stage, and what a flow does about it."""

    def __init__(self, folder, stage=STAGE):
        self.stage = stage
        self.workspace = Workspace(folder / "demo")
        self.versions = Versions(self.workspace.root)
        self.versions.prepare(pipeline=PIPELINE, params="")
        recipe = load_recipe(CODE / "recipes" / "demo.yaml")
        self.session = Session(recipe, self.workspace, log=lambda text: None)
        self.record = Recorded(self.workspace.root)
        self.weights = self.workspace.path("model") / "weights"

    def run(self):
        with self.workspace.lock("test"):
            ran = self.stage.ensure(self.session)
            if LABEL not in self.record.known():
                with self.workspace.linking(["model"]):
                    self.versions.commit([LABEL])
                self.record.add({LABEL: self.workspace.digest("model")})
        return ran

    def kept(self):
        """{content: inode} of what the cache holds."""
        files = (self.workspace.root / ".dvc" / "cache").rglob("*")
        return {file.read_text(): file.stat().st_ino for file in files if file.is_file()}


@pytest.fixture
def life(tmp_path, request):
    made = Life(tmp_path, getattr(request, "param", STAGE))
    assert made.run()
    return made


def test_a_published_file_is_on_the_disk_once(life):
    assert life.kept()[TEXT] == life.weights.stat().st_ino
    assert not life.run()


@pytest.mark.parametrize("life", [STAGE, TAKING], indirect=True, ids=["made", "taken"])
def test_what_is_up_to_date_is_not_read(life, monkeypatch):
    """Not in a later process either, though DVC has linked to it, and a piece that is gone had; but
    where all is verified."""
    read = []

    def sha256(opened):
        read.append(opened.name)
        return hashlib.sha256(opened.read()).hexdigest()

    monkeypatch.setattr("upcycle_core.checkpoints.known._sha256", sha256)
    recipe, quiet = life.session.recipe, {"log": lambda text: None}
    later = Session(recipe, Workspace(life.workspace.root), **quiet)
    assert not life.stage.ensure(later)
    assert life.weights not in map(Path, read)
    later = Session(replace(recipe, verify="always"), Workspace(life.workspace.root), **quiet)
    assert not life.stage.ensure(later)
    assert life.weights in map(Path, read)


def test_a_flip_in_place_with_its_time_put_back_is_made_good(life):
    before = life.weights.stat()
    life.weights.chmod(0o644)
    with life.weights.open("r+b") as opened:
        opened.write(b"W")
    os.utime(life.weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    life.weights.chmod(0o444)
    assert life.run()
    assert life.weights.read_text() == TEXT
    assert not life.run()


def test_damage_in_place_is_made_good_in_the_cache_too(life):
    life.weights.chmod(0o644)
    life.weights.write_text("damaged")
    life.weights.chmod(0o444)  # as DVC leaves it, and trusts it
    assert "damaged" in life.kept()
    assert life.run()
    assert life.weights.read_text() == TEXT
    assert TEXT in life.kept()
    assert "damaged" not in life.kept()
    assert "whole" in life.kept()
    assert not life.run()


def test_a_damaged_provenance_is_made_good_in_the_cache_too(life):
    record = life.workspace.path("model") / "provenance.json"
    before = record.read_text()
    record.chmod(0o644)
    record.write_bytes(b"\xff" + record.read_bytes()[1:])
    record.chmod(0o444)
    assert life.run()
    assert record.read_text() == before
    assert before in life.kept()  # which reads every object as text
    assert not life.run()


def test_what_is_built_upon_is_not_brought_back_damaged(life, tmp_path):
    life.versions.push(str(tmp_path / "remote"))
    pinned = {"model": life.workspace.digest("model")}
    domains = tuple(life.session.recipe.domains)
    lineage = Lineage(pinned=pinned, backbone=domains, parents={})
    life.session.recipe = replace(life.session.recipe, lineage=lineage)
    life.weights.chmod(0o644)
    life.weights.write_text("damaged")
    life.weights.chmod(0o444)
    with pytest.raises(InputError, match="dvc pull --force"):
        life.run()
    command = [sys.executable, "-m", "dvc", "pull", "--force"]
    subprocess.run(command, cwd=life.workspace.root, check=True, capture_output=True)
    assert life.weights.read_text() == TEXT
    assert not life.run()


def test_nothing_is_made_from_what_is_damaged(life):
    """Also where a flow does not look at the stage that made it."""
    life.run()
    assert READER.ensure(life.session)
    shutil.rmtree(life.workspace.path("report"))
    life.weights.write_text("damaged")
    with pytest.raises(InputError, match=r"report needs = 'model': is not as it was published"):
        READER.ensure(Session(life.session.recipe, life.workspace, log=lambda text: None))
    assert not life.workspace.path("report").exists()
