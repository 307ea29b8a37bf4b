"""What befalls a run beside kills: no room, damaged files, a second flow, a clock set back."""

import os
import time
from collections import Counter

import pytest
from disturbed import Disturbed, kill_flow
from project import TIMEOUT
from terminal import Terminal
from texts import pico_recipe, save_recipe, write_texts

DOMAINS = ("letters", "numbers")
DAY = 86_400

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"), domains=DOMAINS)


def project_in(folder, texts, **options):
    values = pico_recipe(texts, domains=DOMAINS)
    values["experts"]["training"]["steps"] = 25
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    return Disturbed(folder, save_recipe(folder / "recipe.yaml", values), **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, texts):
    project = project_in(tmp_path_factory.mktemp("undisturbed"), texts)
    project.flow()
    project.all_calls = project.calls()
    project.all_digests = project.digests()
    return project


@pytest.mark.parametrize(
    ("room", "artifact"), [("assemble:50000", "model"), ("train:50000", "seed")]
)
def test_full_disk_while_a_shard_is_written_is_said_and_leaves_nothing_half(
    undisturbed, texts, tmp_path, room, artifact
):
    project = project_in(tmp_path, texts)
    project.more = {"UPCYCLE_TEST_FILE_BYTES": room}
    refused = project.flow(check=False)
    assert refused.returncode == 2, refused.stderr[-4000:]
    assert f"{artifact} = " in refused.stderr
    assert "the disk is full" in refused.stderr
    assert not (project.workspace / artifact).exists()
    project.more = {}
    project.flow()
    assert project.digests() == undisturbed.all_digests
    extra = project.calls() - undisturbed.all_calls
    assert set(extra) == {room.partition(":")[0]}


def test_truncated_artifacts_are_made_again_and_nothing_else(undisturbed):
    workspace = undisturbed.workspace
    halved = [
        workspace / "experts" / "letters" / "model.safetensors",
        max((workspace / "statistics" / "numbers").rglob("*"), key=lambda f: f.stat().st_size),
        workspace / "router" / "provenance.json",
    ]
    for file in halved:
        os.truncate(file, file.stat().st_size // 2)
    undisturbed.flow()
    assert undisturbed.digests() == undisturbed.all_digests
    made = undisturbed.calls()
    assert made["train"] == 1
    assert set(made) == {"train", "domain_statistics", "solve_routers"}


def test_records_that_cannot_be_read_are_made_again_with_what_they_are_of(undisturbed):
    workspace = undisturbed.workspace
    (workspace / "router" / "provenance.json").write_bytes(b"\xff\xfe")
    (workspace / "model" / "provenance.json").unlink()
    (workspace / "model" / "provenance.json").mkdir()
    (workspace / ".committed.json").write_bytes(b"")
    undisturbed.flow()
    assert undisturbed.digests() == undisturbed.all_digests
    assert set(undisturbed.calls()) == {"solve_routers", "assemble"}


def test_a_lock_of_dvc_that_cannot_be_read_is_named_and_written_again(undisturbed):
    lock = undisturbed.workspace / "dvc.lock"
    before = lock.read_text()
    lock.write_bytes(b"stages: [")
    refused = undisturbed.flow(check=False)
    assert refused.returncode == 2, refused.stderr[-4000:]
    assert "dvc.lock': cannot be read" in refused.stderr
    assert "delete it: the next run writes it again" in refused.stderr
    lock.unlink()
    undisturbed.flow()
    assert lock.read_text() == before


def test_second_flow_on_a_workspace_waits_for_the_first_and_has_nothing_left_to_do(
    undisturbed, texts, tmp_path
):
    project = project_in(tmp_path, texts)
    first = project.start("experts")
    assert project.wait_for(first, "experts"), project.said()
    impatient = project.flow("--set", "compute.wait_minutes=0.01", check=False)
    assert impatient.returncode == 2
    said = f"held by the flow dume, process {first.pid} for longer than the 0.01 minutes"
    assert said in impatient.stderr
    environment = project.environment()
    with Terminal("-m", "flows.dume", str(project.recipe), environment=environment) as second:
        waits = f"waiting for the flow dume, process {first.pid}, at work in {project.workspace}"
        second.wait_for(lambda: waits in second.shown)
        project.let_go("experts")
        assert first.wait(TIMEOUT) == 0, project.said()
        assert second.process.wait(TIMEOUT) == 0, second.shown[-4000:]
    assert project.digests() == undisturbed.all_digests
    assert project.calls() == undisturbed.all_calls


def test_a_flow_that_may_work_no_longer_ends_and_the_next_goes_on(undisturbed, texts, tmp_path):
    project = project_in(tmp_path, texts)
    late = project.flow("--set", "compute.limit_hours=0.001", check=False)
    assert late.returncode == 2, late.stderr[-4000:]
    assert "compute.limit_hours = 0.001: the flow has worked for longer" in late.stderr
    project.flow()
    assert project.digests() == undisturbed.all_digests


def test_clock_that_was_set_back_repeats_nothing(undisturbed, texts, tmp_path):
    """Everything on the disk is then of tomorrow."""
    project = project_in(tmp_path, texts, own_server=True)
    flow = project.start("statistics")
    assert project.wait_for(flow, "statistics"), project.said()
    kill_flow(flow, 0)
    tomorrow = time.time() + DAY
    for file in project.home.rglob("*"):
        os.utime(file, (tomorrow, tomorrow), follow_symlinks=False)
    project.more = {"UPCYCLE_TEST_CLOCK": str(-DAY)}
    project.flow()
    assert project.digests() == undisturbed.all_digests
    extra = project.calls() - undisturbed.all_calls
    assert extra <= Counter(domain_statistics=2)
    project.more = {}
    project.flow()
    assert not project.calls()
