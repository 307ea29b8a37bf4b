"""One task of a recipe as the harness holds it: loaded with its data, before any model."""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.evaluation.tasks.config import CodeConfig
from upcycle_core.evaluation.tasks.definitions import SETTINGS
from upcycle_core.evaluation.tasks.scoring import OWN_KEYS, SCORED_BY, fields_read, own_scoring

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

RUNS_PROGRAMS = (
    "runs the model's programs in the evaluating process; use a definition with `program`, as "
    "recipes/tasks/humaneval-hub.yaml"
)

OF_ALL_ITEMS = ("bleu", "brier_score", "chrf", "chrf++", "likelihood", "ter")
"""Metrics of the harness that a single item has no score by."""


class HarnessTask:
    """A task of a recipe, which may be a group of the harness's tasks.

    Args:
        name: Its name in the recipe.
        directory: What ``definitions.write_task`` wrote.
        code: Whether and how programs may run.
        cache: Where the harness may keep its copy of local data.

    Raises:
        InputError: The harness has no such task or cannot use the definition, its data are neither
            here nor on the hub, programs may not run, or a setting asks for what it lacks.
    """

    def __init__(self, name: str, directory: Path, *, code: CodeConfig, cache: Path) -> None:
        self.name = name
        self.settings: dict[str, Any] = json.loads((directory / SETTINGS).read_text())
        self.extra: dict[str, Any] = {}
        if self.settings["harness"] is not None:
            self.loaded = _load_named(name, self.settings["harness"])
        else:
            with _definition_of(name, self.settings["definition"]):
                self.loaded = self._load_own(directory, code, cache)
        self.tasks: dict[str, Any] = self.loaded["tasks"]
        self.groups: dict[str, Any] = self.loaded.get("groups", {})
        for task in self.tasks.values():
            self._apply_settings(task)
        raise_faults(self._faults())

    @property
    def requests(self) -> int:
        """Requests that one run puts to a model."""
        total = 0
        for task in self.tasks.values():
            documents = islice(task.eval_docs, self.settings["limit"])
            is_choice = task.get_config("output_type") == "multiple_choice"
            total += sum(len(task.doc_to_choice(one)) if is_choice else 1 for one in documents)
        return total

    def room_faults(self, positions: int) -> Iterator[Fault]:
        """Answers so long that a model of ``positions`` has no room for a prompt."""
        for task in self.tasks.values():
            wanted = longest_answer(task.get_config("generation_kwargs")) if _writes(task) else 0
            if wanted >= positions:
                remedy = f"no room for a prompt in the model's {positions} positions; shorten it"
                yield Fault(f"tasks.{self.name}.max_new_tokens", wanted, remedy)

    def _load_own(self, directory: Path, code: CodeConfig, cache: Path) -> Any:
        from lm_eval.tasks import TaskManager
        from lm_eval.tasks._yaml_loader import load_yaml

        config: dict[str, Any] = {}
        if self.settings["definition"] is not None:
            with _no_bytecode():
                config = load_yaml(directory / self.settings["definition"], resolve_func=True)
        config = {**config, **self.settings["config"], "task": self.name}
        if "dataset_kwargs" in self.settings["config"]:
            config["dataset_kwargs"] = _placed(config["dataset_kwargs"], directory, cache)
        self.extra = {key: config.pop(key) for key in OWN_KEYS if key in config}
        if "program" in self.extra and not code.allow:
            remedy = "runs programs that the model writes; set task_evaluation.code.allow to true"
            raise InputError(Fault(f"tasks.{self.name}", "program", remedy))
        config |= own_scoring(self.extra, code)
        config |= _own_examples(config)
        is_local = "dataset_kwargs" in self.settings["config"]
        with _data_of(self.name, config.get("dataset_path", ""), is_local=is_local):
            return TaskManager(include_defaults=False).load([config])

    def _apply_settings(self, task: Any) -> None:
        shots = self.settings["shots"]
        own = task.get_config("num_fewshot")
        task.set_config("num_fewshot", (own or 0) if shots is None else shots)
        generation = {
            "until": self.settings["stop"],
            "max_gen_toks": self.settings["max_new_tokens"],
        }
        given = {key: value for key, value in generation.items() if value is not None}
        if given and _writes(task):
            task.set_config("generation_kwargs", given, update=True)

    def _faults(self) -> Iterator[Fault]:
        """What the recipe asks for and the loaded task lacks."""
        where, tasks = f"tasks.{self.name}", self.tasks.values()
        for task in tasks:
            if getattr(task, "UNSAFE_CODE", False):
                yield Fault(where, task.task_name, RUNS_PROGRAMS)
            wanted, found = task.get_config("num_fewshot"), _examples(task)
            if found is not None and wanted > found:
                remedy = f"{task.task_name} has {found} examples to show; ask for no more"
                yield Fault(f"{where}.shots", wanted, remedy)
        for setting in ("stop", "max_new_tokens"):
            if self.settings[setting] is not None and not any(map(_writes, tasks)):
                remedy = "the model writes nothing in this task; leave it out"
                yield Fault(f"{where}.{setting}", self.settings[setting], remedy)
        asked, known = self.settings["metric"], self._metrics()
        if asked is not None and known and asked not in known:
            shown = ", ".join(name for name in known if "," in name)
            yield Fault(f"{where}.metric", asked, f"the task has {shown}")
        used = asked or next(iter(known), "")
        if used in known and _is_of_all(used):
            others = ", ".join(name for name in known if "," in name and not _is_of_all(name))
            remedy = "has no score of single items, which are compared; "
            remedy += f"the task has {others}" if others else "and the task no other: leave it out"
            yield Fault(f"{where}.metric", used, remedy)
        for field in sorted(fields_read(self.extra)):
            (task,) = tasks
            if field not in task.features:
                remedy = f"the data have no such field; they have {', '.join(task.features)}"
                yield Fault(f"{where}.definition", field, remedy)

    def _metrics(self) -> dict[str, None]:
        """What may be asked for, METRIC or METRIC,FILTER, of all parts; none where a part says so
        with its results alone: it has a function of its own, or a metric that is several."""
        from lm_eval.api.registry import METRIC_REGISTRY
        from lm_eval.api.task import ConfigurableTask

        parts, is_ours = [], bool({*self.extra} & {*SCORED_BY})
        for task in self.tasks.values():
            if type(task) is not ConfigurableTask:
                return {}
            if callable(task.config.process_results) and not is_ours:
                return {}
            metrics, filters = task.aggregation(), [one.name for one in task._filters]
            if any(entry.get("hf_evaluate") for entry in task.config.metric_list or ()):
                return {}
            if any(metric not in METRIC_REGISTRY for metric in metrics) and not is_ours:
                return {}
            names = [*metrics, *(f"{metric},{name}" for metric in metrics for name in filters)]
            parts.append(dict.fromkeys(names))
        first, *others = parts
        common = {name: None for name in first if all(name in other for other in others)}
        return common if any("," in name for name in common) else {}


def longest_answer(generation: Mapping[str, Any]) -> int:
    """Tokens that a model may write, under whichever name a task says so."""
    from lm_eval.models.utils import normalize_gen_kwargs

    return normalize_gen_kwargs(dict(generation))["max_gen_toks"]


def _is_of_all(metric: str) -> bool:
    return metric.partition(",")[0] in OF_ALL_ITEMS


def _writes(task: Any) -> bool:
    return task.get_config("output_type") == "generate_until"


def _examples(task: Any) -> int | None:
    """Examples that a prompt of the task can show, where they are known."""
    if not hasattr(task, "sampler"):
        return None
    shares_items = task.fewshot_cfg.split == task.get_config("test_split")
    return len(task.sampler.df) - (1 if shares_items else 0)


def _own_examples(config: Mapping[str, Any]) -> dict[str, Any]:
    """Where a definition names no examples the harness takes the items, each item itself included;
    said to come from the same split, they leave it out."""
    given = config.get("fewshot_config") or {}
    named = [config.get(f"{split}_split") for split in ("training", "validation", "fewshot")]
    if any(named) or given.get("split") or given.get("samples"):
        return {}
    return {"fewshot_split": config.get("test_split")}


def check_tasks(
    task_sets: Mapping[str, Path], *, code: CodeConfig, positions: int | None = None
) -> None:
    """Load every task once, without any model.

    Args:
        task_sets: {task: what ``definitions.write_task`` wrote}.
        code: Whether programs may run.
        positions: Of the models that will be asked; None if they are not known.

    Raises:
        InputError: With the faults of all tasks: data that are missing, names that do not exist,
            answers that leave no room for a prompt.
    """
    faults: list[Fault] = []
    with tempfile.TemporaryDirectory() as cache:
        for name, path in task_sets.items():
            try:
                task = HarnessTask(name, path, code=code, cache=Path(cache))
            except InputError as error:
                faults += error.faults
            else:
                faults += [] if positions is None else task.room_faults(positions)
    raise_faults(faults)


@cache  # reads some thousand files
def _manager() -> "TaskManager":
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _load_named(name: str, harness: str) -> Any:
    """A task or a group that the harness brings."""
    manager = _manager()
    where = f"tasks.{name}.harness"
    if harness not in (*manager.all_subtasks, *manager.all_groups):
        remedy = "the lm-evaluation-harness has no such task or group; `lm-eval ls tasks` lists all"
        raise InputError(Fault(where, harness, remedy))
    if (manager.task_index[harness].cfg or {}).get("unsafe_code"):  # known before data are there
        raise InputError(Fault(where, harness, RUNS_PROGRAMS))
    with _data_of(name, harness):
        return manager.load([harness])


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """A definition's functions are imported from where it lies, whose files are known by hash.

    Of the whole process: not for several threads.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


@contextmanager
def _definition_of(name: str, file: str | None) -> Iterator[None]:
    """Turn whatever the harness raises about a definition into one fault."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if file is None:  # our own
            raise
        remedy = f"the harness cannot use it ({type(error).__name__}: {_first_line(error)})"
        raise InputError(Fault(f"tasks.{name}.definition", Path(file).name, remedy)) from error


@contextmanager
def _data_of(name: str, source: str, *, is_local: bool = False) -> Iterator[None]:
    """Turn what ``datasets`` raises into one fault that says where the data may lie."""
    import datasets

    try:
        yield
    except (
        ConnectionError,
        FileNotFoundError,
        ValueError,
        datasets.exceptions.DatasetsError,
    ) as error:
        # A configuration that the cache lacks is a plain ValueError.
        if type(error) is ValueError and "find cache" not in str(error):
            raise
        remedy = (
            f"its data are neither in the cache {datasets.config.HF_DATASETS_CACHE} nor to be had "
            f"from the hub ({_first_line(error)}); load it once where there is a network, or "
            f"describe local files by tasks.{name}.definition"
        )
        if is_local:
            reason = _first_line(error.__cause__ or error)
            remedy = f"its files cannot be read as {source} ({reason}); correct them"
        raise InputError(Fault(f"tasks.{name}", source, remedy)) from error
    except ModuleNotFoundError as error:
        remedy = f"needs a package that is not installed: {_first_line(error)}"
        raise InputError(Fault(f"tasks.{name}", source, remedy)) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _placed(arguments: Mapping[str, Any], directory: Path, cache: Path) -> dict[str, Any]:
    """Arguments of ``datasets.load_dataset`` with local data where they lie now."""
    files = {
        split: [str(directory / path) for path in paths]
        for split, paths in arguments["data_files"].items()
    }
    return {**arguments, "data_files": files, "cache_dir": str(cache)}
