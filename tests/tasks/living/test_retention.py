"""One life of a workspace with its real DVC cache and MLflow database, cleared up."""

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from databases import home_with_database
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from project import ROOT, Project
from texts import pico_recipe, save_recipe

from infra.recipe.schema import KeepConfig, recipe_yaml
from infra.tracking.locations import local_folder
from infra.tracking.records import Registration, Version
from infra.tracking.registry import Registry
from infra.tracking.retention import OURS, Records
from infra.tracking.runs import Tracker
from infra.versioning.known import Recorded
from infra.versioning.versions import Versions
from tasks.engine.workspace import Workspace
from tasks.living.retention import Disk, _cache, _models, _of_version, has_left, spares, table
from tasks.recipes import validate
from tasks.release.history import (
    EXPERTS_TAG,
    PREVIOUS_TAG,
    ROLLED_BACK_TAG,
    ways_back,
    withdrawn_experts,
)
from upcycle_core.errors import InputError

NAME = "upcycle-pico"
HERE = ("letters", "numbers")
PIPELINE = """\
stages:
  experts:
    foreach: [letters, numbers, colours]
    do: {cmd: "true", outs: ["experts/${item}"]}
  task_scores-expert_colours: {cmd: "true", outs: [task_scores/expert_colours]}
  baselines-btx: {cmd: "true", outs: [baselines/btx]}
  model: {cmd: "true", outs: [model]}
"""
STAGES = {
    "experts@letters": "experts/letters",
    "experts@numbers": "experts/numbers",
    "experts@colours": "experts/colours",
    "task_scores-expert_colours": "task_scores/expert_colours",
    "baselines-btx": "baselines/btx",
    "model": "model",
}
SIZE = 10_000
LOCK = """\
schema: '2.0'
stages:
  experts@law: {cmd: "true", outs: [{path: experts/law, md5: aa.dir}]}
  experts@old: {cmd: "true", outs: [{path: experts/old, md5: bb.dir}]}
"""


class Kept:
    """A registry that holds one version's small files."""

    def __init__(self, files):
        self.files = files

    def text(self, version, file):
        return self.files[file]


class Life:
    """Four models of one workspace; the first is champion, the last challenger.

    The third domain, `colours`, is in the first two models and then leaves the recipe.
    """

    def __init__(self, home):
        self.place = home_with_database(home)
        keep = KeepConfig(versions=1, runs=1, flow_runs=1)
        self.recipe = replace(validate(pico_recipe(home, domains=HERE)), keep=keep)
        self.before = replace(validate(pico_recipe(home)), keep=keep)
        self.workspace = Workspace(home / "pico")
        self.recorded = Recorded(self.workspace.root)
        self.versions = Versions(self.workspace.root)
        self.versions.prepare(pipeline=PIPELINE, params="")
        self.tracker = Tracker(self.place, NAME)
        self.registry = Registry(self.place)
        self.runs = {}

    def publish(self, artifact, text):
        staged = self.workspace.stage(artifact)
        (staged / "weights").write_bytes(f"{artifact} {text} ".encode().ljust(SIZE, b"."))
        (staged / "config.json").write_text(f'{{"of": "{artifact}"}}')
        inputs = {f"experts/{domain}": "0" for domain in HERE} if artifact == "model" else {}
        self.workspace.publish(staged, artifact, {"text": text, "inputs": inputs})

    def model(self, number, changed, recipe):
        for artifact in changed:
            self.publish(artifact, number)
        self.versions.commit([s for s, artifact in STAGES.items() if artifact in changed])
        with self.tracker.start_run("dume", workspace=self.workspace.root) as run:
            with self.tracker.start_run("model", parent=run) as child:
                child.log_text("x", "x.txt")
            run.log_text("y" * SIZE, "y.txt")
            files = {"recipe.yaml": recipe_yaml(recipe), "dvc.lock": self.versions.lock_text()}
            made = Registration(tags={"upcycle.recipe": "r"}, files=files)
            version = self.registry.register(NAME, self.workspace.path("model"), made, run=run)
        self.runs[number] = {run.id, child.id}
        self.registry.set_alias(version, "challenger")
        if number == 1:
            self.registry.set_alias(version, "champion")

    def spares(self):
        services = Records(self.place, NAME), self.registry
        return list(spares(self.recipe, self.workspace, *services))

    def numbers(self):
        return [version.number for version in self.registry.versions(NAME)]

    def listed(self):
        """{run} that MLflow still shows."""
        client = MlflowClient(self.place.mlflow_tracking_uri)
        experiment = client.get_experiment_by_name(NAME)
        return {run.info.run_id for run in client.search_runs([experiment.experiment_id])}

    def disk(self):
        """Bytes that this home takes, and all of its files."""
        files = [file for file in self.place.home.rglob("*") if file.is_file()]
        own = [f for f in files if f.suffix != ".db" and ".dvc/tmp" not in str(f)]
        inodes = {f.stat().st_ino: f.stat().st_size for f in own}
        return sum(inodes.values()), {str(file) for file in own}

    def restored(self, version, folder):
        """What DVC's cache gives back of a registered version."""
        project = folder / str(version)
        project.mkdir(parents=True)
        copy = self.registry.download(f"models:/{NAME}/{version}", folder / f"model-{version}")
        shutil.copyfile(copy / "upcycle" / "dvc.lock", project / "dvc.lock")
        stages = yaml.safe_load(PIPELINE)["stages"]
        if version > 2:
            stages["experts"]["foreach"].remove("colours")
            del stages["task_scores-expert_colours"]
        (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
        (project / ".dvc").mkdir()
        cache = self.workspace.root / ".dvc" / "cache"
        (project / ".dvc" / "config").write_text(
            f'[core]\n no_scm = True\n[cache]\n dir = "{cache}"\n type = copy\n'
        )
        done = subprocess.run(
            [sys.executable, "-m", "dvc", "checkout", "--quiet"],
            cwd=project,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return {
            str(file.parent.relative_to(project)): file.read_text().split()[1]
            for file in project.rglob("weights")
        }


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    return lived(tmp_path_factory.mktemp("home #1 für Bücher"))


def lived(home):
    made = Life(home)
    made.model(1, list(STAGES.values()), made.before)
    made.model(2, ["experts/letters", "experts/colours", "model"], made.before)
    for number in (3, 4):
        made.model(number, ["experts/letters", "model"], made.recipe)
    with made.tracker.start_run("retrain", workspace=made.workspace.root) as run:
        pass  # the newest, which found nothing to do
    made.runs["nothing"] = {run.id}
    made.recorded.add({"experts@letters": "4", "experts@colours": "2"})
    piece = made.workspace.pieces / "mark" / "whole"
    piece.mkdir(parents=True)
    (piece / "weights").write_bytes(b"x" * SIZE)
    return made


def test_only_what_is_one_domain_s_alone_leaves_with_it():
    for artifact in ("experts/law", "corpora/law", "parents/law", "task_scores/expert_law"):
        assert has_left(artifact, HERE)
        assert not has_left(artifact, ("law",))
    for artifact in ("baselines/law", "comparison", "task_scores/btx", "outside/law", "model"):
        assert not has_left(artifact, HERE)


def test_what_would_go_is_named_and_nothing_is_changed(life):
    before = life.disk()
    found = {spare.what: spare for spare in life.spares()}
    assert life.disk() == before
    assert list(found) == [
        "experts/colours",
        "task_scores/expert_colours",
        "finished pieces",
        f"models:/{NAME}/2",
        "MLflow runs",
        "DVC cache",
    ]
    assert found["MLflow runs"].count == 2  # of version 2, and its child
    # The champion's experts/colours is another file; the second model's goes with its last name.
    assert found["experts/colours"].bytes < SIZE / 2 < found["DVC cache"].bytes
    assert table(list(found.values()))[-1]["count"] == sum(s.count for s in found.values())


def test_the_cache_stays_where_nothing_says_what_its_versions_need(life, caplog):
    """They lie in an experiment that somebody has renamed, and say nothing of their recipe."""
    for place in (f"upcycle-{life.recipe.name}", "of nobody"):
        found = list(spares(life.recipe, life.workspace, Records(life.place, place), life.registry))
        assert ("DVC cache" in [spare.what for spare in found]) == (place != "of nobody")
    assert "none of the versions of upcycle-pico says that pico made it" in caplog.text


def test_a_domain_of_the_model_stays_whatever_an_older_recipe_says(life, monkeypatch):
    assert "experts/colours" in [spare.what for spare in life.spares()]
    monkeypatch.setattr("tasks.living.retention.modelled", lambda workspace: (*HERE, "colours"))
    assert not [spare.what for spare in life.spares() if "colours" in spare.what]
    own = {spare.what: spare.count for spare in life.spares()}["DVC cache"]
    monkeypatch.setattr("tasks.living.retention.modelled", lambda workspace: ())  # it was lost
    lost = {spare.what: spare.count for spare in life.spares()}
    assert not [what for what in lost if "colours" in what]
    assert lost["DVC cache"] == own


class Killed(BaseException):
    pass


def test_killed_in_every_step_champion_and_challenger_are_whole(life, monkeypatch, tmp_path):
    """Each step dies with its first file removed; what comes before that in the step is done."""

    def kill(folder, *arguments, **options):
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        min(files, key=lambda file: file.name != "provenance.json").unlink()
        raise Killed

    def kill_dvc(*arguments):
        raise Killed

    for spare in life.spares():
        if spare.what == "finished pieces":
            continue  # one call, which may stop anywhere
        with monkeypatch.context() as patched:
            patched.setattr("shutil.rmtree", kill)
            patched.setattr("infra.versioning.cache.Cache.collect", kill_dvc)
            with pytest.raises(Killed):
                spare.free()
        with life.workspace.lock("the next flow"):
            pass
        assert {1, 3, 4} <= set(life.numbers())
        assert life.runs[1] | life.runs[4] <= life.listed()
    assert life.workspace.provenance("experts/letters")["text"] == 4
    assert life.registry.find(NAME, "champion").number == 1
    for number in life.numbers():
        copy = life.registry.download(f"models:/{NAME}/{number}", tmp_path / f"{number}")
        assert (copy / "weights").stat().st_size == SIZE
    assert life.restored(1, tmp_path / "r") == dict.fromkeys(STAGES.values(), "1")
    assert life.restored(4, tmp_path / "r")["experts/letters"] == "4"


def test_all_that_was_shown_goes_and_nothing_else(life, tmp_path):
    before, names = life.disk()
    found = life.spares()
    for spare in found:
        spare.free()
    after, left = life.disk()
    assert before - after == sum(spare.bytes for spare in found)
    assert life.numbers() == [1, 3, 4]
    assert life.listed() == life.runs[1] | life.runs[3] | life.runs[4] | life.runs["nothing"]
    for artifact in ("experts/letters", "experts/numbers", "baselines/btx", "model"):
        assert life.workspace.provenance(artifact) is not None
    assert not life.workspace.path("experts/colours").exists()
    assert life.recorded.known() == {"experts@letters": "4"}  # what comes back is recorded anew
    assert not [name for name in names - left if "/experts/letters/" in name]
    assert life.spares() == []


def test_a_kept_version_comes_back_from_the_cache(life, tmp_path):
    champion = life.restored(1, tmp_path)
    assert champion == dict.fromkeys(STAGES.values(), "1")
    challenger = life.restored(4, tmp_path)
    assert challenger["experts/letters"] == "4"
    assert challenger["baselines/btx"] == "1"


def test_a_model_whose_registration_was_killed_goes_but_not_during_a_run(life):
    client = MlflowClient(life.place.mlflow_tracking_uri)
    with life.tracker.start_run("dume", workspace=life.workspace.root) as run:
        model = client.create_logged_model(
            run.experiment_id, name=NAME, source_run_id=run.id, tags={"upcycle.recipe": "r"}
        )
        (life.place.home / "weights").write_bytes(b"x" * SIZE)
        client.log_model_artifacts(model.model_id, str(life.workspace.path("model")))
        assert not [s for s in life.spares() if s.what.startswith("models:/")]
    [spare] = [s for s in life.spares() if s.what == f"models:/{model.model_id}"]
    assert spare.bytes > SIZE / 2
    spare.free()
    with pytest.raises(MlflowException):
        client.get_logged_model(model.model_id)


def test_a_version_that_gets_an_alias_meanwhile_stays_with_what_it_needs(life, tmp_path, caplog):
    found = [s for s in life.spares() if s.what.startswith(f"models:/{NAME}/")]
    assert not found  # version 3 is the newest without an alias
    life.registry.set_alias(life.registry.versions(NAME)[0], "challenger")
    life.recipe = replace(life.recipe, keep=KeepConfig(versions=1, runs=1))
    found = life.spares()
    assert [s.what for s in found] == [f"models:/{NAME}/3", "MLflow runs", "DVC cache"]
    life.registry.set_alias(life.registry.versions(NAME)[1], "mine")
    for spare in found:
        spare.free()
    assert life.numbers() == [1, 3, 4]
    assert life.runs[3] <= life.listed()
    assert life.restored(3, tmp_path)["experts/letters"] == "3"
    assert f"DVC cache: stays this time; an alias points at models:/{NAME}/3 by now" in caplog.text


def test_that_a_version_was_rolled_back_outlives_it(life):
    """One of an earlier release, which has tagged no registered model."""
    first, *_ = life.registry.versions(NAME)
    life.registry.set_tags(first, {EXPERTS_TAG: '{"letters": "good"}'})
    life.registry.set_alias(first, "champion")
    own = {EXPERTS_TAG: '{"letters": "bad"}', PREVIOUS_TAG: "1", ROLLED_BACK_TAG: "bad answers"}
    with life.tracker.start_run("dume", workspace=life.workspace.root) as run:
        folder, files = life.workspace.path("model"), {"recipe.yaml": "domains: {}"}
        bad, _ = (
            life.registry.register(NAME, folder, Registration(tags=tags, files=files), run=run)
            for tags in (own, {})
        )
    held = {"letters": ["bad expert"]}
    assert withdrawn_experts(life.registry, NAME, held) == {"letters": bad.number}
    records = Records(life.place, NAME)
    past = replace(
        records.past(life.recipe.keep, [NAME], recipe="pico", ways_back=ways_back), models=()
    )
    for spare in _models(past, records, life.registry, life.recipe.keep, Disk(), []):
        spare.free()
    assert bad.number not in life.numbers()
    assert withdrawn_experts(life.registry, NAME, held) == {"letters": bad.number}
    assert withdrawn_experts(life.registry, NAME, {"letters": ["corrected"]}) == {}


def test_a_kept_version_whose_files_are_lost_stops_it_all(life):
    client = MlflowClient(life.place.mlflow_tracking_uri)
    champion = life.registry.find(NAME, "champion")
    location = client.get_logged_model(champion.model_id).artifact_location
    (local_folder(location, life.place) / "upcycle" / "dvc.lock").unlink()
    with pytest.raises(InputError, match=r"models:/upcycle-pico/1.*dvc.lock"):
        life.spares()


@pytest.mark.parametrize("text", ["", "{}", "\0\0\0", "schema: '2.0'", "- a", "stages: {a: 1}"])
@pytest.mark.parametrize("file", ["dvc.lock", "recipe.yaml"])
def test_a_kept_version_whose_files_a_power_cut_emptied_needs_what_cannot_be_told(file, text):
    files = {"dvc.lock": LOCK, "recipe.yaml": "domains: {law: {}}"}
    version = Version(NAME, 1, "run", "m", "", ("champion",), {OURS: "r"}, {}, {})
    assert [out["path"] for out in _of_version(version, Kept(files))] == ["experts/law"]
    tuned = {"dvc.lock": LOCK.replace("experts/law", "model"), "recipe.yaml": "domains: {}"}
    assert [out["path"] for out in _of_version(version, Kept(tuned))] == ["model"]
    with pytest.raises(InputError, match=r"models:/upcycle-pico/1.*dvc\.lock or recipe\.yaml"):
        _of_version(version, Kept({**files, file: text}))


def test_what_leaves_the_cache_is_whole_in_a_directory_before(tmp_path):
    workspace = Workspace(tmp_path / "pico")
    versions = Versions(workspace.root)
    versions.prepare(pipeline="stages: {model: {cmd: 'true', outs: [model]}}", params="")
    (workspace.root / "model").mkdir()
    for text in ("old", "newer"):
        (workspace.root / "model" / "weights").unlink(missing_ok=True)  # the cache's too
        (workspace.root / "model" / "weights").write_text(text)
        versions.commit(["model"])
        versions.push(str(tmp_path / "remote"))
    [old] = [
        f for f in (tmp_path / "remote").rglob("*") if f.is_file() and f.read_bytes() == b"old"
    ]
    old.chmod(0o644)
    old.write_bytes(b"")
    [spare] = _cache(["law"], workspace, [], "remote", Disk())
    spare.free()
    assert old.read_text() == "old"
    kept = [f.read_bytes() for f in (workspace.root / ".dvc" / "cache").rglob("*") if f.is_file()]
    assert b"newer" in kept
    assert b"old" not in kept


@pytest.mark.faults
def test_a_command_that_is_killed_is_finished_by_the_next(tmp_path):
    values = {**pico_recipe(tmp_path, domains=HERE), "keep": {"versions": 1, "runs": 1}}
    project = Project(tmp_path, save_recipe(tmp_path / "r.yaml", values), module="flows.tidy")
    life = lived(project.home)
    command = [sys.executable, "-m", "flows.tidy", str(project.recipe), "--apply"]
    tidy = subprocess.Popen(command, cwd=ROOT, env=project.environment())
    registered = MlflowClient(life.place.mlflow_tracking_uri).search_model_versions
    try:
        while len(registered()) == 4 and tidy.poll() is None:
            time.sleep(0.01)
    finally:
        tidy.kill()
        tidy.wait()
    assert tidy.returncode == -signal.SIGKILL
    assert life.restored(1, tmp_path / "r") == dict.fromkeys(STAGES.values(), "1")
    project.flow("--apply")
    assert life.restored(4, tmp_path / "r")["experts/letters"] == "4"
    assert life.numbers() == [1, 3, 4]
    assert life.spares() == []
