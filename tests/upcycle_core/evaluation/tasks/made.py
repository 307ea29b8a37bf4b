"""Tasks written for a test, and a model that says what the test wants."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from upcycle_core.evaluation.tasks.config import CodeConfig, EvaluationTask
from upcycle_core.evaluation.tasks.definitions import write_task
from upcycle_core.evaluation.tasks.tasks import HarnessTask

ROWS = [
    {
        "id": f"sum-{n}",
        "prompt": f"{n}+{n}=",
        "answer": str(2 * n),
        "topic": ["even", "odd"][n % 2],
    }
    for n in range(6)
]
WRITING = {
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOOSING = {
    "output_type": "multiple_choice",
    "doc_to_text": "prompt",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [
        {"metric": metric, "aggregation": "mean", "higher_is_better": True}
        for metric in ("acc", "acc_norm")
    ],
}
ALLOWED = CodeConfig(allow=True, seconds=5)


def save_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def local(*files: Path | str) -> dict[str, Any]:
    """What a definition says about local data."""
    data = {"data_files": {"test": [str(file) for file in files]}}
    return {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}


def save_yaml(path: Path, values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def save_task(folder: Path, rows: Sequence[Mapping[str, Any]] = ROWS, **keys: Any) -> str:
    """A definition with its data; returns its path as a recipe says it."""
    data = save_rows(folder / "source" / "rows.jsonl", rows)
    return str(save_yaml(folder / "source" / "task.yaml", {**local(data), **WRITING, **keys}))


def write(out: Path, *, folder: Path | None = None, texts: Iterable[str] = (), **task: Any) -> Path:
    """The directory that the pipeline makes of a recipe's task."""
    write_task(
        EvaluationTask(**task), out, folder=folder, root=Path("/"), seed=0, texts=lambda: texts
    )
    return out


def load(directory: Path, code: CodeConfig = ALLOWED) -> HarnessTask:
    return HarnessTask(directory.name, directory, code=code, cache=directory.parent / "cache")


def made(folder: Path, rows: Sequence[Mapping[str, Any]] = ROWS, *, name="own", **keys: Any):
    """A loaded task of ``rows``; ``settings`` are those of the recipe."""
    settings = keys.pop("settings", {})
    return load(write(folder / name, definition=save_task(folder, rows, **keys), **settings))


def documents(task: HarnessTask) -> list[dict[str, Any]]:
    (part,) = task.tasks.values()
    return list(part.eval_docs)


def ask(
    task: HarnessTask,
    answer: Callable[[str], str] = lambda prompt: "",
    likelihood: Callable[[str, str], float] = lambda prompt, text: 0.0,
    *,
    greedy: bool = False,
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """The harness's results for a model that gives these answers, and all that it was asked."""
    from lm_eval import evaluate
    from lm_eval.api.model import LM

    asked: list[tuple[Any, ...]] = []

    class Model(LM):
        def generate_until(self, requests):
            asked.extend(request.args for request in requests)
            return [answer(request.args[0]) for request in requests]

        def loglikelihood(self, requests):
            asked.extend(request.args for request in requests)
            return [(likelihood(*request.args), greedy) for request in requests]

        def loglikelihood_rolling(self, requests):
            asked.extend(request.args for request in requests)
            return [likelihood("", request.args[0]) for request in requests]

    for part in task.tasks.values():
        part.set_fewshot_seed(0)
    limit = task.settings["limit"]
    return evaluate(Model(), task.loaded, limit=limit, bootstrap_iters=0), asked
