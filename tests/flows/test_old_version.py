"""What an earlier commit registered and built is restored, loaded and gone on with.

``tests/old_version`` holds the home that its flows left; ``README.md`` there says how it was made.
"""

import contextlib
import hashlib
import json
import shutil
import sqlite3
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from project import ROOT, Project

from flows.generate import main as generate
from flows.retrain import look
from infra.durable import sealed
from tasks.engine.sources import package_versions
from tasks.engine.stage import Stage
from tasks.engine.stage_run import Session
from tasks.engine.workspace import Workspace
from tasks.living.lineage import with_lineage
from tasks.methods import stages_of
from tasks.recipes import load_recipe
from tasks.scoring.architectures import register_architectures
from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError

OLD = ROOT / "tests" / "old_version"
GOLDEN = json.loads((OLD / "golden.json").read_text())
VERSIONS = GOLDEN["versions"]
RECIPES = sorted({golden["recipe"] for golden in VERSIONS.values()})
# Sums of fp32 in another order: they differ from fp64's by 5e-6; two versions differ by 0.4.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
CHANGED = {"statistics.folds 4 -> 1", "statistics.folds 4 -> None"}
"""What has another default since, on purpose."""
NEWER = "corpus.bos decides as well now"
RESTORE = """
import json, sys
from flows.restore import main

print(json.dumps([main(arguments) for arguments in json.loads(sys.argv[1])]))
"""


class OldHome(Project):
    """The home of an earlier commit, where it never was."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "home" / "old.yaml", name="old")
        with tarfile.open(OLD / "home.tar.xz") as archive:
            archive.extractall(self.home, filter="data")
        sql = self.home / "mlflow" / "mlflow.sql"
        for file in (sql, *self.home.glob("*.yaml")):
            file.write_text(file.read_text().replace(GOLDEN["home"], str(self.home)))
        with contextlib.closing(sqlite3.connect(sql.with_suffix(".db"))) as database:
            database.executescript(sql.read_text())

    def restore(self, *requests: list[str]) -> tuple[list[int], str]:
        """Exit codes of ``python -m flows.restore`` with each request, and what they said."""
        done = self.run(sys.executable, "-c", RESTORE, json.dumps(requests))
        *_, codes = done.stdout.splitlines()
        return json.loads(codes), done.stdout + done.stderr

    def damaged_remote(self, folder: Path) -> Path:
        """A copy of the remote with one bit of one expert's weights flipped."""
        shutil.copytree(self.home / "remote", folder)
        weights = self.home / "old" / "experts" / "numbers" / "model.safetensors"
        digest = hashlib.md5(weights.read_bytes()).hexdigest()
        [stored] = folder.rglob(f"{digest[:2]}/{digest[2:]}")
        content = bytearray(stored.read_bytes())
        content[-1] ^= 1
        stored.chmod(0o644)
        stored.write_bytes(content)
        return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return OldHome(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def restored(home, tmp_path_factory):
    """{version: where it was restored}, ``damaged`` from a damaged remote; and what was said."""
    folder = tmp_path_factory.mktemp("restored")
    requests, places = [], {}
    for version, golden in VERSIONS.items():
        name, number = version.split("/")
        alias = "champion" if "champion" in golden["aliases"] else number
        into = folder / name / number
        requests.append([name, alias, "--into", str(into)])
        places[version] = into / golden["recipe"]
    remote = str(home.damaged_remote(folder / "remote"))
    requests.append(["upcycle-old", "1", "--into", str(folder / "damaged"), "--remote", remote])
    places["damaged"] = folder / "damaged" / "old"
    codes, said = home.restore(*requests)
    assert codes == [0] * len(VERSIONS) + [2], said
    return places, said


@pytest.fixture
def at_home(home, monkeypatch):
    """This process is at work in the home."""
    for name, value in home.environment().items():
        monkeypatch.setenv(name, value)
    return home


def reasons(home: OldHome, name: str, folder: Path) -> dict[str, list[str]]:
    """Why today's code would run stages of a recipe in a workspace of before; none for the rest.

    Texts are where they were: ``instructions`` names their folder.
    """
    workspace = Workspace(folder)
    recipe = load_recipe(home.home / f"{name}.yaml", [f"folder={GOLDEN['home']}/texts"])
    session = Session(with_lineage(recipe, workspace), workspace, log=lambda line: None)
    return {
        stage.label(item): why(stage, session, item)
        for stage in stages_of(session.recipe)
        for item in stage.items(session.recipe)
        if not stage.always
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_restored_as_it_was_published(restored, version):
    """Every artifact of it is there, of whatever stages today's code knows."""
    places, said = restored
    found = {
        str(record.parent.relative_to(places[version])): sha256_file(record)
        for record in places[version].rglob("provenance.json")
    }
    assert found == VERSIONS[version]["artifacts"]
    assert f"\n{places[version]}\n" in f"\n{said}"


def test_a_lineage_is_restored_with_the_version_that_has_one(home, restored):
    places, _ = restored
    lineage = json.loads((places["upcycle-old/2"] / "lineage.json").read_text())
    before = json.loads((home.workspace / "lineage.json").read_text())
    assert lineage == sealed({**before, "anchor": None})
    assert set(lineage["parents"]) == {"letters"}
    assert not (places["upcycle-old/1"] / "lineage.json").exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_restored_model_computes_what_it_did(restored, version):
    places, _ = restored
    register_architectures()
    with torch.no_grad():
        model = load_causal_lm(places[version] / VERSIONS[version]["model"])
        logits = model(torch.tensor([GOLDEN["tokens"]])).logits[0]
    expected = torch.tensor(VERSIONS[version]["logits"])
    torch.testing.assert_close(logits[:, : expected.shape[1]], expected, **TOLERANCE)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_registered_model_generates_what_it_did(at_home, capsys, version):
    name, _ = version.split("/")
    aliases = VERSIONS[version]["aliases"]
    for reference in (version, *(f"{name}@{alias}" for alias in aliases)):
        code = generate([reference, GOLDEN["prompt"], "--tokens", "12", "--temperature", "0"])
        assert (code, capsys.readouterr().out) == (0, VERSIONS[version]["text"] + "\n")


def test_a_version_is_not_restored_from_a_damaged_remote(restored):
    places, said = restored
    assert "dvc pull" in said
    assert not places["damaged"].exists()


def why(stage: Stage, session: Session, item: str) -> list[str]:
    """Its reasons; of a stage that reads what the code of before did not make, that."""
    try:
        return stage.reasons(session, item)
    except InputError as error:
        missing = [fault.value for fault in error.faults]
        assert not any((session.workspace.root / name).exists() for name in missing)
        return [f"{name} has not been made" for name in missing]


def check_reasons(found: dict[str, list[str]]) -> None:
    """Code has other names and other lines, and reads settings that there were not; inputs and
    settings, as far as they count, are what they were."""
    assert found
    for label, why in found.items():
        own = {reason for reason in why if not reason.startswith("its code changed")} - CHANGED
        assert not [reason for reason in own if reason.endswith(("changed", "published"))], label
        assert not [reason for reason in own if has_other_value(reason)], label


def has_other_value(reason: str) -> bool:
    """Whether it says of a setting that it was another; a package may be newer."""
    name, _, change = reason.partition(" ")
    known = not change.startswith("None -> ") and name not in package_versions()
    return " -> " in change and known


@pytest.mark.parametrize("name", RECIPES)
def test_a_workspace_of_before_says_what_is_made_again_and_why(home, name):
    found = reasons(home, name, home.home / name)
    check_reasons(found)
    assert NEWER in found["corpora@letters"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_restored_workspace_of_before_does_so_too(home, restored, version):
    """That of the first version pins nothing: each of its stages is looked at."""
    places, _ = restored
    check_reasons(reasons(home, VERSIONS[version]["recipe"], places[version]))


def test_what_a_lineage_of_before_pins_is_built_upon_as_it_is(home):
    found = reasons(home, "old", home.workspace)
    for label in ("tokenizer", "seed", "backbone", "parents-letters"):
        assert found[label] == [], label


def test_a_model_of_before_is_gone_on_with(at_home):
    recipe = load_recipe(at_home.recipe)
    assert look(recipe, Workspace(at_home.workspace)) is None
