"""docs/adding-a-method.md, done as it is written: the new method lives after the files it names."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient
from prefect_server import prefect_server
from texts import pico_recipe, write_texts

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-a-method.md").read_text()
FILE = re.compile(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", re.M | re.S)
CHANGED = ("tasks/methods.py", re.search(r"```diff\n(.*?)^```$", PAGE, re.M | re.S)[1])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the code, with the page's files and its change."""
    folder = tmp_path_factory.mktemp("soup") / "checkout"
    for package in ("flows", "infra", "tasks", "upcycle_core", "recipes"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("*.pyc"))
    for name, text in FILE.findall(PAGE):
        assert not (folder / name).exists()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    name, lines = CHANGED
    text = (folder / name).read_text()
    (imported,), (before,), (after,) = (
        [line[1:] for line in lines.splitlines() if line.startswith(mark)]
        for mark in ("+from", "-", "+ ")
    )
    assert text.count(before) == 1
    (folder / name).write_text(f"{imported}\n{text}".replace(before, after))
    return folder


@pytest.fixture(scope="module")
def life(checkout):
    """What the page's command leaves, of its recipe with pico trainings."""
    home = checkout.parent / "home"
    texts = write_texts(checkout.parent / "texts", domains=("letters", "numbers"))
    recipe = checkout / "recipes" / "soup.yaml"
    small = pico_recipe(texts, domains=("letters", "numbers"))
    taken = ("tokenizer", "seed_model", "experts", "statistics", "compute")
    values = yaml.safe_load(recipe.read_text()) | {key: small[key] for key in taken if key in small}
    values |= {"folder": str(texts), "evaluation": {"sequence_length": 32, "batch_size": 4}}
    recipe.write_text(yaml.safe_dump(values))
    run(checkout, home, "-m", "flows.make", str(recipe))
    return checkout, home, recipe


def run(checkout, home, *arguments, cwd=None):
    environment = {
        **os.environ,
        "UPCYCLE_HOME": str(home),
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_API_URL": prefect_server(),
        "MLFLOW_TRACKING_URI": f"sqlite:///{home / 'mlflow' / 'mlflow.db'}",
        "PYTHONPATH": str(checkout),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=cwd or checkout, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def test_the_page_names_the_files_that_a_method_touches():
    assert [name for name, _ in FILE.findall(PAGE)] == [
        "upcycle_core/soup.py",
        "tasks/soup/__init__.py",
        "tasks/soup/stages.py",
        "tasks/soup/method.py",
        "recipes/soup.yaml",
    ]


@pytest.mark.faults
def test_the_report_holds_its_row_and_the_registry_its_champion(life):
    _, home, _ = life
    metrics = json.loads((home / "soup" / "report" / "metrics.json").read_text())
    assert {"soup", "expert_letters", "expert_numbers"} == set(metrics["normalised_average"])
    assert "soup" in (home / "soup" / "report" / "table.txt").read_text().lower()
    client = MlflowClient(f"sqlite:///{home / 'mlflow' / 'mlflow.db'}")
    champion = client.get_model_version_by_alias("upcycle-soup", "champion")
    assert int(champion.version) == 1
    assert "no champion" in champion.tags["upcycle.decision"]


@pytest.mark.faults
def test_dvc_and_the_fingerprints_agree_on_it(life):
    checkout, home, _ = life
    said = run(checkout, home, "-m", "dvc", "repro", cwd=home / "soup")
    assert "model: up to date" in said or "Stage 'model' didn't change" in said
    assert "runs:" not in said.replace("sources runs:", "")


@pytest.mark.faults
def test_a_change_of_its_library_makes_its_model_anew_and_no_expert(life):
    checkout, home, _ = life
    module = checkout / "upcycle_core" / "soup.py"
    module.write_text(module.read_text() + "\n# changed\n")
    said = run(checkout, home, "-m", "tasks", "why", "report", cwd=home / "soup")
    assert "model runs: its code changed: upcycle_core/soup.py" in said
    assert "experts" not in said


@pytest.mark.faults
def test_the_gate_judges_the_next_one(life):
    checkout, home, recipe = life
    run(
        checkout,
        home,
        "-m",
        "flows.make",
        str(recipe),
        "--set",
        "registry.gate.margin=5",
        "--set",
        "settings.members=[letters]",
    )
    client = MlflowClient(f"sqlite:///{home / 'mlflow' / 'mlflow.db'}")
    versions = {
        alias: int(client.get_model_version_by_alias("upcycle-soup", alias).version)
        for alias in ("challenger", "champion")
    }
    assert versions == {"challenger": 2, "champion": 1}


@pytest.mark.faults
def test_a_wrong_setting_is_named(life):
    checkout, home, recipe = life
    with pytest.raises(AssertionError, match=r"settings.members = 'law': not a domain"):
        run(checkout, home, "-m", "flows.make", str(recipe), "--set", "settings.members=[law]")
    with pytest.raises(AssertionError, match=r"settings.member: no such key|settings.member = "):
        run(checkout, home, "-m", "flows.make", str(recipe), "--set", "settings={member: 1}")
