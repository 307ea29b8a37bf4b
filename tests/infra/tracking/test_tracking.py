import contextlib
import multiprocessing
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir

import mlflow
import pytest
import torch
import yaml
from databases import home_with_database
from disk import shares_blocks
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from pico import save_pico
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra import durable
from infra.tracking import locations
from infra.tracking import registry as registry_module
from infra.tracking.descriptions import ROOM, with_room
from infra.tracking.records import DatasetRecord, Registration, flatten
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from upcycle_core.checkpoints.copy import link_file
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.errors import InputError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return home_with_database(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def tracker(place):
    return Tracker(place, "flows")


@pytest.fixture
def registry(place, tracker):
    return Registry(place)


@pytest.fixture
def client(place):
    """MLflow's own view of what was recorded."""
    return MlflowClient(place.mlflow_tracking_uri)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return folder


def test_a_run_keeps_params_curves_inputs_files_and_description(tracker, client, tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "table.md").write_text("| DUME | 0.98 |")
    with tracker.start_run("demo", tags={"git_commit": "abc"}) as run:
        assert run.page.startswith(f"/#/experiments/{run.experiment_id}/runs/{run.id}")
        run.log_params({"router": {"ridge_lambda": 0.01, "solve": "joint"}, "domains": ["a", "b"]})
        for step, loss in enumerate([3.0, 2.0, 1.5]):
            run.log_metrics({"loss": loss}, step)
        run.log_inputs([DatasetRecord("a/train", "f" * 64, "/data/a", "training", {"tokens": 7})])
        run.log_artifacts(tmp_path / "report", "report")
        run.log_text("x: 1", "recipe.yaml")
        run.describe("# Scores")
    found = client.get_run(run.id)
    assert found.info.status == "FINISHED"
    assert found.data.params == {
        "router.ridge_lambda": "0.01",
        "router.solve": "joint",
        "domains": '["a", "b"]',
    }
    curve = client.get_metric_history(run.id, "loss")
    assert [(p.step, p.value) for p in curve] == [(0, 3.0), (1, 2.0), (2, 1.5)]
    (dataset,) = found.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("a/train", "f" * 36)
    assert "f" * 64 in dataset.dataset.profile
    assert dataset.tags[0].value == "training"
    assert {file.path for file in client.list_artifacts(run.id)} == {"report", "recipe.yaml"}
    assert found.data.tags["mlflow.note.content"] == "# Scores"
    assert found.data.tags["git_commit"] == "abc"


def test_stages_in_parallel_threads_become_children_with_their_own_curves(tracker, client):
    def stage(number):
        with tracker.start_run(f"expert {number}", parent=parent) as run:
            for step in range(10):
                run.log_metrics({"loss": number * 100 + step}, step)
        return run.id

    with tracker.start_run("flow") as parent, ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(stage, range(8)))
    for number, run_id in enumerate(ids):
        child = client.get_run(run_id)
        assert child.data.tags["mlflow.parentRunId"] == parent.id
        assert child.info.status == "FINISHED"
        values = [point.value for point in client.get_metric_history(run_id, "loss")]
        assert values == [number * 100 + step for step in range(10)]


def test_tables_get_room_between_their_columns_and_short_cells_stay_whole():
    table = """Scores | all

| Method | a \\| b | Average |
| --- | ---: | :--: |
| **DUME** | -0.1 ± 0.2 | 95.2 |
| `a -1` | [a -2](http://b-2) | 1.0e-05 of all, and why that is so at length |
"""
    told = with_room(table)
    assert with_room(told) == told
    assert told.startswith("Scores | all\n")
    plain = told.replace(ROOM, "").replace("\N{NO-BREAK SPACE}", " ")
    assert plain.replace("\N{NON-BREAKING HYPHEN}", "-") == table
    assert told.splitlines()[2] == f"| Method | {ROOM}a \\| b | {ROOM}Average |"
    assert told.splitlines()[3] == "| --- | ---: | :--: |"
    assert told.splitlines()[4] == f"| **DUME** | {ROOM}\u20110.1\xa0±\xa00.2 | {ROOM}95.2 |"
    long = "1.0e-05 of all, and why that is so at length"
    assert told.splitlines()[5] == f"| `a -1` | {ROOM}[a -2](http://b-2) | {ROOM}{long} |"


def test_the_load_of_the_machine_stands_with_a_flow_s_run_and_with_no_stage_s(
    tracker, client, tmp_path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    with (
        tracker.start_run("demo", workspace=tmp_path, source="dume") as flow,
        tracker.start_run("seed", parent=flow) as stage,
    ):
        deadline = time.monotonic() + 60
        while not client.get_metric_history(flow.id, "system/system_memory_usage_megabytes"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        flow.rename("demo: version 1")
    found = client.get_run(flow.id)
    assert found.data.metrics["system/system_memory_usage_megabytes"] > 10
    assert (found.info.run_name, found.data.tags["mlflow.source.name"]) == (
        "demo: version 1",
        "dume",
    )
    assert not client.get_run(stage.id).data.metrics


def test_threads_use_the_database_one_after_another(place, monkeypatch):
    """A pool of connections that runs dry on a busy machine would fail the run that is late."""
    inside, most = [], []
    create_run = MlflowClient.create_run

    def slow(self, *arguments, **options):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        created = create_run(self, *arguments, **options)
        inside.pop()
        return created

    monkeypatch.setattr(MlflowClient, "create_run", slow)
    trackers = [Tracker(place, "busy"), Tracker(place, "busy")]

    def stage(index):
        with trackers[index % 2].start_run(f"stage {index}") as run:
            run.log_metrics({"loss": 1.0})

    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(stage, range(8)))
    assert len(most) == 8
    assert max(most) == 1


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_a_run_that_breaks_off_says_how(tracker, client, error, status):
    with pytest.raises(error), tracker.start_run("broken") as run:
        raise error
    assert client.get_run(run.id).info.status == status


def _die_during_runs(place, workspaces):
    tracker = Tracker(place, "flows")
    with contextlib.ExitStack() as runs:
        for workspace in workspaces:
            parent = runs.enter_context(tracker.start_run("flow", workspace=workspace))
            child = runs.enter_context(tracker.start_run("stage", parent=parent))
            (workspace / "ids").write_text(f"{parent.id} {child.id}")
        os.kill(os.getpid(), signal.SIGKILL)


def test_runs_of_a_killed_flow_are_marked_at_the_next_start(place, tracker, client, tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for workspace in (here, elsewhere):
        workspace.mkdir()
    spawned = multiprocessing.get_context("spawn")
    process = spawned.Process(target=_die_during_runs, args=(place, (here, elsewhere)))
    process.start()
    process.join(timeout=120)
    ids = {workspace: (workspace / "ids").read_text().split() for workspace in (here, elsewhere)}
    for workspace in ids:
        assert [client.get_run(i).info.status for i in ids[workspace]] == ["RUNNING"] * 2
    with tracker.start_run("flow", workspace=here) as run:
        assert [client.get_run(i).info.status for i in ids[here]] == ["KILLED"] * 2
        assert [client.get_run(i).info.status for i in ids[elsewhere]] == ["RUNNING"] * 2
        assert client.get_run(run.id).info.status == "RUNNING"


def test_two_versions_with_aliases_scores_and_files(tracker, registry, client, checkpoint):
    assert registry.find("moe", "champion") is None
    assert registry.versions("moe") == []
    with tracker.start_run("flow") as run:
        for score in (0.91, 0.97):
            registration = Registration(
                params={"moe": {"top_k": 1}},
                metrics={"normalised_average.dume": score},
                tags={"git_commit": "abc"},
                files={"recipe.yaml": "name: demo", "dvc.lock": "schema: '2.0'"},
                description="| DUME |",
            )
            version = registry.register("moe", checkpoint, registration, run=run)
            registry.set_alias(version, "challenger")
    first, second = registry.versions("moe")
    registry.set_alias(first, "champion")
    registry.set_tags(first, {"decision": "there was no champion"})

    champion = registry.find("moe", "champion")
    assert (champion.number, champion.run_id, champion.aliases) == (1, run.id, ("champion",))
    assert champion.metrics == {"normalised_average.dume": 0.91}
    assert champion.params == {"moe.top_k": "1"}
    assert champion.tags == {"git_commit": "abc", "decision": "there was no champion"}
    assert champion.description == "| DUME |"
    assert (second.number, second.aliases) == (2, ("challenger",))

    registry.set_alias(second, "champion")
    assert registry.find("moe", "champion").number == 2
    assert registry.find("moe", "challenger").number == 2
    outputs = client.get_run(run.id).outputs.model_outputs
    assert {output.model_id for output in outputs} == {first.model_id, second.model_id}


def test_what_is_handed_to_mlflow_lies_where_a_killed_process_leaves_it_to_the_next_one(
    tracker, registry, checkpoint, monkeypatch
):
    folders = []

    def log(self, model_id, folder, *place):
        folders.append(Path(folder))
        return handed(self, model_id, folder, *place)

    def download(location, **options):
        folders.append(Path(options["dst_path"]))
        return downloaded(location, **options)

    handed, downloaded = MlflowClient.log_model_artifacts, registry_module.download_artifacts
    monkeypatch.setattr(MlflowClient, "log_model_artifacts", log)
    monkeypatch.setattr(registry_module, "download_artifacts", download)
    with tracker.start_run("flow") as run:
        made = Registration(files={"dvc.lock": "schema: '2.0'"})
        version = registry.register("handed", checkpoint, made, run=run)
    assert registry.text(version, "dvc.lock") == "schema: '2.0'"
    own = [folder for folder in folders if folder != checkpoint]
    assert len(own) == 3
    for folder in own:
        kept = next(parent for parent in folder.parents if parent.parent == Path(gettempdir()))
        assert kept.name.startswith("registry-")
        assert not kept.exists()


def test_a_registered_checkpoint_comes_back_byte_for_byte(tracker, registry, checkpoint, tmp_path):
    with tracker.start_run("flow") as run:
        files = {"recipe.yaml": "name: demo"}
        version = registry.register("back", checkpoint, Registration(files=files), run=run)
    registry.set_alias(version, "champion")
    for reference in ("models:/back@champion", "models:/back/1"):
        folder = registry.download(reference, tmp_path / reference.replace("/", "_"))
        copied = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
        assert set(copied) > {"config.json", "model.safetensors", "upcycle/recipe.yaml", "MLmodel"}
        for name in ("config.json", "model.safetensors"):
            assert copied[name].read_bytes() == (checkpoint / name).read_bytes()
        assert copied["upcycle/recipe.yaml"].read_text() == "name: demo"
        sizes = {n: f.stat().st_size for n, f in copied.items() if not n.startswith("upcycle/")}
        told = yaml.safe_load(copied["MLmodel"].read_text())["model_size_bytes"]
        assert sum(sizes.values()) - 2 * sizes["MLmodel"] < told <= sum(sizes.values())


def test_a_version_s_files_are_on_the_disk_before_it_is_ready(
    place, tracker, registry, checkpoint, monkeypatch
):
    done, finalize = [], MlflowClient.finalize_logged_model
    monkeypatch.setattr(durable, "sync", done.append)
    monkeypatch.setattr(locations, "sync", done.append)

    def ready(client, model_id, status):
        done.append(status)
        return finalize(client, model_id, status)

    monkeypatch.setattr(MlflowClient, "finalize_logged_model", ready)
    with tracker.start_run("flow") as run:
        files = {"recipe.yaml": "name: demo", "dvc.lock": "schema: '2.0'"}
        version = registry.register("lasting", checkpoint, Registration(files=files), run=run)
    folder = registry.place(version.reference)
    there = {folder, *folder.rglob("*"), folder.parent, place.mlflow_artifacts}
    assert folder / "upcycle" / "dvc.lock" in there
    assert there <= set(done[: done.index("READY")])
    done.clear()
    registry.attach(version, {"card.md": "new"})
    assert folder / "upcycle" / "card.md" in done


def test_registered_weights_are_on_the_disk_once(place, tracker, registry, checkpoint, tmp_path):
    weights = checkpoint / "model.safetensors"
    with tracker.start_run("flow") as run:
        version = registry.register("once", checkpoint, Registration(), run=run)
    registered = registry.place(version.reference)
    for name in ("config.json", weights.name):
        assert (registered / name).read_bytes() == (checkpoint / name).read_bytes()
    linked = os.path.samefile(registered / weights.name, weights)
    assert linked != shares_blocks(tmp_path)  # which no other writer's blocks would tell
    assert (registered / "config.json").stat().st_nlink == 1  # what may be written to is apart


def test_what_is_lent_is_whole_and_costs_no_disk(tracker, registry, checkpoint, tmp_path):
    with tracker.start_run("flow") as run:
        version = registry.register("lent", checkpoint, Registration(), run=run)
    lent = registry.lend(version.reference, tmp_path / "lent")
    downloaded = registry.download(version.reference, tmp_path / "downloaded")
    mlflows = ["registered_model_meta"]  # which it adds to what it downloads
    assert tree_digest(lent) == tree_digest(downloaded, exclude=mlflows)
    weights = [folder / "model.safetensors" for folder in (lent, checkpoint)]
    cloned = tmp_path / "cloned"
    link_file(weights[0], cloned)
    linked = cloned.stat().st_ino == weights[0].stat().st_ino
    assert not linked or os.path.samefile(*weights)
    with pytest.raises(InputError, match="exists; name a new folder"):
        registry.lend(version.reference, tmp_path / "lent")
    with pytest.raises(InputError, match="models:/nobody@champion"):
        registry.lend("models:/nobody@champion", tmp_path / "out")
    shutil.rmtree(lent)
    assert (registry.place(version.reference) / "model.safetensors").is_file()


def test_a_download_is_refused_where_something_lies_or_nothing_is_known(registry, tmp_path):
    with pytest.raises(InputError, match="exists; name a new folder"):
        registry.download("models:/back/1", tmp_path)
    with pytest.raises(InputError, match="models:/nobody@champion"):
        registry.download("models:/nobody@champion", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_cannot_be_copied_leaves_no_version_and_no_files(
    place, tracker, registry, checkpoint, tmp_path
):
    before = set(place.mlflow_artifacts.rglob("*.safetensors"))
    (checkpoint / "zz.safetensors").symlink_to(tmp_path / "nothing")
    for directory in (checkpoint, tmp_path / "absent"):
        with pytest.raises(OSError, match=directory.name), tracker.start_run("flow") as run:
            registry.register("absent", directory, Registration(), run=run)
    assert registry.versions("absent") == []
    assert set(place.mlflow_artifacts.rglob("*.safetensors")) == before


def test_a_version_that_others_registered_is_read_too(tracker, registry, client, checkpoint):
    client.create_registered_model("foreign")
    client.create_model_version("foreign", source=str(checkpoint))
    (version,) = registry.versions("foreign")
    assert (version.number, version.model_id, version.metrics) == (1, "", {})


def test_a_version_is_told_from_that_of_a_model_made_anew(tracker, registry, client, checkpoint):
    seen = []
    for _ in range(2):
        with tracker.start_run("flow") as run:
            version = registry.register("anew", checkpoint, Registration(), run=run)
        registry.set_alias(version, "champion")
        assert registry.pointed("anew", "champion") == 1
        seen += [registry.followed("anew", "champion"), registry.followed("anew", "champion")]
        client.delete_registered_model("anew")
        assert registry.followed("anew", "champion") is None
    assert seen[0] == seen[1] < seen[2] == seen[3]


def test_a_version_whose_model_was_deleted_by_hand_is_listed_and_says_so(
    tracker, registry, client, checkpoint, tmp_path
):
    with tracker.start_run("flow") as run:
        files = {"dvc.lock": "schema: '2.0'"}
        made = [
            registry.register("cut", checkpoint, Registration(files=files), run=run)
            for _ in range(2)
        ]
        client.delete_logged_model(made[0].model_id)
    lost, whole = registry.versions("cut")
    assert (lost.number, lost.is_lost, whole.is_lost) == (1, True, False)
    assert registry.text(whole, "dvc.lock") == "schema: '2.0'"
    for needs in (
        lambda: registry.text(lost, "dvc.lock"),
        lambda: registry.attach(lost, {}),
        lambda: registry.add_metrics(lost, {"score": 1.0}, run=run),
        lambda: registry.place("models:/cut/1"),
        lambda: registry.download("models:/cut/1", tmp_path / "out"),
    ):
        with pytest.raises(InputError) as error:
            needs()
        said = "version 1 of cut has lost its files in MLflow: delete the version"
        assert str(error.value) == f"version = 'models:/cut/1': {said}"


def test_a_version_that_was_promoted_to_another_registered_model_has_its_files(
    tracker, registry, client, checkpoint, tmp_path
):
    """MLflow's own way from a trial to production: a version that names another version."""
    with tracker.start_run("flow") as run:
        files = {"dvc.lock": "schema: '2.0'"}
        made = registry.register("trial", checkpoint, Registration(files=files), run=run)
    client.copy_model_version("models:/trial/1", "production")
    client.copy_model_version("models:/production/1", "abroad")
    for name in ("production", "abroad"):
        (copy,) = registry.versions(name)
        assert (copy.is_lost, copy.is_copy, copy.model_id) == (False, True, made.model_id)
        assert registry.text(copy, "dvc.lock") == "schema: '2.0'"
        assert registry.place(copy.reference) == registry.place("models:/trial/1")
        assert (registry.download(copy.reference, tmp_path / name) / "config.json").is_file()
    client.delete_model_version("trial", "1")  # by hand; where its files are stays
    assert [registry.versions(name)[0].is_lost for name in ("production", "abroad")] == [False] * 2
    client.delete_logged_model(made.model_id)
    assert [registry.versions(name)[0].is_lost for name in ("production", "abroad")] == [True] * 2


def test_an_experiment_that_was_deleted_by_hand_is_said_with_the_way_back(place, client):
    with Tracker(place, "deleted").start_run("demo") as run:
        pass
    client.delete_experiment(run.experiment_id)
    with pytest.raises(InputError, match="'deleted': has been deleted in MLflow") as error:
        Tracker(place, "deleted").start_run("demo").__enter__()
    assert f"experiments restore --experiment-id {run.experiment_id}`" in str(error.value)
    client.restore_experiment(run.experiment_id)
    with Tracker(place, "deleted").start_run("demo") as again:
        assert again.experiment_id == run.experiment_id


def test_names_that_people_give_are_recorded_as_mlflow_can(tracker, client):
    names = {"Q&A": "web", "tickets (2024)": "office", "é:a/b c-d.e_f": "same", "x" * 300: "long"}
    names |= {"a//b": "hole", "a/../b": "up"}
    with tracker.start_run("names") as run:
        run.log_params({"instructions": {"domains": names}})
        run.log_metrics({"bytes/C++": 1.0})
    data = client.get_run(run.id).data
    assert {key.removeprefix("instructions.domains."): v for key, v in data.params.items()} == {
        "Q_A": "web",
        "tickets _2024_": "office",
        "é:a/b c-d.e_f": "same",
        "a/_/b": "up",
        "x" * 229: "long",
    }
    assert data.metrics == {"bytes/C__": 1.0}


def test_nested_values_become_dotted_text_and_long_text_is_cut():
    values = {"a": {"b": {"c": 1}}, "d": None, "e": [1, {"f": 2}], "g": "x" * 20, "h": {}}
    assert flatten(values, length=10) == {
        "a.b.c": "1",
        "d": "None",
        "e": '[1, {"f":…',
        "g": "x" * 9 + "…",
    }


def test_a_registered_model_is_fetched_once_a_version(registry, tracker, checkpoint, tmp_path):
    for name in ("fetched", "again"):
        with tracker.start_run(name) as run:
            version = registry.register("fetched", checkpoint, Registration(), run=run)
        (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    registry.set_alias(version, "champion")
    first = registry.fetch("models:/fetched/1", tmp_path)
    second = registry.fetch("models:/fetched@champion", tmp_path)
    assert (first / "config.json").read_text() == '{"model_type": "mixtral"}'
    assert (second / "config.json").read_text() == '{"model_type": "llama"}'
    whole = (checkpoint / "model.safetensors").read_bytes()
    assert (second / "model.safetensors").read_bytes() == whole
    stamp = (second / "model.safetensors").stat()
    assert registry.fetch("models:/fetched/2", tmp_path) == second
    assert (second / "model.safetensors").stat() == stamp
    assert not [path for path in second.iterdir() if path.is_dir()]
    registered, cloned = registry.place("models:/fetched/2") / "model.safetensors", tmp_path / "c"
    link_file(registered, cloned)
    assert not cloned.samefile(registered) or registered.samefile(second / registered.name)


def test_what_mlflow_logs_itself_lies_together(registry, place, tmp_path, monkeypatch):
    save_pico(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    words.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place.mlflow_tracking_uri)
    mlflow.create_experiment("theirs", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("theirs")
    with mlflow.start_run():
        mlflow.transformers.log_model(
            {"model": model, "tokenizer": words},
            name="theirs",
            task="text-generation",
            registered_model_name="theirs",
            pip_requirements=[],
        )
    found = registry.fetch("models:/theirs/1", tmp_path / "cache")
    theirs = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in load_file(found / "model.safetensors").items():
        assert torch.equal(tensor, theirs[name]), name
    together = AutoTokenizer.from_pretrained(found)
    assert together("abc").input_ids == words("abc").input_ids
    assert together.chat_template == words.chat_template


def test_files_that_are_elsewhere_are_named_and_nothing_is_left(
    tracker, registry, checkpoint, tmp_path
):
    with tracker.start_run("flow") as run:
        registry.register("away", checkpoint, Registration(), run=run)
    here = registry.place("models:/away/1")
    assert (here / "model.safetensors").read_bytes() == (
        checkpoint / "model.safetensors"
    ).read_bytes()
    here.rename(tmp_path / "moved")
    here.mkdir()
    assert registry.place("models:/away/1") is None
    with pytest.raises(InputError, match=rf"away/1': no config\.json came from .*{here}"):
        registry.download("models:/away/1", tmp_path / "out" / "model")
    assert not [*(tmp_path / "out").iterdir()]


def test_a_copy_that_fails_says_why_and_leaves_nothing(
    tracker, registry, checkpoint, tmp_path, monkeypatch
):
    def full(*_, dst_path, **__):
        (Path(dst_path) / "config.json").write_text("{")
        raise MlflowException("The following failures occurred: [Errno 28] No space left on device")

    with tracker.start_run("flow") as run:
        registry.register("torn", checkpoint, Registration(), run=run)
    monkeypatch.setattr(registry_module, "download_artifacts", full)
    with pytest.raises(InputError, match=r"torn/1': its files cannot be copied .*No space left"):
        registry.download("models:/torn/1", tmp_path / "out" / "model")
    assert not [*(tmp_path / "out").iterdir()]


def test_a_tokenizer_alone_is_no_model(tracker, registry, checkpoint, tmp_path):
    (checkpoint / "tokenizer_config.json").write_text("{}")
    with tracker.start_run("flow") as run:
        registry.register("beheaded", checkpoint, Registration(), run=run)
    here = registry.place("models:/beheaded/1")
    (here / "config.json").unlink()
    with pytest.raises(InputError, match=rf"beheaded/1': no config\.json came from .*{here}"):
        registry.fetch("models:/beheaded/1", tmp_path / "cache")
    assert not [*(tmp_path / "cache").rglob("*config.json")]


@pytest.mark.parametrize("reference", ["models:/nobody/1", "models:/nobody@champion", "models:/"])
def test_a_version_that_is_not_there_is_named(registry, tmp_path, reference):
    with pytest.raises(InputError, match="not in the registry"):
        registry.fetch(reference, tmp_path)


def test_of_a_model_that_is_there_its_versions_and_aliases_are_named(tracker, registry, checkpoint):
    with tracker.start_run("flow") as run:
        version = registry.register("known", checkpoint, Registration(), run=run)
    registry.set_alias(version, "champion")
    for reference in ("models:/known@production", "models:/known/3"):
        with pytest.raises(InputError, match=r"; of known there is @champion, /1$"):
            registry.referenced(reference)
