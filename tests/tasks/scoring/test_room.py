"""Pieces hold their model or go layer by layer, as the recipe and the memory say."""

from dataclasses import replace

import numpy as np
import pytest

from infra.cluster import memory
from infra.cluster.calls import made_there
from infra.cluster.memory import Room
from infra.cluster.pieces import Piece, remove
from infra.recipe.resources import ComputeConfig, PassResources
from tasks.dume.report import report
from tasks.dume.statistics import statistics, statistics_piece
from tasks.engine.stage_run import Session, StageRun
from tasks.engine.workspace import Workspace
from tasks.planning.machine import Machine
from tasks.planning.row import Planned
from tasks.recipes import validate
from tasks.scoring.evaluation import average_piece, dense_piece, oracle_piece
from tasks.scoring.room import room_of, scoring_folder
from tests.pico import save_pico
from tests.texts import pico_recipe
from upcycle_core.activations.walk import Walk
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.progress import Silent


def room(streamed="auto", **more):
    return Room(**{"streamed": streamed, "cpus": 2, "gpus": 0.0, "machine_cpus": 4, **more})


class Names(Silent):
    """Progress that keeps what began."""

    def __init__(self):
        self.began = []

    def start(self, what, total, unit="steps"):
        self.began.append(what)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Two experts, their backbone, and a text."""
    root = tmp_path_factory.mktemp("parts")
    experts = {name: save_pico(root / name, seed=n) for n, name in enumerate("ab")}
    readers = [CheckpointReader(path) for path in experts.values()]
    write_backbone(readers, root / "backbone", max_shard_bytes=10**9)
    generator = np.random.default_rng(0)
    texts = [(generator.integers(2, 96, n), n) for n in (30, 9, 17, 24)]
    write_split(root / "text", texts, eos_id=0, vocabulary_size=96)
    return root


def test_a_piece_may_use_its_share_of_the_memory(monkeypatch):
    monkeypatch.setattr(memory, "machine_memory", lambda device: 1000)
    monkeypatch.setattr(memory, "held_bytes", lambda: 100)
    assert room().holds(lambda: 400, "cpu")
    assert not room().holds(lambda: 401, "cpu")
    assert room(cpus=4).holds(lambda: 900, "cpu")
    assert room(memory=1000).holds(lambda: 900, "cpu")  # nothing beside it
    assert not room(memory=400).holds(lambda: 401, "cpu")
    assert room(cpus=1, pieces=2).holds(lambda: 400, "cpu")  # of 4 places 2 are free
    assert not room(cpus=1, pieces=3).holds(lambda: 400, "cpu")
    assert not room(pieces=9).holds(lambda: 401, "cpu")
    assert not room(gpus=0.5).holds(lambda: 461, "cuda")  # of 920: the rest is CUDA's own
    assert room(gpus=2.0).holds(lambda: 920, "cuda")


@pytest.mark.parametrize("cpus", [1, 3])
@pytest.mark.parametrize("reserved", [None, 300])
@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_a_plan_says_of_a_piece_what_it_does(cpus, reserved, pieces, monkeypatch):
    monkeypatch.setattr(memory, "machine_memory", lambda device: 1000)
    monkeypatch.setattr(memory, "held_bytes", lambda: 100)
    machine, own = Machine(memory=1000, cpus=8, disk=1), {"cpus": cpus, "memory": reserved}
    place, held = room(machine_cpus=8, pieces=pieces, **own), []
    for needed in range(20, 1000, 20):
        row = Planned("report", 1, pieces, memory=needed, streamed=1)
        row = replace(row, resources=PassResources(**own)).fitted(machine, 100)
        assert (row.memory == needed) == place.holds(lambda size=needed: size, "cpu")
        held.append(row.memory == needed)
    assert len(set(held)) == 2


def test_pieces_of_a_stage_know_how_many_they_are(tmp_path, monkeypatch):
    recipe = validate(pico_recipe(tmp_path))
    session = Session(recipe, Workspace(tmp_path / "home"), log=lambda text: None)
    seen = []

    def run_pieces(pieces, **how):
        seen.extend(piece.arguments["room"].pieces for piece in pieces)
        raise InterruptedError

    monkeypatch.setattr("tasks.engine.stage_run.run_pieces", run_pieces)
    for stage, item in ((statistics, "letters"), (report, "")):
        run = StageRun(session, stage, item, out=tmp_path, mark="m", recorder=None)
        pieces = [Piece.of(name, statistics_piece, room=room()) for name in "ab"]
        with pytest.raises(InterruptedError):
            run.run(pieces, "evaluation")
    assert seen == [6, 6, 2, 2]  # three domains side by side, one report


def test_a_cluster_s_machines_have_cores_of_their_own():
    compute = ComputeConfig(cpus=2, evaluation=PassResources(cpus=2))
    assert room_of(compute, "evaluation").machine_cpus == 2
    with made_there():
        assert room_of(compute, "evaluation").machine_cpus is None


def test_the_word_decides_without_a_look():
    def never() -> int:
        raise AssertionError

    assert not room("always").holds(never, "cpu")
    assert room("never").holds(never, "cpu")


@pytest.mark.parametrize(("streamed", "held"), [("always", False), ("never", True), ("auto", True)])
def test_pieces_give_the_same_whichever_way(streamed, held, parts, tmp_path):
    names, config = Names(), EvaluationConfig(sequence_length=16, batch_size=2)
    common = {"corpora": {"a": parts / "text"}, "config": config, "device": "cpu"}
    common |= {"out": tmp_path / "piece.partial", "progress": names}
    expected = dense_piece(model=parts / "a", **common)
    found = dense_piece(model=parts / "a", room=room(streamed), **common)
    assert found == expected
    assert ("layer by layer" not in names.began[-1]) == held
    models = {"backbone": parts / "backbone", "experts": {"a": parts / "a"}}
    oracle = oracle_piece(**models, **common)
    assert oracle_piece(**models, room=room(streamed), **common) == oracle
    assert not list(tmp_path.iterdir())


def test_what_a_killed_piece_left_lies_beside_its_own_files(parts, tmp_path):
    config = StatisticsConfig(sequence_length=16, batch_size=2, shards=1)

    class Killed(Names):
        def advance(self, amount=1, **shown):
            raise KeyboardInterrupt

    out = tmp_path / "law-0.partial"
    arguments = {"backbone": parts / "backbone", "expert": parts / "a", "corpus": parts / "text"}
    arguments |= {"config": config, "device": "cpu", "shard": 0, "room": room("always")}
    with pytest.raises(KeyboardInterrupt):
        statistics_piece(out=out, progress=Killed(), **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["law-0.partial.layers"]
    statistics_piece(out=out, progress=Names(), **arguments)
    assert list(tmp_path.iterdir()) == [out]


def killed_at(monkeypatch, *layers):
    """Kill the walk that has passed these layers, once; the layers that any walk passes."""
    through, passed, moments = Walk._through, [], [[*layers]]

    def killed(walk, index, visit):
        passed.append(index)
        if passed in moments:
            moments.clear()
            raise KeyboardInterrupt
        return through(walk, index, visit)

    monkeypatch.setattr(Walk, "_through", killed)
    return passed


def test_a_killed_oracle_goes_on_at_its_layer_of_a_later_domain(parts, tmp_path, monkeypatch):
    passed = killed_at(monkeypatch, 0, 1, 0, 1)  # the second domain's last layer
    arguments = {
        "out": tmp_path / "oracle.partial",
        "progress": Names(),
        "backbone": parts / "backbone",
        "experts": {name: parts / name for name in "ab"},
        "corpora": dict.fromkeys("ab", parts / "text"),
        "config": EvaluationConfig(sequence_length=16, batch_size=2),
        "device": "cpu",
        "room": room("always"),
    }
    with pytest.raises(KeyboardInterrupt):
        oracle_piece(**arguments)
    del passed[:]
    found = oracle_piece(**arguments)
    assert passed == [0, 1, 1]
    assert found == oracle_piece(**{**arguments, "room": None})
    assert not list(tmp_path.iterdir())


def test_a_killed_average_goes_on_at_its_layer(parts, tmp_path, monkeypatch):
    passed = killed_at(monkeypatch, 0, 1)  # the last layer
    arguments = {
        "out": tmp_path / "model_averaging.partial",
        "progress": Names(),
        "experts": [parts / name for name in "ab"],
        "corpora": {"a": parts / "text"},
        "config": EvaluationConfig(sequence_length=16, batch_size=2),
        "device": "cpu",
        "room": room("always"),
    }
    with pytest.raises(KeyboardInterrupt):
        average_piece(**arguments)
    remove(arguments["out"])  # as before a piece begins again
    del passed[:]
    found = average_piece(**arguments)
    assert passed == [1]
    assert found == average_piece(**{**arguments, "room": None})
    assert not list(tmp_path.iterdir())


def test_models_of_unknown_kinds_are_held(parts, tmp_path):
    how = {"config": EvaluationConfig(), "device": "cpu"}
    strange = save_pico(tmp_path / "strange")
    config = strange / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"simoe"'))
    assert scoring_folder(room("always"), tmp_path / "out", strange, **how) is None
    assert scoring_folder(room("always"), tmp_path / "out", parts / "a", **how) is not None
