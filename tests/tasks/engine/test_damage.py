"""What a disk may leave of a workspace's small files: it is made again, or named with its remedy.

Damage here is what was seen on real disks: a flipped bit, a file that a power cut left empty or
torn, something else in its place.
"""

import json
import random
import shutil
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest

from flows.making.change import UNFINISHED, unfinished
from infra.cluster.pieces import finish, is_finished
from infra.cluster.progress import FileProgress, ProgressReader
from infra.cluster.worker import Performed
from infra.recipe.schema import Lineage
from infra.versioning.known import FILE, Recorded
from tasks.engine.costs import FOLDER, Cost, read_cost, write_cost
from tasks.engine.sources import CODE
from tasks.engine.stage import Session, Stage
from tasks.engine.workspace import PROVENANCE, Workspace
from tasks.living.lineage import FILE as LINEAGE
from tasks.living.lineage import modelled, save, with_lineage
from tasks.recipes import load_recipe
from upcycle_core.errors import InputError

FLIPS = 200
ARTIFACT = "experts/law"
TEXTS = {
    "empty": b"",
    "torn": b'{"files": {"wei',
    "zeros": b"\0" * 512,
    "no text": b"\xff\xfe\xfd",
    "no keys": b"{}",
    "list": b"[]",
    "null": b"null",
    "string": b'"files"',
    "number": b"3",
    "another kind of files": b'{"files": ["weights"]}',
}


def fill(run):
    (run.out / "weights").write_text("weights " * 10)
    (run.out / "config").write_text("whole")


def stage_of(out, *inputs):
    return Stage(
        function=fill,
        out=out,
        inputs=lambda recipe, item: inputs,
        params=("seed", "router"),
    )


STAGE = stage_of(ARTIFACT)
READER = stage_of("model", f"{ARTIFACT}/weights")


@pytest.fixture
def session(tmp_path):
    recipe = load_recipe(CODE / "recipes" / "demo.yaml")
    session = Session(recipe, Workspace(tmp_path / "demo"), log=lambda text: None)
    assert STAGE.ensure(session)
    return session


def test_a_run_says_what_it_was_made_from_and_what_it_made(session):
    said = {}

    class Recorder:
        def log_metrics(self, values, step=0):
            pass

        def log_params(self, values):
            said.update(values)

    recorded = replace(session, record=lambda label, made_from: nullcontext(Recorder()))
    assert READER.ensure(recorded)
    assert said == {"outputs": {"model": session.workspace.digest("model")}}
    assert len(said["outputs"]["model"]) == 64


def put(path, form):
    """Leave ``form`` of TEXTS at ``path``, or a folder."""
    path.unlink(missing_ok=True)
    if form == "folder":
        path.mkdir()
        (path / "lost+found").write_text("x")
    else:
        path.write_bytes(TEXTS[form])


def flipped(content, draw):
    """``content`` with one bit the other way round."""
    place = draw.randrange(8 * len(content))
    damaged = bytearray(content)
    damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


def check_it_is_made_again(session, before):
    """Asked in every way, the artifact is whole, damaged or made again; and ends as it was."""
    workspace = session.workspace
    record = workspace.provenance(ARTIFACT)
    assert record is None or isinstance(record, dict)
    assert workspace.artifact_of(f"{ARTIFACT}/weights") == ARTIFACT
    assert len(workspace.digest(ARTIFACT)) == 64
    directory = workspace.path(ARTIFACT)
    assert all(path.is_relative_to(directory) for path in workspace.damaged(ARTIFACT))
    assert STAGE.ensure(session)
    assert (workspace.path(ARTIFACT) / PROVENANCE).read_bytes() == before
    assert workspace.provenance(ARTIFACT) == json.loads(before)
    assert not STAGE.ensure(session)


@pytest.mark.parametrize("form", [*TEXTS, "folder"])
def test_an_artifact_whose_provenance_cannot_be_read_is_made_again(session, form):
    path = session.workspace.path(ARTIFACT) / PROVENANCE
    before = path.read_bytes()
    put(path, form)
    assert session.workspace.provenance(ARTIFACT) is None
    assert session.workspace.damaged(ARTIFACT) == [path]
    check_it_is_made_again(session, before)


def test_any_flipped_bit_of_a_provenance_is_healed(session):
    path = session.workspace.path(ARTIFACT) / PROVENANCE
    before, draw = path.read_bytes(), random.Random(0)
    for _ in range(FLIPS):
        path.write_bytes(flipped(before, draw))
        check_it_is_made_again(session, before)


@pytest.mark.parametrize("form", [*TEXTS, "folder"])
def test_nothing_is_made_from_an_artifact_whose_provenance_cannot_be_read(session, form):
    put(session.workspace.path(ARTIFACT) / PROVENANCE, form)
    later = Session(session.recipe, session.workspace, log=lambda text: None)
    with pytest.raises(InputError, match=rf"model needs = '{ARTIFACT}': .*made again: flows.dume"):
        READER.ensure(later)


@pytest.mark.parametrize("form", [*TEXTS, "folder"])
def test_what_an_unreadable_provenance_was_made_from_is_unknown(session, form):
    put(session.workspace.path(ARTIFACT) / PROVENANCE, form)
    shutil.copytree(session.workspace.path(ARTIFACT), session.workspace.path("model"))
    assert modelled(session.workspace) == ()


def test_a_file_in_the_place_of_an_artifact_is_replaced(session):
    shutil.rmtree(session.workspace.path(ARTIFACT))
    session.workspace.path(ARTIFACT).write_text("x")
    assert STAGE.ensure(session)
    assert session.workspace.provenance(ARTIFACT) is not None
    assert list(session.workspace.staging.iterdir()) == []


@pytest.mark.parametrize("form", [*TEXTS, "folder"])
def test_what_dvc_has_recorded_is_asked_again_where_it_cannot_be_read(tmp_path, form):
    recorded = Recorded(tmp_path)
    recorded.add({"model": "one"})
    put(tmp_path / FILE, form)
    assert "model" not in recorded.known()
    recorded.forget(["model"])
    recorded.add({"model": "two"})
    assert recorded.known()["model"] == "two"


@pytest.mark.parametrize("form", [*TEXTS, "folder"])
def test_a_piece_whose_result_cannot_be_read_is_not_finished(tmp_path, form):
    def record():
        (tmp_path / "a.partial").mkdir()
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        done = Performed({"loss": 1.0}, 7)
        finish(tmp_path, "a", done, unfinished=tmp_path / "a.partial", started=1.0, ended=2.0)

    record()
    assert is_finished(tmp_path, "a")
    put(tmp_path / "a.json", form)
    assert not is_finished(tmp_path, "a")
    record()
    assert is_finished(tmp_path, "a")


def test_no_flipped_bit_of_a_result_is_used(tmp_path):
    """Most of them leave good JSON behind, with another number in it."""
    (tmp_path / "a.partial").mkdir()
    done = Performed({"perplexity": {1: 2.5, 12: float("nan")}, "tokens": 10**12}, 7)
    finish(tmp_path, "a", done, unfinished=tmp_path / "none", started=1.0, ended=2.0)
    path, draw = tmp_path / "a.json", random.Random(0)
    before = path.read_bytes()
    assert is_finished(tmp_path, "a")
    for _ in range(FLIPS):
        path.write_bytes(flipped(before, draw))
        assert not is_finished(tmp_path, "a"), path.read_bytes()


def test_no_flipped_bit_of_a_lineage_is_believed(session):
    """But for one in the seal's own name: then the rest is as it was."""
    root = session.workspace.root
    lineage = Lineage(pinned={"seed": "0" * 64}, backbone=("law",), parents={"python": "1" * 64})
    save(lineage, session.workspace)
    path, draw = root / LINEAGE, random.Random(0)
    before = path.read_bytes()
    for _ in range(FLIPS):
        path.write_bytes(flipped(before, draw))
        found = lineage
        with suppress(InputError):
            found = with_lineage(session.recipe, session.workspace).lineage
        assert found == lineage


def test_any_flipped_bit_of_a_reported_line_is_survived(tmp_path):
    path = tmp_path / "a.progress"
    progress = FileProgress(path)
    progress.start("training", 4)
    progress.metrics({"loss": 2.0}, step=1)
    progress.finish()
    before, draw = path.read_bytes(), random.Random(0)
    events = list(ProgressReader(path).events())
    assert len(events) == 3
    for _ in range(FLIPS):
        path.write_bytes(flipped(before, draw))
        read = list(ProgressReader(path).events())
        assert sum(event in events for event in read) >= 1
        assert all({*event} in [{*known} for known in events] for event in read)


def test_a_piece_that_goes_on_is_heard_after_a_line_that_a_kill_has_cut(tmp_path):
    path = tmp_path / "piece.progress"
    FileProgress(path).start("training", 4)
    with path.open("a") as file:
        file.write('{"done": 3, "sho')
    FileProgress(path).start("training", 20)
    assert [event["total"] for event in ProgressReader(path).events()] == [4, 20]


@pytest.mark.parametrize("form", [*TEXTS, "folder"])
def test_a_cost_that_cannot_be_read_is_unknown(session, form):
    write_cost(session.workspace, "model", Cost(1.0, 2))
    put(session.workspace.path(FOLDER) / "model.json", form)
    assert read_cost(session.workspace, "model") is None
    write_cost(session.workspace, "model", Cost(3.0, 4))
    assert read_cost(session.workspace, "model") == Cost(3.0, 4)


@pytest.mark.parametrize("form", [*TEXTS, "folder"])
def test_a_change_that_cannot_be_read_was_not_begun(session, form):
    put(session.workspace.root / UNFINISHED, form)
    assert unfinished(session.workspace) is None


@pytest.mark.parametrize("form", [*TEXTS, "folder"])
def test_a_lineage_that_cannot_be_read_is_named_with_its_remedy(session, form):
    put(session.workspace.root / LINEAGE, form)
    with pytest.raises(InputError, match=r"lineage\.json'?: cannot be read .*or delete it"):
        with_lineage(session.recipe, session.workspace)
