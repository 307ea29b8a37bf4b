"""What models answered on tasks: nobody is asked the same again.

A stage is run again when one of its tasks is new, and a champion that stands beside tonight's model
was itself tonight's model once. Answers lie in ``.results/tasks/`` beside the artifacts, a file for
each model and task, and are no more than a memory: without them the model is asked again.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from infra.cluster.pieces import Piece
from infra.durable import is_whole, read_json, sealed, write_atomically
from tasks.engine.remembered import FOLDER, Remembered
from tasks.engine.workspace import Workspace
from upcycle_core.evaluation.tasks.items import Item
from upcycle_core.evaluation.tasks.score import TaskScore

Answered = tuple[dict[str, TaskScore], list[Item]]
"""{task: score} of one model, and its items of all these tasks."""


class Answers:
    """What is remembered for whoever is asked under one label.

    Of a label, the answers to this call and as many earlier ones stay: a champion is last night's
    model, and asked after tonight's.

    Args:
        workspace: Where it is asked.
        label: The stage's, with its item, or another name.
        models: Digests of models that lie outside the workspace's artifacts, by their place.
    """

    def __init__(
        self, workspace: Workspace, label: str, *, models: Mapping[Path, str] | None = None
    ) -> None:
        self._remembered = Remembered(workspace, label, models=models)
        self._all = workspace.root / FOLDER / "tasks"
        self._own = self._all / label

    def of(self, piece: Piece, ask: Callable[[Piece], Answered]) -> Answered:
        """Every task's score, and all items, in the order of the piece's ``task_sets``.

        Args:
            piece: Asks one model all tasks, with ``each`` of ``task_sets``.
            ask: Runs it for those tasks whose answers are not known, where there are any.
        """
        marks = {task: self._remembered.mark(piece.only([task])) for task in piece.keys}
        known = {task: self._read(mark) for task, mark in marks.items()}
        left = [task for task, answered in known.items() if answered is None]
        asked = ask(piece.only(left)) if left else ({}, [])
        answers = {task: known[task] or _one(task, *asked) for task in marks}
        new = [mark for task in left if (mark := marks[task]) is not None]
        try:
            for task, mark in marks.items():
                if mark is not None:
                    self._keep(mark, *answers[task], anew=mark in new)
            self._forget(2 * len(marks))
        except OSError:  # a full disk. Of some of them a finished piece would be no answer.
            for mark in new:
                self._path(mark).unlink(missing_ok=True)
        scores = {task: score for task, (score, _) in answers.items()}
        return scores, [item for _, items in answers.values() for item in items]

    def _read(self, mark: str | None) -> tuple[TaskScore, list[Item]] | None:
        for path in self._all.glob(f"*/{mark}.json"):
            record = read_json(path)
            if is_whole(record):
                items = [Item(**item) for item in record["items"]]
                return TaskScore.from_dict(record["score"]), items
        return None

    def _keep(self, mark: str, score: TaskScore, items: Sequence[Item], *, anew: bool) -> None:
        path = self._path(mark)
        if path.exists() and not anew:
            os.utime(path)
            return
        self._own.mkdir(parents=True, exist_ok=True)
        record = {"score": score.to_dict(), "items": [asdict(item) for item in items]}
        write_atomically(path, json.dumps(sealed(record)))

    def _path(self, mark: str) -> Path:
        return self._own / f"{mark}.json"

    def _forget(self, count: int) -> None:
        """Remove all answers of this label but the ``count`` that were asked for last."""
        kept = sorted(self._own.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-count]:
            path.unlink(missing_ok=True)


def _one(
    task: str, scores: Mapping[str, TaskScore], items: Sequence[Item]
) -> tuple[TaskScore, list[Item]]:
    """One task of several."""
    return scores[task], [item for item in items if item.task == task]
