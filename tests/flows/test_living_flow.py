"""One life of a model: built, grown, taught, judged, taken back, shrunk, restored."""

import hashlib
import json
import re
import shutil
import sys

import pytest
from mlflow import MlflowClient
from project import Project
from texts import pico_recipe, save_recipe, write_texts

from flows.grow import far_off
from infra.settings import read
from infra.tracking.registry import Registry
from tasks.engine.workspace import Workspace
from tasks.living.lineage import FILE, with_lineage
from tasks.recipes import load_recipe
from tasks.release.history import FORMER_TAG, PENDING_TAG
from upcycle_core.checkpoints.hashing import tree_digest

OLD, NEW = ("letters", "numbers"), "colours"
NAME = "upcycle-pico"
STATE = """
import sys
from pathlib import Path
from flows.retrain import retrain
from tasks.recipes import load_recipe

state = retrain(load_recipe(Path(sys.argv[1])), return_state=True)
print("STATE", state.type.value, state.name)
"""
SEPARATOR = "\n<|doc|>\n"


class Life(Project):
    """A project whose flows are many."""

    def call(self, module, *arguments, check=True):
        """``python -m MODULE ARGUMENTS``, and the core functions that it called."""
        self.calls()
        done = self.run(sys.executable, "-m", module, *map(str, arguments), check=check)
        done.calls = self.calls()
        return done

    def registry(self):
        return Registry(read(self.environment()))

    def lineage(self):
        return json.loads((self.workspace / FILE).read_text())


def recipe_of(folder, texts, domains):
    values = pico_recipe(texts, domains=domains)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    values["versions"] = {"remote": "remote"}
    return save_recipe(folder / f"{len(domains)}.yaml", values)


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    folder = tmp_path_factory.mktemp("life")
    texts = write_texts(folder / "texts", domains=(*OLD, NEW))
    life = Life(folder, recipe_of(folder, texts, OLD))
    life.folder, life.texts = folder, texts
    life.grown_recipe = recipe_of(folder, texts, (*OLD, NEW))
    life.call("flows.dume", life.recipe)
    return life


@pytest.fixture(scope="module")
def idle(life):
    before = tree_digest(life.workspace / "model")
    client = MlflowClient(read(life.environment()).mlflow_tracking_uri)
    client.delete_registered_model_tag(NAME, FORMER_TAG)  # as an earlier release left it
    done = life.call("flows.retrain", life.recipe)
    return done, before


@pytest.fixture(scope="module")
def grown(life, idle):
    before = life.digests()
    done = life.call("flows.grow", life.grown_recipe, NEW)
    return done, before, life.digests()


@pytest.fixture(scope="module")
def taught(life, grown):
    """New text in one domain, spoiled: letters without any order."""
    parent = tree_digest(life.workspace / "experts" / "letters", exclude=("provenance.json",))
    file = life.texts / "letters" / "train.txt"
    life.good_text = file.read_text()
    file.write_text(SEPARATOR.join(f"{i} {i * i} {i * 7}" * 9 for i in range(100, 200)))
    done = life.call("flows.retrain", life.grown_recipe)
    return done, parent


def test_nothing_new_is_nothing_to_do(life, idle):
    done, before = idle
    assert "nothing to do" in done.stdout
    assert not done.calls
    assert len(life.registry().versions(NAME)) == 1
    assert life.registry().model_tags(NAME)[FORMER_TAG] == "1"
    assert tree_digest(life.workspace / "model") == before


def test_growing_computes_the_new_domain_alone(grown):
    done, before, after = grown
    assert done.calls["train"] == 1
    assert done.calls["domain_statistics"] == 2  # its two shards
    assert done.calls["write_documents"] == done.calls["write_corpus"] == 1
    assert not done.calls["write_backbone"]
    kept = ("tokenizer/", "seed/", "backbone/", "experts/", "statistics/", "corpora/")
    frozen = {name for name in before if name.startswith(kept)}
    assert frozen
    assert {name: before[name] for name in frozen} == {name: after[name] for name in frozen}


def test_growing_scores_what_is_new_alone(life, grown):
    """Each expert, and the seed, on the new text; the new expert and what is merged on all."""
    done, _, _ = grown
    # Three rows of what was there, one of the oracle's three domains; the average is new.
    known = 3 * len(OLD) + len(OLD)
    every = (len(OLD) + 1 + 1 + 1) * (len(OLD) + 1) + (len(OLD) + 1)
    every += 3  # the MoE, which is another: its routers, and two draws
    assert f"report: {known} of {every} scores are known" in done.stdout + done.stderr


def test_a_domain_far_from_the_backbone_is_said_with_the_price(life, grown, monkeypatch):
    workspace = Workspace(life.workspace)
    recipe = with_lineage(load_recipe(life.grown_recipe), workspace)
    kept = json.loads((life.workspace / "report" / "metrics.json").read_text())["normalised"]
    kept = kept["oracle"][NEW]
    monkeypatch.setattr("flows.grow.FAR", kept)
    assert [*far_off(recipe, workspace, NEW)] == []
    monkeypatch.setattr("flows.grow.FAR", kept + 0.1)
    (said,) = far_off(recipe, workspace, NEW)
    assert f"{NEW} is far from this backbone: on it, its expert keeps {kept:.1f} of 100" in said
    assert f"python -m flows.grow RECIPE {NEW} --rebuild" in said
    assert int(re.search(r"(\d+) core seconds", said)[1]) > 0
    assert [*far_off(recipe, workspace, OLD[0])] == []  # it is in the average


def test_growing_says_scores_before_and_after(life, grown):
    done, _, _ = grown
    assert re.search(r"^colours +– +[\d.]+ +–$", done.stdout, re.MULTILINE)
    assert "held-out text of" not in done.stdout  # what was there is measured on what it was
    assert "The backbone averages letters, numbers." in done.stdout
    assert life.lineage()["backbone"] == list(OLD)


def test_a_domain_that_is_there_is_not_added_again(life, grown):
    said = life.refused(NEW, recipe=life.grown_recipe, module="flows.grow")
    assert "flows.retrain" in said


def test_new_text_continues_one_expert_from_its_parent(life, taught):
    done, parent = taught
    assert done.calls["train"] == 1
    assert not done.calls["train_tokenizer"] + done.calls["write_backbone"]
    assert (
        tree_digest(life.workspace / "parents" / "letters", exclude=("provenance.json",)) == parent
    )
    made_from = json.loads((life.workspace / "experts/letters/provenance.json").read_text())
    assert "parents/letters" in made_from["inputs"]
    assert "seed" not in made_from["inputs"]


def test_a_worse_model_is_refused_with_its_reason(life, taught):
    done, _ = taught
    versions = life.registry().versions(NAME)
    assert [("champion" in v.aliases, "challenger" in v.aliases) for v in versions[-2:]] == [
        (True, False),
        (False, True),
    ]
    assert "does not beat" in versions[-1].tags["upcycle.decision"]
    assert done.returncode == 0


@pytest.fixture(scope="module")
def healed(life, taught):
    """The spoiled text is mended, with more of it: what was refused is no parent."""
    named = life.lineage()["parents"]["letters"]
    (life.texts / "letters" / "train.txt").write_text(
        life.good_text + f"{SEPARATOR}alpha beta gamma" * 9
    )
    heldout = life.texts / "letters" / "heldout.txt"
    heldout.write_text(SEPARATOR.join(reversed(heldout.read_text().split(SEPARATOR))) + " beta")
    return life.call("flows.retrain", life.grown_recipe), named


@pytest.mark.faults
def test_what_was_refused_is_no_parent(life, healed):
    done, named = healed
    assert life.lineage()["parents"]["letters"] == named
    assert done.calls["train"] == 1
    assert "The held-out text of letters has changed" in done.stdout


@pytest.fixture(scope="module")
def shrunk(life, taught):
    return life.call("flows.shrink", life.grown_recipe, NEW)


def test_shrinking_computes_the_router_alone_and_takes_the_files(life, shrunk):
    done = shrunk
    assert not done.calls["train"] + done.calls["domain_statistics"] + done.calls["write_backbone"]
    assert done.calls["solve_routers"] == 1
    for part in ("experts", "statistics", "corpora", "documents"):
        assert not (life.workspace / part / NEW).exists()
        assert (life.workspace / part / "letters").exists()
    assert re.search(r"^colours +[\d.]+ +– +–$", done.stdout, re.MULTILINE)


def test_a_shrunk_router_is_that_of_a_build_without_the_domain(life, shrunk, tmp_path):
    """Solved on the same statistics by the library alone."""
    from upcycle_core.dume.config import RouterConfig
    from upcycle_core.dume.router import solve_routers
    from upcycle_core.dume.router_reader import load_routers
    from upcycle_core.dume.statistics import Statistics

    found = load_routers(life.workspace / "router" / "router.safetensors").weights
    files = {name: life.workspace / "statistics" / name for name in OLD}
    loaded = {n: Statistics.load(path / "calibration.safetensors") for n, path in files.items()}
    expected = solve_routers(loaded, config=RouterConfig()).weights
    assert found.keys() == expected.keys()
    assert all(found[layer].equal(expected[layer]) for layer in expected)


def test_rollback_takes_one_command(life, shrunk):
    versions = life.registry().versions(NAME)
    [champion] = [v for v in versions if "champion" in v.aliases]
    before = int(champion.tags["upcycle.previous_champion"])
    done = life.call("flows.rollback", NAME, "--because", "a trial")
    assert f"{champion.reference} is champion no more" in done.stdout
    assert f"models:/{NAME}/{before}" in done.stdout
    after = life.registry().find(NAME, "champion")
    assert after.number == before
    [left] = [v for v in life.registry().versions(NAME) if v.number == champion.number]
    assert left.tags["upcycle.rolled_back"].endswith("a trial")
    said = f"version {before} is champion again, {champion.number} is no more"
    assert f"Finished in state Completed('{said}')" in done.stderr + done.stdout


def test_a_rollback_that_cannot_be_is_said_in_one_line(life, shrunk):
    said = life.refused(recipe="upcycle-picco", module="flows.rollback")
    assert said == (
        "name = 'upcycle-picco': is no registered model with a champion; see the names in MLflow "
        "(make up)\n"
    )


def test_a_remote_that_holds_a_secret_is_refused(life, shrunk, tmp_path):
    number, into = str(life.registry().versions(NAME)[-1].number), str(tmp_path / "again")
    secret = ("--remote", "https://me:Pl4n/ted@host/x")
    said = life.refused(number, "--into", into, *secret, recipe=NAME, module="flows.restore")
    assert "remote = 'https://me:***@host/x': holds a secret" in said


@pytest.mark.faults
def test_a_version_is_restored_from_the_remote(life, shrunk, tmp_path):
    """Its model, which the remote does not hold, from the parts: the version's own file is gone."""
    version = life.registry().versions(NAME)[-1]
    cache = life.workspace / ".dvc" / "cache"
    assert cache.exists()
    weights = life.workspace / "model" / "model.safetensors"
    digest = hashlib.md5(weights.read_bytes()).hexdigest()
    assert not list((life.home / "remote").rglob(digest[2:]))
    [own] = (f for f in (life.home / "mlflow").rglob(weights.name) if f.samefile(weights))
    aside = own.rename(tmp_path / "aside")
    left = tmp_path / "again" / "pico"  # of a restore that was killed
    (left / "experts" / "letters").mkdir(parents=True)
    for name in (".lock", ".restoring", "dvc.yaml", "experts/letters/half"):
        (left / name).write_text("")
    done = life.call("flows.restore", NAME, version.number, "--into", tmp_path / "again")
    aside.rename(own)
    again = tmp_path / "again" / "pico"
    assert str(again) in done.stdout
    assert done.calls == {"assemble": 1}
    assert not (again / ".restoring").exists()
    for part in ("model", "experts/letters", "statistics/numbers", "documents/letters"):
        assert tree_digest(again / part) == tree_digest(life.workspace / part)
    assert (again / FILE).read_text() == (life.workspace / FILE).read_text()


@pytest.mark.faults
def test_a_damaged_remote_restores_nothing(life, shrunk, tmp_path):
    remote = tmp_path / "remote"
    shutil.copytree(life.home / "remote", remote)
    for file in remote.rglob("*"):
        if file.is_file() and file.suffix != ".dir":
            file.chmod(0o644)
            file.write_bytes(b"damaged")
    done = life.call(
        *("flows.restore", NAME, life.registry().versions(NAME)[-1].number),
        *("--into", tmp_path / "again", "--remote", remote),
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "remote" in done.stderr
    assert not (tmp_path / "again" / "pico").exists()


@pytest.mark.faults
def test_a_rebuild_takes_a_domain_into_the_backbone_and_out_again(life, shrunk):
    done = life.call("flows.grow", life.grown_recipe, NEW, "--rebuild")
    assert (done.calls["train"], done.calls["write_backbone"]) == (1, 1)
    assert done.calls["domain_statistics"] == 2 * 3
    assert "The backbone averages colours, letters, numbers." in done.stdout
    assert set(life.lineage()["pinned"]) == {"backbone", "seed", "tokenizer"}
    done = life.call("flows.shrink", life.grown_recipe, NEW)
    assert f"flows.shrink RECIPE {NEW} --rebuild" in done.stdout
    done = life.call("flows.shrink", life.recipe, NEW, "--rebuild")
    assert (done.calls["train"], done.calls["write_backbone"]) == (0, 1)
    assert done.calls["domain_statistics"] == 2 * 2
    assert "The backbone averages letters, numbers." in done.stdout
    assert life.call("flows.retrain", life.recipe).stdout.count("nothing to do")


@pytest.mark.faults
def test_nothing_to_do_is_a_state_in_prefect_but_not_while_an_alias_is_pending(life, shrunk):
    before = life.registry().versions(NAME)
    life.registry().set_tags(before[-1], {PENDING_TAG: "challenger"})
    life.call("flows.retrain", life.recipe)
    after = life.registry().versions(NAME)
    assert [v.number for v in after] == [v.number for v in before]
    assert PENDING_TAG not in after[-1].tags
    done = life.run(sys.executable, "-c", STATE, str(life.recipe))
    assert "STATE COMPLETED Nothing to do" in done.stdout


@pytest.mark.faults
def test_a_domain_that_was_taught_and_is_in_the_average_leaves_for_good(tmp_path):
    """And what is left lives on: in its workspace, and where a version of it is restored."""
    texts = write_texts(tmp_path / "texts", domains=(*OLD, NEW))
    life = Life(tmp_path, recipe_of(tmp_path, texts, (*OLD, NEW)))
    life.call("flows.dume", life.recipe)
    teach(texts / "letters")
    assert life.call("flows.retrain", life.recipe).calls["train"] == 1
    assert set(life.lineage()["parents"]) == {"letters"}
    life.call("flows.shrink", life.recipe, "letters")
    rest = recipe_of(tmp_path, texts, ("numbers", NEW))
    again = life.call("flows.dume", rest)
    assert not again.calls["train"] + again.calls["solve_routers"]
    assert not life.lineage()["parents"]
    life.call("flows.restore", NAME, "challenger", "--into", tmp_path / "again")
    life.home, life.workspace = tmp_path / "again", tmp_path / "again" / "pico"
    teach(texts / "numbers")
    assert life.call("flows.retrain", rest).calls["train"] == 1
    assert set(life.lineage()["parents"]) == {"numbers"}


def teach(folder):
    file = folder / "train.txt"
    file.write_text(file.read_text() + f"{SEPARATOR}{file.parent.name} and more of it" * 9)
