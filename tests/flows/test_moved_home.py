"""A home that is moved to another place, with all that was made in it: everything goes on there."""

import json
import sqlite3
import sys
from pathlib import Path

import pytest
from prefect_server import with_tables
from project import Project
from texts import pico_recipe, save_recipe, write_texts

from infra.settings import read
from infra.tracking.registry import Registry

pytestmark = pytest.mark.faults
DOMAINS = ("letters", "numbers")
PRINTED = ("summary.txt",)
"""What the last run has printed, like a log."""


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """A home in which a model was made, at another place than it was then."""
    folder = tmp_path_factory.mktemp("moving")
    texts = write_texts(folder / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    values["versions"] = {"remote": "remote"}
    project = Project(folder, save_recipe(folder / "recipe.yaml", values), own_server=True)
    with_tables(project.home / "prefect")
    project.flow()
    project.calls()
    project.before, digests = project.home, project.digests()
    project.home = project.home.rename(folder / "another place")
    project.workspace = project.home / "pico"
    project.made = digests
    return project


def test_nothing_in_it_names_the_place_where_it_was(moved):
    before = str(moved.before)
    files = [file for file in moved.home.rglob("*") if file.is_file()]
    databases = [file for file in files if file.read_bytes().startswith(b"SQLite format 3")]
    assert {file.name for file in databases} >= {"mlflow.db", "prefect.db"}
    named = [f"{db.name}: {where}" for db in databases for where in named_in(db, before)]
    others = [file for file in files if file.name not in PRINTED and file not in databases]
    named += [str(file) for file in others if before.encode() in file.read_bytes()]
    assert named == []


def named_in(database: Path, text: str) -> list[str]:
    """TABLE.COLUMN = value of a SQLite database that hold ``text``."""
    with sqlite3.connect(database) as connection:
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        columns = [
            (table, row[1])
            for table in tables
            for row in connection.execute(f'PRAGMA table_info("{table}")')
        ]
        return [
            f"{table}.{column} = {value}"
            for table, column in columns
            for (value,) in connection.execute(f'SELECT CAST("{column}" AS TEXT) FROM "{table}"')
            if text in str(value)
        ]


def test_dvc_finds_everything_before_a_flow_has_run_there(moved):
    for command in (["status"], ["status", "--cloud"], ["pull", "--force"]):
        done = moved.run(sys.executable, "-m", "dvc", *command, cwd=moved.workspace)
        assert "model" not in done.stdout, (command, done.stdout)
    assert moved.digests() == moved.made


def test_the_same_command_repeats_nothing(moved):
    done = moved.flow()
    assert not moved.calls()
    assert "as it was registered: version 1 is this very model" in done.stdout
    assert moved.digests() == moved.made
    assert not moved.before.exists()


def test_a_retraining_has_nothing_to_do(moved):
    retrained = moved.run(sys.executable, "-m", "flows.retrain", str(moved.recipe))
    assert "pico: nothing to do" in retrained.stdout
    assert not moved.calls()


def test_its_registered_model_generates(moved):
    options = ("--temperature", "0", "--tokens", "3")
    command = ("-m", "flows.generate", "upcycle-pico@champion", "one two")
    done = moved.run(sys.executable, *command, *options)
    assert done.stdout.startswith("one two")
    assert not [*(moved.home / "models").rglob("*.safetensors")]  # read where it lies


def test_its_version_is_restored(moved):
    into = moved.home.parent / "restored"
    command = ("-m", "flows.restore", "upcycle-pico", "champion", "--into", str(into))
    moved.run(sys.executable, *command)
    found = {
        name: json.loads((into / "pico" / name / "provenance.json").read_text())
        for name in ("model", "seed")
    }
    assert found == {
        name: json.loads((moved.workspace / name / "provenance.json").read_text()) for name in found
    }
    version = Registry(read(moved.environment())).find("upcycle-pico", "champion")
    assert version is not None
    assert version.number == 1
