"""One model on every task: what is scored is not scored again after a kill."""

import pytest

from tasks.scoring.task_scores import ITEMS, SCORES, read_scores, score_model
from tests.pico import save_pico
from tests.upcycle_core.evaluation.tasks.made import ROWS, save_task, write
from upcycle_core.evaluation.tasks.adapter import evaluate_tasks
from upcycle_core.evaluation.tasks.config import TaskEvaluationConfig
from upcycle_core.progress import Silent

TASKS = ("first", "second", "third")


class Watching(Silent):
    """Progress that keeps what began, and ends when ``until`` does."""

    def __init__(self, until=""):
        self.began, self._until = [], until

    def start(self, what, total, unit="steps"):
        self.began.append(what.removeprefix("answering "))
        if self.began[-1] == self._until:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Two models whose average is asked, and three tasks of different rows."""
    root = tmp_path_factory.mktemp("asked")
    return {
        "models": [save_pico(root / name, seed=n) for n, name in enumerate("ab")],
        "task_sets": {
            name: write(root / "sets" / name, definition=save_task(root / name, ROWS[n:]))
            for n, name in enumerate(TASKS)
        },
        "config": TaskEvaluationConfig(batch_size=2),
        "bos": "auto",
        "device": "cpu",
    }


def files(folder):
    return {name: (folder / name).read_bytes() for name in (SCORES, ITEMS)}


def test_a_kill_costs_the_task_at_work(arguments, tmp_path):
    score_model(out=tmp_path / "undisturbed", progress=Silent(), **arguments)
    folder = tmp_path / "pieces"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        score_model(out=folder / "killed.partial", progress=Watching("second"), **arguments)
    (folder / "killed.partial").rmdir()  # as before a piece begins again; nothing is left in it
    again = Watching()
    score_model(out=folder / "killed.partial", progress=again, **arguments)
    assert again.began == ["second", "third"]
    assert files(folder / "killed.partial") == files(tmp_path / "undisturbed")
    assert [path.name for path in folder.iterdir()] == ["killed.partial"]


def test_scores_are_those_of_all_tasks_at_once(arguments, tmp_path):
    one = {**arguments, "models": arguments["models"][:1]}
    score_model(out=tmp_path / "out", progress=Silent(), **one)
    how = {key: arguments[key] for key in ("config", "bos", "device")}
    scores, items = evaluate_tasks(one["models"][0], arguments["task_sets"], **how)
    assert read_scores(tmp_path / "out") == (scores, items)
    assert list(scores) == list(TASKS)
    assert not (tmp_path / "out.tasks").exists()
