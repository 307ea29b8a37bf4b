"""What MLflow holds of a workspace's past: what ``keep`` leaves of it, and how the rest goes."""

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mlflow.entities import LoggedModel
from mlflow.entities import Run as RunEntity
from mlflow.entities.model_registry import ModelVersion

from infra.recipe.schema import KeepConfig
from infra.settings import Settings
from infra.tracking.copies import unread
from infra.tracking.locations import local_folder
from infra.tracking.private import delete_files, deletion
from infra.tracking.records import Version
from infra.tracking.registry import Registry
from infra.tracking.runs import if_there, is_copy, model_id_of, open_database

PARENT = "mlflow.parentRunId"
OURS = "upcycle.recipe"
"""A tag of every model that a flow has stored."""
UNFINISHED = frozenset({"RUNNING", "SCHEDULED"})


@dataclass(frozen=True)
class Past:
    """What MLflow holds of one workspace.

    Args:
        kept: Versions that stay.
        versions: Versions that go.
        models: Ids of stored models that no version names: what a killed registration leaves.
        runs: Ids of runs that go, children before their parents.
        is_unknown: Whether versions are registered, and none can be told to be the workspace's.
    """

    kept: tuple[Version, ...]
    versions: tuple[Version, ...]
    models: tuple[str, ...]
    runs: tuple[str, ...]
    is_unknown: bool


class Records:
    """The MLflow records of one experiment.

    Removal goes so that a kill on the way leaves nothing that cannot be found again: files first,
    the record last.

    Args:
        settings: Names the database.
        experiment: Under which name the runs are listed.
    """

    def __init__(self, settings: Settings, experiment: str) -> None:
        self._client = open_database(settings)
        self._registry = Registry(settings)
        self._settings = settings
        self._uri = settings.mlflow_tracking_uri
        found = self._client.get_experiment_by_name(experiment)
        self._experiment = None if found is None else found.experiment_id

    def past(
        self,
        keep: KeepConfig,
        names: Collection[str],
        *,
        recipe: str,
        ways_back: Callable[[Sequence[Version]], set[int]],
    ) -> Past:
        """What goes, and what stays.

        A version that any alias points at stays, the one before the champion, one that a recipe of
        the home names by its number, one whose model somebody has registered or promoted under
        another name in MLflow, one that a process of this machine, a server say, reads where it
        lies, and one whose files are lost: what it needs cannot be told. So does every run that
        made a version that stays or measured its model, with its parent and children, and what has
        not ended. Runs of an experiment that somebody has renamed stay.

        Args:
            keep: How much stays.
            names: The workspace's registered models; others that its runs registered count as well.
            recipe: Its name, by which versions are the workspace's too.
            ways_back: The numbers of the champions before those of now, of all versions of a name.
        """
        found = self._of_experiment(self._client.search_logged_models)
        models: dict[str, LoggedModel] = {model.model_id: model for model in found}
        stored, asked = self._stored(), _named(self._settings.home)
        registered = (v for v, model in stored if model in models and not is_copy(v))
        names = {*names, *(v.name for v in registered if OURS in v.tags)}
        kept, gone, others = [], [], False
        for versions in map(self._registry.versions, sorted(names)):
            mine = _own(versions, models, recipe)
            others = others or len(mine) < len(versions)
            # Another recipe may register under the same name, and its champion follow ours.
            before = ways_back(versions)
            named = [
                v
                for v in mine
                if v.aliases or v.number in before or v.is_lost or v.reference in asked
            ]
            spare = [v for v in mine if v not in named][: -keep.versions]
            gone += [v for v in spare if not self._is_read(v)]
            kept += [v for v in mine if v not in gone]
        going = {(v.name, v.number) for v in gone}
        held = {model for v, model in stored if (v.name, int(v.version)) not in going}
        kept += [v for v in gone if v.model_id in held]
        gone = [v for v in gone if v.model_id not in held]
        runs = self._of_experiment(self._client.search_runs)
        unfinished = {run.info.run_id for run in runs if run.info.status in UNFINISHED}
        leaving = {v.model_id for v in gone}
        orphans = sorted(
            id_
            for id_, model in models.items()
            if id_ not in held | leaving
            and OURS in model.tags
            and model.source_run_id not in unfinished
        )
        leaving |= set(orphans)
        expired = _expired(runs, _needed(stored, models, leaving), keep.runs)
        is_unknown = others and not kept and not gone
        return Past(tuple(kept), tuple(gone), tuple(orphans), tuple(expired), is_unknown)

    def model_files(self, model_id: str) -> list[Path]:
        """Files of a stored model on this machine."""
        return self._files(self._client.get_logged_model(model_id).artifact_location)

    def run_files(self, run_id: str) -> list[Path]:
        """Files of a run on this machine."""
        return self._files(self._client.get_run(run_id).info.artifact_uri or "")

    def delete_version(self, version: Version) -> bool:
        """Delete ``version`` for good, not if an alias points at it or a process reads it by now;
        and its model, unless another version has the same."""
        with self._unread(version) as is_free:
            with self._registry.alone(version.name):
                named = (version.name, str(version.number))
                now = if_there(partial(self._client.get_model_version, *named))
                if not is_free or (now is not None and now.aliases):
                    return False
                if now is not None:  # nobody has deleted it in MLflow meanwhile
                    self._client.delete_model_version(*named)
            if version.model_id not in {model for _, model in self._stored()}:
                self.delete_model(version.model_id)
            return True

    def delete_model(self, model_id: str) -> None:
        """Delete a stored model and its files for good."""
        self._remove_files(self._client.get_logged_model(model_id).artifact_location)
        self._delete(model_id, "logged_model", self._client.delete_logged_model)

    def delete_run(self, run_id: str) -> None:
        """Delete a run and its files for good."""
        self._remove_files(self._client.get_run(run_id).info.artifact_uri or "")
        self._delete(run_id, "run", self._client.delete_run)

    def _is_read(self, version: Version) -> bool:
        with self._unread(version) as is_free:
            return not is_free

    def _unread(self, version: Version) -> AbstractContextManager[bool]:
        """Whether nobody reads a version's files, where they lie here."""
        location = self._client.get_logged_model(version.model_id).artifact_location
        folder = local_folder(location, self._settings)
        return nullcontext(True) if folder is None else unread(folder)

    def _stored(self) -> list[tuple[ModelVersion, str | None]]:
        """Every version that is registered, whoever did so, and the id of its model."""
        every: list[ModelVersion] = self._pages(self._client.search_model_versions)
        return [(version, model_id_of(self._client, version)) for version in every]

    def _delete(
        self, id_: str, kind: Literal["run", "logged_model"], mark: Callable[[str], None]
    ) -> None:
        # `mlflow gc` does no other; by itself it would empty everybody's bin. What a server holds
        # is marked, until `mlflow gc` runs there.
        (deletion(self._uri, kind) or mark)(id_)

    def _files(self, location: str) -> list[Path]:
        folder = local_folder(location, self._settings)
        return [] if folder is None else [file for file in folder.rglob("*") if file.is_file()]

    def _remove_files(self, location: str) -> None:
        folder = local_folder(location, self._settings)
        if folder is None:
            delete_files(location, self._uri)
            return
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        with suppress(OSError):  # MLflow gives each a folder of its own
            folder.parent.rmdir()

    def _of_experiment(self, search: Callable[..., Any]) -> list[Any]:
        """All that a search finds there; nothing where no experiment has that name."""
        return [] if self._experiment is None else self._pages(search, [self._experiment])

    @staticmethod
    def _pages(search: Callable[..., Any], *arguments: Any) -> list[Any]:
        """All that a search finds."""
        found: list[Any] = []
        token = None
        while True:
            page = search(*arguments, page_token=token)
            found += page
            token = page.token
            if not token:
                return found


def _own(versions: Sequence[Version], models: Collection[str], recipe: str) -> list[Version]:
    """Those that the workspace's flows have registered: somebody may rename the experiment."""
    return [
        version
        for version in versions
        if version.model_id in models or version.is_lost or version.params.get("name") == recipe
    ]


def _named(home: Path) -> set[str]:
    """``models:/NAME/NUMBER`` that recipes of the home's workspaces take experts or seeds from."""
    texts = [_text(params) for params in home.glob("*/params.yaml")]
    return {found for text in texts for found in re.findall(r"models:/[^/\n]+/\d+", text)}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # its workspace has gone meanwhile, or is another user's
        return ""


def _needed(
    stored: Sequence[tuple[ModelVersion, str | None]],
    models: Mapping[str, LoggedModel],
    leaving: Collection[str],
) -> set[str | None]:
    """Ids of runs that made a version or a model that stays, or measured it."""
    needed = {version.run_id for version, model in stored if model not in leaving}
    for model in models.values():
        if model.model_id not in leaving:
            needed |= {metric.run_id for metric in model.metrics or ()}
    return needed


def _expired(runs: Sequence[RunEntity], needed: Collection[str | None], keep: int) -> list[str]:
    """Ids of ended flows' runs beyond the newest ``keep``, each after its children."""
    known = {run.info.run_id: run for run in runs}
    children: dict[str | None, list[RunEntity]] = defaultdict(list)
    roots: list[RunEntity] = []
    for run in runs:
        parent = run.data.tags.get(PARENT)
        (children[parent] if parent in known else roots).append(run)

    def family(run: RunEntity) -> Iterator[RunEntity]:
        for child in children[run.info.run_id]:
            yield from family(child)
        yield run

    families = [list(family(root)) for root in sorted(roots, key=_age)]
    spare = [
        [run.info.run_id for run in members]
        for members in families
        if all(r.info.run_id not in needed and r.info.status not in UNFINISHED for r in members)
    ]
    return [run_id for ids in spare[:-keep] for run_id in ids]


def _age(run: RunEntity) -> tuple[int, str]:
    return run.info.start_time, run.info.run_id
