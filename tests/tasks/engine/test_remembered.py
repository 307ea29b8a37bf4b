"""A stage that measures one thing more computes that alone, on a real Ray."""

import csv
import json
import os
import sys
from dataclasses import replace
from statistics import fmean

import pytest
from texts import pico_recipe, write_texts

from benchmarks.report import Reported
from infra.cluster.compute import cluster
from infra.settings import read
from tasks.engine.remembered import FOLDER
from tasks.engine.sources import CODE
from tasks.engine.stage import Session, Stage
from tasks.engine.workspace import Workspace
from tasks.recipes import validate
from upcycle_core.corpora.config import CorpusConfig
from upcycle_core.evaluation.text.config import SAMPLED
from upcycle_core.evaluation.text.report import UNSCORED


@pytest.fixture(scope="module", autouse=True)
def ray(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:  # workers import this file's pieces
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with cluster(read(os.environ), 1, CODE, workspace=tmp_path_factory.getbasetemp()):
            yield


class Sweep:
    """A stage of one piece a value; each piece writes down that it was called."""

    def __init__(self, folder):
        write_texts(folder / "texts")
        self.recipe = validate(pico_recipe(folder / "texts"))
        self.workspace = Workspace(folder / "home" / "pico")
        self.calls = folder / "calls"
        self.calls.touch()
        self.values = [1, 2]
        self.lines = []
        self.give("one")

    def give(self, text):
        staged = self.workspace.stage("input")
        (staged / "text").write_text(text)
        self.workspace.publish(staged, "input", {"inputs": {}, "params": {}, "fingerprint": text})

    def run(self, **arguments):
        """Ensure the stage; returns the values that were computed, and all results."""
        from infra.cluster.pieces import Piece

        def measure(run):
            pieces = [
                Piece(
                    name=f"value-{value}",
                    function=counted,
                    arguments={
                        "text": run.path("input"),
                        "config": CorpusConfig(),
                        "value": value,
                        "calls": str(self.calls),
                        **arguments,
                    },
                )
                for value in self.values
            ]
            done = run.run(pieces, "evaluation")
            results = {name: piece.result for name, piece in done.items()}
            (run.out / "results").write_text(str(results))

        stage = Stage(
            measure,
            "measured",
            inputs=lambda recipe, item: ["input"],
            params=("seed",),
        )
        self.calls.write_text("")
        self.recipe = replace(self.recipe, seed=self.recipe.seed + 1)
        self.lines.clear()
        stage.ensure(Session(self.recipe, self.workspace, log=self.lines.append))
        results = (self.workspace.path("measured") / "results").read_text()
        return self.calls.read_text().split(), results


def counted(*, out, progress, text, config, value, calls, leaves=False, **more):
    with open(calls, "a") as file:
        file.write(f"{value}\n")
    if leaves:
        out.write_text("a file")
    return f"{(text / 'text').read_text()} {value}"


@pytest.fixture
def sweep(tmp_path):
    return Sweep(tmp_path)


@pytest.mark.faults
def test_one_value_more_is_computed_alone(sweep):
    assert sorted(sweep.run()[0]) == ["1", "2"]
    assert sweep.run() == ([], str({"value-1": "one 1", "value-2": "one 2"}))
    sweep.values.append(3)
    computed, results = sweep.run()
    assert computed == ["3"]
    assert results == str({f"value-{n}": f"one {n}" for n in (1, 2, 3)})
    assert "measured: 2 of 3 pieces are as they were, and are not computed again" in sweep.lines


def test_another_input_or_argument_is_computed_anew(sweep):
    sweep.run()
    sweep.give("two")
    computed, results = sweep.run()
    assert sorted(computed) == ["1", "2"]
    assert results == str({"value-1": "two 1", "value-2": "two 2"})
    assert sorted(sweep.run(config=CorpusConfig(min_characters=3))[0]) == ["1", "2"]
    assert sorted(sweep.run(more=1)[0]) == ["1", "2"]


def test_pieces_that_leave_files_and_unreadable_memories_are_computed_anew(sweep):
    sweep.run(leaves=True)
    assert sorted(sweep.run(leaves=True)[0]) == ["1", "2"]
    sweep.run()
    for damage in ("", "[]", "{"):
        (sweep.workspace.root / FOLDER / "measured.json").write_text(damage)
        assert sorted(sweep.run()[0]) == ["1", "2"]


def scored(*, out, progress, texts, calls, model):
    with open(calls, "a") as file:
        file.writelines(f"{name}\n" for name in texts)
    return {name: f"{model} {(path / 'text').read_text()}" for name, path in texts.items()}


def test_a_text_more_is_scored_alone_by_whatever_stage(sweep):
    """Of a piece with ``each``, results are known by key, wherever in the workspace they arose."""
    from infra.cluster.pieces import Piece

    sweep.calls.write_text("")
    for name in ("a", "b", "c"):
        staged = sweep.workspace.stage(f"texts/{name}")
        (staged / "text").write_text(name)
        sweep.workspace.publish(staged, f"texts/{name}", {"inputs": {}})

    def stage(label, names, model="m"):
        """What was scored, and the result."""

        def measure(run):
            texts = {name: run.path(f"texts/{name}") for name in names}
            arguments = {"texts": texts, "calls": str(sweep.calls), "model": model}
            piece = Piece(name="row", function=scored, arguments=arguments, each=("texts",))
            (run.out / "results").write_text(str(run.run([piece], "evaluation")["row"].result))

        sweep.calls.write_text("")
        sweep.recipe = replace(sweep.recipe, seed=sweep.recipe.seed + 1)
        made = Stage(measure, label, lambda r, i: [f"texts/{n}" for n in names], params=("seed",))
        made.ensure(Session(sweep.recipe, sweep.workspace, log=sweep.lines.append))
        return sweep.calls.read_text().split(), (
            sweep.workspace.path(label) / "results"
        ).read_text()

    assert stage("first", "ab") == (["a", "b"], str({"a": "m a", "b": "m b"}))
    assert stage("first", "abc") == (["c"], str({n: f"m {n}" for n in "abc"}))
    assert "first: 2 of 3 scores are known" in sweep.lines
    assert stage("second", "ca") == ([], str({"c": "m c", "a": "m a"}))
    assert stage("first", "ab", model="n")[0] == ["a", "b"]


def test_a_report_of_many_domains_scores_what_is_asked_later_alone(tmp_path):
    """Experts' scores text by text, the MoE's draw by draw."""
    count = 9
    many = Reported(tmp_path / "many", count, 128)
    rows = 4  # the average, the oracle, the MoE and one draw, on every text
    assert many.run()["passes"] == count * (1 + SAMPLED) + rows * count
    folder = many.workspace.path("report")
    first = json.loads((folder / "metrics.json").read_text())
    assert {len(first["normalised"][f"expert_{name}"]) for name in many.names} == {1 + SAMPLED}
    assert "expert_d00" not in first["normalised_average"]
    assert first["heldout"].keys() == first["normalised"]["dume"].keys() == {*many.names}
    assert UNSCORED.strip() in (folder / "report.html").read_text()

    many.values["evaluation"] |= {"cross_scores": "all", "random_routing_seeds": [0, 1]}
    assert many.run()["passes"] == count * (count - 1 - SAMPLED) + count
    metrics = json.loads((folder / "metrics.json").read_text())
    own = metrics["normalised"]["expert_d00"]
    assert list(own) == many.names
    assert metrics["normalised_average"]["expert_d00"] == pytest.approx(fmean(own.values()))
    for row in ("model_averaging", "oracle", "dume"):
        assert metrics["perplexity"][row] == first["perplexity"][row]
    assert metrics["deviation"].keys() == {"random_routing"}
    with (folder / "table.csv").open() as lines:
        assert all(all(line.values()) for line in csv.DictReader(lines))

    many.values["evaluation"] |= {"rows": [], "cross_scores": "own"}
    many.make_expert("d00", seed=50)
    many.join()
    assert many.run()["passes"] == 1 + count
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["normalised_average"].keys() == {"dume"}
    assert metrics["normalised"]["expert_d01"].keys() == {"d01"}
    assert metrics["deviation"] == {}
    assert "router gap" not in (folder / "report.html").read_text()
