"""Where pieces compute: on what the recipe reserves for their kind."""

import ast
import importlib
import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest

from infra.cluster.pieces import Done
from infra.recipe.resources import Resources
from infra.tracking.records import Version
from tasks.baselines.baselines import baselines
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.stage_run import StageRun
from tasks.engine.workspace import Workspace
from tasks.methods import stages_of
from tasks.recipes import load_recipe
from tasks.release.champion import Champion
from tasks.release.versions import MODEL_TAG
from upcycle_core.corpora.shards import write_split
from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.score import TaskScore
from upcycle_core.progress import Silent

KINDS = ("seed", "experts", "statistics", "alignment", "post_training", "evaluation", "baselines")
"""Kinds of work that a GPU does."""
DUME = ("demo", "baselines", "compression", "tasks")
SYMPHONY = ("symphony",)
SIMOE = ("simoe", "simoe-rivals")


def name_of(file):
    return ".".join(file.relative_to(CODE).with_suffix("").parts)


@pytest.fixture(autouse=True)
def layers(monkeypatch):
    """Two groups of layers, without a checkpoint to count them in."""
    for module in ("tasks.symphony.harmonise", "tasks.symphony.pairs"):
        monkeypatch.setattr(f"{module}.groups_of", lambda model, config: [(0, 1), (2, 3)])


class Enough(Exception):
    """The stage has handed over the pieces that were asked for."""


class Watched(StageRun):
    """Runs nothing: keeps what the stage hands over, until the ``wanted``-th call."""

    def __init__(self, *args, wanted, **kwargs):
        super().__init__(*args, **kwargs)
        self.wanted, self.calls = wanted, []

    def run(self, pieces, kind, *, uses_gpu=True):
        self.calls.append((pieces, kind, uses_gpu))
        if len(self.calls) == self.wanted:
            raise Enough
        score = {name: {"tokens": 1, "bytes": 1} for name in self.recipe.domains}
        return {piece.name: Done(self.out, score, 0.0, 0.0, 0) for piece in pieces}


def recipe_on_gpus(files, *more, gpus=1):
    first, *added = (CODE / "recipes" / f"{name}.yaml" for name in files)
    changes = [f"compute.{kind}.gpus={gpus}" for kind in KINDS] + [*more]
    if files == SYMPHONY:
        changes.append("similarity={}")
    return load_recipe(first, changes, added=added)


def handed_over(tmp_path, files, name, item, *, calls=1, gpus=1, more=()):
    """The pieces of a stage's ``calls``-th call, their kind, and whether they are given a GPU."""
    recipe = recipe_on_gpus(files, *more, gpus=gpus)
    session = Session(recipe, Workspace(tmp_path / recipe.name), log=lambda text: None)
    report = session.workspace.path("report")
    report.mkdir(parents=True)
    (report / "metrics.json").write_text(json.dumps({"perplexity": {}}))
    for domain in recipe.domains:
        for split in ("train", "calibration", "heldout", "elsewhere"):
            corpus = session.workspace.path(f"corpora/{domain}/{split}")
            write_split(corpus, [([1, 2], 2)], eos_id=0, vocabulary_size=9)
    train = session.workspace.path("instructions/train")
    train.mkdir(parents=True)
    for label in ("law", "tax"):
        (train / f"{label}.jsonl").touch()
    for split in ("seen", "unseen"):
        (train.parent / f"{split}.jsonl").write_text("{}\n")
    out = tmp_path / "out"
    out.mkdir()
    stage = next(stage for stage in stages_of(recipe) if stage.name == name)
    run = Watched(session, stage, item, out=out, mark="m", recorder=None, wanted=calls)
    with pytest.raises(Enough):
        stage.function(run)
    return run.calls[-1]


@pytest.mark.parametrize(
    ("files", "name", "item", "calls"),
    [
        (DUME, "seed", "", 1),
        (DUME, "experts", "python", 1),
        (DUME, "statistics", "python", 1),
        (DUME, "report", "", 1),
        (DUME, "comparison", "", 1),
        (DUME, "sweeps", "dume", 1),
        (DUME, "task_scores", "dume", 1),
        (DUME, "baselines", "full-finetune", 2),
        (SYMPHONY, "experts", "python", 1),
        (SYMPHONY, "pairs", "symphony", 1),
        (SYMPHONY, "similarity", "", 1),
        (SYMPHONY, "report", "", 1),
        (SYMPHONY, "report", "", 2),  # each dense model with its own tokenizer
        (SIMOE, "answers", "simoe", 1),
        (SIMOE, "model", "", 1),
        (SIMOE, "baselines", "full-finetune", 2),
    ],
)
def test_pieces_compute_on_the_device_that_is_reserved(tmp_path, files, name, item, calls):
    pieces, kind, uses_gpu = handed_over(tmp_path, files, name, item, calls=calls)
    assert pieces
    assert kind in (*KINDS, "task_evaluation")
    assert uses_gpu
    assert {piece.name: piece.arguments.get("device") for piece in pieces} == {
        piece.name: "cuda" for piece in pieces
    }


@pytest.mark.parametrize("name", ["task_scores", "task_routing"])
def test_several_gpus_hold_a_model_that_is_scored_on_tasks(tmp_path, monkeypatch, name):
    item = "dume" if name == "task_scores" else ""
    more = ("compute.task_evaluation={gpus: 2}", "task_evaluation.routing=[oracle]")
    pieces, kind, uses_gpu = handed_over(tmp_path, DUME, name, item, more=more)
    assert (kind, uses_gpu) == ("task_evaluation", True)
    assert [piece.arguments["device"] for piece in pieces] == ["auto"]
    compute = recipe_on_gpus(DUME, *more).compute
    assert (compute.of(kind).gpus, compute.of("evaluation").gpus) == (2, 1)
    assert replace(compute, task_evaluation=None).of(kind) == compute.evaluation


@pytest.mark.parametrize(
    ("gpus", "size", "pieces"),
    [
        (
            0,
            2,
            ["moe_ridge_lambda", "moe_top_k", "moe_window", "moe_random_routing", "moe_routers"],
        ),
        (0, 3, ["moe"]),
        (1, 2, ["moe"]),
    ],
)
def test_a_small_moe_is_scored_side_by_side_on_cpus(tmp_path, monkeypatch, gpus, size, pieces):
    """Else it is loaded once for all kinds of routers."""
    monkeypatch.setattr("tasks.dume.variants.LOADED_AGAIN_BYTES", 2)
    model = tmp_path / "demo" / "model" / "model.safetensors"
    model.parent.mkdir(parents=True)
    model.write_bytes(bytes(size))
    found, _, _ = handed_over(tmp_path, DUME, "report", "", gpus=gpus)
    found = [piece for piece in found if piece.name.startswith("moe")]
    assert [piece.name for piece in found] == pieces
    scored = [name for piece in found for name in piece.keys]
    drawn = {f"random_routing-{seed}" for seed in (0, 1, 2)}
    assert len(scored) == len(set(scored)) == 2 * (1 + 4 + 3 + 3) + len(drawn)
    assert {"dume", "dume_ood", "dume-top_k-4", "dume_ood-window-16"} | drawn < set(scored)


@pytest.mark.parametrize(
    ("files", "name", "item"),
    [
        (DUME, "baselines", "btx"),
        (SIMOE, "baselines", "sparse-upcycling"),
        (SYMPHONY, "starts", "symphony"),
    ],
)
def test_pieces_that_know_no_device_are_given_no_gpu(tmp_path, files, name, item):
    """Else assignments, one a layer, would stand in line for the only GPU and not use it."""
    pieces, kind, uses_gpu = handed_over(tmp_path, files, name, item)
    assert kind in KINDS
    assert not uses_gpu
    assert not any("device" in inspect.signature(piece.function).parameters for piece in pieces)


def test_states_are_read_on_a_gpu_and_the_head_that_is_fitted_to_them_needs_none(tmp_path):
    for calls, uses in ((1, True), (2, False)):
        (tmp_path / str(calls)).mkdir()
        pieces, kind, uses_gpu = handed_over(
            tmp_path / str(calls), DUME, "backbone", "", calls=calls
        )
        assert (kind, uses_gpu) == ("statistics", uses)
    assert pieces[0].arguments["merge"].head == "fitted"


@pytest.mark.parametrize(
    ("files", "name", "item"),
    [
        (DUME, "documents", "python"),
        (DUME, "corpora", "python"),
        (DUME, "tokenizer", ""),
        (DUME, "statistics", "python"),
        (DUME, "baselines", "btx"),
        (SYMPHONY, "pairs", "symphony"),
        (SIMOE, "instructions", ""),
    ],
)
def test_a_function_takes_what_the_stage_hands_over(tmp_path, files, name, item):
    pieces, _, _ = handed_over(tmp_path, files, name, item)
    for piece in pieces:
        inspect.signature(piece.function).bind(out=tmp_path, progress=Silent(), **piece.arguments)


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_a_gpu_is_reserved_for_pieces_that_use_it(tmp_path, monkeypatch, uses_gpu):
    recipe = recipe_on_gpus(DUME, "compute.baselines.accelerator=H100")
    session = Session(recipe, Workspace(tmp_path / recipe.name), log=lambda text: None)
    run = StageRun(session, baselines, "btx", out=tmp_path, mark="m", recorder=None)
    reserved = []

    def run_pieces(pieces, *, resources, **_):
        reserved.append(resources)
        return {}

    monkeypatch.setattr("tasks.engine.stage_run.run_pieces", run_pieces)
    run.run([], "baselines", uses_gpu=uses_gpu)
    asked = recipe.compute.baselines
    assert asked.accelerator == "H100"
    assert reserved == [asked if uses_gpu else replace(asked, gpus=0.0, accelerator=None)]


def champion_of(tmp_path, files, monkeypatch, *more):
    """A champion of another run, and the list that its pieces and resources go to."""
    recipe = recipe_on_gpus(files, *more)
    session = Session(recipe, Workspace(tmp_path / recipe.name), log=lambda text: None)
    handed = []

    def run_pieces(pieces, *, resources, watch, **_):
        watch()
        handed.extend((piece, resources) for piece in pieces)
        scores = dict.fromkeys(recipe.domains, 1.0)
        return {piece.name: Done(tmp_path, scores, 0.0, 0.0, 0) for piece in pieces}

    monkeypatch.setattr("tasks.release.champion.run_pieces", run_pieces)
    score = TaskScore(metric="acc", higher_is_better=True, values=(1.0,), items=0)
    answers = dict.fromkeys(recipe.tasks, score), []
    monkeypatch.setattr("tasks.release.champion.read_scores", lambda path: answers)
    version = Version("m", 1, "run", "model", "", aliases=(), tags={}, params={}, metrics={})
    return Champion(session, None, version, tmp_path), handed


@pytest.mark.parametrize(
    ("judge", "more", "gpus", "device"),
    [
        ("perplexities", (), 1, "cuda"),
        ("tasks", (), 1, "cuda"),
        ("perplexities", ("compute.task_evaluation={gpus: 2}",), 1, "cuda"),
        ("tasks", ("compute.task_evaluation={gpus: 2}",), 2, "auto"),
    ],
)
def test_the_champion_is_judged_on_the_device_that_is_reserved(
    tmp_path, monkeypatch, judge, more, gpus, device
):
    champion, handed = champion_of(tmp_path, DUME, monkeypatch, *more)
    heldout = {d: {"tokens": 1, "bytes": 1} for d in champion.session.recipe.domains}
    champion.perplexities(heldout) if judge == "perplexities" else champion.tasks()
    [(piece, resources)] = handed
    assert resources.gpus == gpus
    assert piece.arguments["device"] == device


@pytest.mark.parametrize("judge", ["perplexities", "tasks"])
def test_the_champion_is_judged_no_longer_than_a_flow_may_work(tmp_path, monkeypatch, judge):
    champion, handed = champion_of(tmp_path, DUME, monkeypatch)
    compute = replace(champion.session.recipe.compute, limit_hours=1.0)
    champion.session.recipe = replace(champion.session.recipe, compute=compute)
    champion.session.began -= 3601
    heldout = {d: {"tokens": 1, "bytes": 1} for d in champion.session.recipe.domains}
    with pytest.raises(InputError, match=r"limit_hours = 1\.0: the flow has worked for longer"):
        champion.perplexities(heldout) if judge == "perplexities" else champion.tasks()
    assert not handed


def test_what_only_the_report_scores_judges_no_champion_again(tmp_path, monkeypatch):
    champion, handed = champion_of(tmp_path, DUME, monkeypatch)
    version = replace(champion.version, tags={MODEL_TAG: "what it is"})
    champion = replace(champion, version=version)
    session = champion.session
    kinds = ("documents", "corpora")
    for name in ["tokenizer", *(f"{kind}/{d}" for kind in kinds for d in session.recipe.domains)]:
        staged = session.workspace.stage(name)
        (staged / "heldout").write_text(name)
        session.workspace.publish(staged, name, {})
    heldout = {d: {"tokens": 1, "bytes": 1} for d in champion.session.recipe.domains}
    first = champion.perplexities(heldout)
    evaluation = replace(champion.session.recipe.evaluation, rows=(), sweep_top_k=(2,))
    champion.session.recipe = replace(champion.session.recipe, evaluation=evaluation)
    assert champion.perplexities(heldout) == first
    assert len(handed) == 1


def test_without_a_gpu_pieces_compute_on_the_cpu():
    assert Resources().device == "cpu"
    assert Resources(gpus=0.5).device == "cuda"


@pytest.mark.parametrize("file", sorted(Path(CODE / "tasks").rglob("*.py")), ids=name_of)
def test_no_call_leaves_the_device_to_a_default(file):
    """A library function that can be told where to compute is told: its default is the CPU."""
    module = importlib.import_module(name_of(file))
    for node in ast.walk(ast.parse(file.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        function = getattr(module, node.func.id, None)
        if inspect.isfunction(function) and "device" in inspect.signature(function).parameters:
            given = {keyword.arg for keyword in node.keywords}
            assert given & {"device", None}, f"{file.name}:{node.lineno} {node.func.id}"
