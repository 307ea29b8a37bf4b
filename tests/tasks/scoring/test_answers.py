"""What a model has answered once it is not asked again, whoever asks."""

import errno
import json
from dataclasses import replace

import pytest
from texts import pico_recipe

from tasks.engine.remembered import FOLDER
from tasks.engine.workspace import Workspace
from tasks.recipes import validate
from tasks.scoring import answers
from tasks.scoring.answers import Answers
from tasks.scoring.task_scores import task_piece
from upcycle_core.evaluation.tasks.items import Item
from upcycle_core.evaluation.tasks.score import TaskScore


class Asked:
    """A workspace with a model and tasks, and who was asked what; every answer is another one."""

    def __init__(self, folder):
        self.recipe = validate(pico_recipe(folder / "texts"))
        self.workspace = Workspace(folder / "pico")
        self.tasks = {}
        self.times = 0
        self.give("model", "weights")
        for name in ("first", "second"):
            self.add(name)

    def give(self, artifact, text):
        staged = self.workspace.stage(artifact)
        (staged / "file").write_text(text)
        self.workspace.publish(staged, artifact, {"inputs": {}, "params": {}, "fingerprint": text})

    def add(self, task, text="rows"):
        self.give(f"task_sets/{task}", text)
        self.tasks[task] = self.workspace.path(f"task_sets/{task}")

    def ask(self, label="task_scores@dume", model=None, **models):
        """Returns the tasks that were asked, the scores and the items."""
        asked = []

        def run(piece):
            self.times += 1
            asked.extend(piece.keys)
            items = [item(task, self.times) for task in piece.keys]
            return {task: score(self.times) for task in piece.keys}, items

        piece = task_piece(self.recipe, [model or self.workspace.path("model")], self.tasks)
        scores, items = Answers(self.workspace, label, **models).of(piece, run)
        assert [item.task for item in items] == list(scores) == list(self.tasks)
        return asked, {task: score.mean for task, score in scores.items()}

    @property
    def files(self):
        return sorted((self.workspace.root / FOLDER / "tasks").rglob("*.json"))


def score(value):
    return TaskScore(metric="acc", higher_is_better=True, values=(float(value),), items=1)


def item(task, value):
    texts = dict.fromkeys(("subtask", "category", "id", "prompt", "target", "response"), "text é")
    return Item(task=task, seed=0, metric="acc", score=float(value), **texts)


@pytest.fixture
def asked(tmp_path):
    return Asked(tmp_path)


def test_a_task_more_is_asked_alone(asked):
    assert asked.ask() == (["first", "second"], {"first": 1, "second": 1})
    asked.add("third")
    assert asked.ask() == (["third"], {"first": 1, "second": 1, "third": 2})
    assert asked.ask() == ([], {"first": 1, "second": 1, "third": 2})


def test_what_decides_the_answers_is_asked_anew(asked):
    asked.ask()
    asked.add("second", "other rows")
    assert asked.ask() == (["second"], {"first": 1, "second": 2})
    config = replace(asked.recipe.task_evaluation, seeds=(7,))
    asked.recipe = replace(asked.recipe, task_evaluation=config)
    assert asked.ask()[0] == ["first", "second"]
    asked.give("model", "other weights")
    assert asked.ask()[0] == ["first", "second"]


def test_a_champion_is_last_night_s_model(asked, tmp_path):
    """It is asked under another name, of a copy that lies elsewhere, after tonight's model."""
    asked.ask()
    champion = {tmp_path / "lent": asked.workspace.digest("model")}
    for night in range(3):
        asked.give("model", f"weights of night {night}")
        asked.ask()
        assert asked.ask("champion", tmp_path / "lent", models=champion)[0] == []
    assert asked.ask("champion", tmp_path / "lent")[0] == ["first", "second"]  # a version of others


def test_no_more_is_kept_than_two_models_have_answered(asked):
    for night in range(4):
        asked.give("model", f"weights of night {night}")
        asked.ask()
    assert len(asked.files) == 4
    asked.give("model", "weights of night 2")
    assert asked.ask()[0] == []
    asked.give("model", "weights of night 1")
    assert asked.ask()[0] == ["first", "second"]


def test_a_damaged_answer_is_none(asked):
    asked.ask()
    for path in asked.files:
        record = json.loads(path.read_text())
        record["score"]["values"] = [0.5]
        path.write_text(json.dumps(record))
    assert asked.ask() == (["first", "second"], {"first": 2, "second": 2})
    assert asked.ask()[0] == []


def test_answers_that_no_disk_holds_are_given_and_all_forgotten(asked, monkeypatch):
    """The finished piece has all of them: asked for some alone it would run again."""
    written, count = answers.write_atomically, []

    def full(path, text):
        count.append(path)
        if len(count) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(path, text)

    monkeypatch.setattr(answers, "write_atomically", full)
    assert asked.ask() == (["first", "second"], {"first": 1, "second": 1})
    assert asked.ask() == (["first", "second"], {"first": 2, "second": 2})
    assert asked.ask()[0] == []
