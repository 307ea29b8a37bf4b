"""Runs in MLflow.

Every call names its run: MLflow's fluent interface keeps a current run per process, over which
Prefect's threads would fight.
"""

import functools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import mlflow
from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    Experiment,
    InputTag,
    LifecycleStage,
    Metric,
    Param,
    RunTag,
)
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from infra.recipe.names import masked
from infra.settings import Settings
from infra.tracking.descriptions import with_room
from infra.tracking.locations import (
    address,
    home_id,
    is_database,
    local_folder,
    prepare_home,
    use_files,
)
from infra.tracking.locks import locked
from infra.tracking.private import machine_watched
from infra.tracking.records import DatasetRecord, flatten, key_of
from upcycle_core.errors import Fault, InputError, raise_faults

# What MLflow takes in one call, in one value.
METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
PARAM_LENGTH = 6000
DIGEST_LENGTH = 36

MODEL_SCHEME = "models:/"
STORED = re.compile(r"/models/(?P<model>m-\w+)/artifacts/?$")
"""Where the files of a stored model are."""
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""What MLflow says of a model and of an alias that is not there."""
Found = TypeVar("Found")

# Calls that copy files, which may take long and need the database but for a moment.
COPYING = frozenset({"log_artifacts", "log_model_artifacts", "log_text"})

WORKSPACE_TAG = "upcycle.workspace"
"""Of a flow's run: its workspace, seen from the home."""
HOME_TAG = "upcycle.home"
"""Of a flow's run and of an experiment: the home, which may be moved."""


class Run:
    """A run that is being recorded. Its methods may be called from any thread.

    Args:
        client: Of the database.
        experiment_id: Where it is listed.
        run_id: Its id.
        tags: What it was started with.
    """

    def __init__(
        self, client: MlflowClient, experiment_id: str, run_id: str, tags: Mapping[str, str]
    ) -> None:
        self._client = client
        self.experiment_id = experiment_id
        self.id = run_id
        self.tags = tags

    @property
    def page(self) -> str:
        """Its page on the MLflow server, to be put behind the server's address."""
        # Without the last part MLflow shows its menus for chats.
        place = f"/#/experiments/{self.experiment_id}/runs/{self.id}"
        return f"{place}?workflowType=machine_learning"

    def file_page(self, path: str) -> str:
        """The page of the run that shows its file ``path``, to be put behind the address."""
        return f"/#/experiments/{self.experiment_id}/runs/{self.id}/artifacts/{path}"

    def log_metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Add a point at ``step`` to the curve of each key of ``values``."""
        now = milliseconds()
        points = [Metric(key_of(key), float(value), now, step) for key, value in values.items()]
        for start in range(0, len(points), METRICS_PER_CALL):
            self._client.log_batch(self.id, metrics=points[start : start + METRICS_PER_CALL])

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Record ``values``, nested mappings flattened (``router.ridge_lambda``)."""
        flat = flatten(values, length=PARAM_LENGTH)
        params = [Param(key, value) for key, value in flat.items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self.id, params=params[start : start + PARAMS_PER_CALL])

    def log_inputs(self, datasets: Sequence[DatasetRecord]) -> None:
        """Record which text the run reads."""
        if datasets:
            self._client.log_inputs(self.id, datasets=[_dataset_input(d) for d in datasets])

    def log_artifacts(self, directory: Path, path: str | None = None) -> None:
        """Copy the files of ``directory`` into the run, below ``path``."""
        self._client.log_artifacts(self.id, str(directory), path)

    def log_text(self, text: str, path: str) -> None:
        """Keep ``text`` as the run's file ``path``."""
        self._client.log_text(self.id, text, path)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._client.log_batch(self.id, tags=[RunTag(k, str(v)) for k, v in tags.items()])

    def rename(self, name: str) -> None:
        """Call the run so from now on."""
        self._client.update_run(self.id, name=name)

    def describe(self, markdown: str) -> None:
        """Set what the run's page shows on top."""
        self.set_tags({"mlflow.note.content": with_room(markdown)})


class Tracker:
    """Runs of one experiment.

    Args:
        settings: Names the database and the folder of files.
        experiment: Under which name the runs are listed; created if it does not exist.
    """

    def __init__(self, settings: Settings, experiment: str) -> None:
        self._client = open_database(settings)
        self._settings = settings
        self._experiment_id = _experiment_id(self._client, settings, experiment)

    @contextmanager
    def start_run(
        self,
        name: str,
        *,
        workspace: Path | None = None,
        parent: Run | None = None,
        tags: Mapping[str, str] | None = None,
        source: str | None = None,
    ) -> Iterator[Run]:
        """Record a run: finished, failed or killed, as the block ends.

        Args:
            name: What the run is called.
            workspace: For a flow's run: the workspace that it has locked. Runs of an earlier flow
                there that still count as running were killed, and are marked so. The load of the
                machine is written down meanwhile (MLflow's system metrics).
            parent: For a stage's run: the run of its flow.
            tags: Further tags.
            source: The program that it is a run of; by default it is called as the run is.

        Yields:
            The run.
        """
        labels = {"mlflow.source.name": source or name, "mlflow.source.type": "LOCAL"}
        labels |= tags or {}
        if workspace is not None:
            self.close_interrupted(workspace)
            labels |= self._place(workspace)
        if parent is not None:
            labels["mlflow.parentRunId"] = parent.id
            inherited = (WORKSPACE_TAG, HOME_TAG)
            labels |= {key: parent.tags[key] for key in inherited if key in parent.tags}
        created = self._client.create_run(self._experiment_id, run_name=name, tags=labels)
        run = Run(self._client, self._experiment_id, created.info.run_id, labels)
        uri = self._settings.mlflow_tracking_uri
        watched = nullcontext() if workspace is None else machine_watched(run.id, uri)
        try:
            with watched:
                yield run
        except BaseException as error:
            killed = not isinstance(error, Exception)
            # A disk that is full, or a server that is away: what ended the run is said, and the
            # next one in its workspace closes it.
            with suppress(MlflowException):
                self._client.set_terminated(run.id, "KILLED" if killed else "FAILED")
            raise
        self._client.set_terminated(run.id, "FINISHED")

    def close_interrupted(self, workspace: Path) -> list[str]:
        """Mark runs in ``workspace`` that never ended as killed.

        The caller holds the workspace's lock, so that none of them can still be at work.

        Returns:
            Their ids.
        """
        experiments = [found.experiment_id for found in self._client.search_experiments()]
        running = self._client.search_runs(experiments, "attributes.status = 'RUNNING'")
        here = self._place(workspace).items()
        earlier = {WORKSPACE_TAG: str(workspace.resolve())}.items()
        ids = [
            run.info.run_id
            for run in running
            if here <= run.data.tags.items() or earlier <= run.data.tags.items()
        ]
        for run_id in ids:
            self._client.set_terminated(run_id, "KILLED")
        return ids

    def _place(self, workspace: Path) -> dict[str, str]:
        """Tags that say which workspace it is, wherever its home is moved."""
        root, home = workspace.resolve(), self._settings.home.resolve()
        inside = root.relative_to(home) if root.is_relative_to(home) else root
        return {WORKSPACE_TAG: str(inside), HOME_TAG: home_id(self._settings)}


def open_database(settings: Settings) -> MlflowClient:
    """Return a client of the database, which is created first if it does not exist.

    Creating it is serialised: MLflow's migrations break when two processes start them at once. So
    are calls of a SQLite database by the threads of this process.

    Raises:
        InputError: It cannot be reached or read.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # What it says of an error, in hundreds of lines, it raises as well.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    use_files(settings)
    waits = "waiting for another command that opens MLflow's database"
    with locked(settings.mlflow_artifacts.parent / "database.lock", waits):
        try:
            prepare_home(settings)
            client = MlflowClient(settings.mlflow_tracking_uri, settings.mlflow_tracking_uri)
            client.search_experiments(max_results=1)
        except (MlflowException, SQLAlchemyError, ImportError) as error:
            remedy = (
                f"cannot be opened ({_first_line(error)}); see that it runs and is named right, "
            )
            remedy += "or unset MLFLOW_TRACKING_URI: then runs go into a file of the home"
            fault = Fault("MLFLOW_TRACKING_URI", masked(settings.mlflow_tracking_uri), remedy)
            raise InputError(fault) from None  # what it came from may show a password
    # The registry's store looks models up through the process's own address, not the client's.
    mlflow.set_tracking_uri(settings.mlflow_tracking_uri)
    if not settings.mlflow_tracking_uri.startswith("sqlite:"):
        return client
    return cast(MlflowClient, _OneAtATime(client))


def _first_line(error: Exception) -> str:
    said = str(error).strip()
    return masked(said.partition("\n")[0]) if said else type(error).__name__


class _OneAtATime:
    """A client whose calls wait for each other, but for those that copy files.

    SQLite writes for one at a time. Threads that wait for it hold a connection each, and on a busy
    machine MLflow's pool of fifteen runs dry, which fails the run that comes too late.
    """

    _calls = threading.RLock()

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not callable(found) or name in COPYING:
            return found

        @functools.wraps(found)
        def call(*arguments: Any, **options: Any) -> Any:
            with self._calls:
                return found(*arguments, **options)

        return call


def _experiment_id(client: MlflowClient, settings: Settings, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        raise_faults(_faults(found, settings))
        return found.experiment_id
    # A server puts files where it was told to.
    own: dict[str, Any] = {}
    if is_database(settings):
        own = {"artifact_location": address(name), "tags": {HOME_TAG: home_id(settings)}}
    try:
        return client.create_experiment(name, **own)
    except MlflowException:  # another flow was first
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        raise_faults(_faults(found, settings))
        return found.experiment_id


def _faults(found: Experiment, settings: Settings) -> Iterator[Fault]:
    """What keeps a flow of this home from an experiment in the same database."""
    if found.lifecycle_stage != LifecycleStage.ACTIVE:
        remedy = "has been deleted in MLflow, with the runs that models came from; restore it "
        remedy += f"(`mlflow experiments restore --experiment-id {found.experiment_id}` with "
        remedy += f"MLFLOW_TRACKING_URI={masked(settings.mlflow_tracking_uri)}), or give the "
        remedy += "recipe another `name`"
        yield Fault("MLflow experiment", found.name, remedy)
    if not is_database(settings):
        return
    if found.tags.get(HOME_TAG, home_id(settings)) != home_id(settings):
        yield _foreign(found.name, "files in its own folder")
    # As homes were told apart before they had an id.
    named = found.artifact_location if found.artifact_location.startswith("file:") else ""
    theirs, own = local_folder(named, settings), settings.mlflow_artifacts / found.name
    is_shared = not settings.mlflow_tracking_uri.startswith("sqlite")
    if is_shared and theirs is not None and theirs.resolve() != own.resolve():
        yield _foreign(found.name, f"files in {theirs}")


def _foreign(name: str, files: str) -> Fault:
    remedy = (
        f"another home uses it in the same database, with its {files}; give the recipe another "
    )
    remedy += "`name`, or run in that home"
    return Fault("MLflow experiment", name, remedy)


def _dataset_input(record: DatasetRecord) -> DatasetInput:
    dataset = Dataset(
        name=record.name,
        digest=record.sha256[:DIGEST_LENGTH],
        source_type="local",
        source=json.dumps({"uri": record.source}),
        profile=json.dumps({"sha256": record.sha256, **record.profile}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", record.context)])


def if_there(call: Callable[[], Found]) -> Found | None:
    """What MLflow holds; None if it holds no such thing, or holds it no more."""
    try:
        return call()
    except MlflowException as error:
        if error.error_code in ABSENT:
            return None
        raise


def model_id_of(client: MlflowClient, version: ModelVersion) -> str | None:
    """The id of the stored model whose files a version has; None where that is none of MLflow's.

    A copy (what MLflow calls to promote a version to another registered model) names the version
    that it was made of, which may be gone by now; where its files are stays.
    """
    source = version.source or ""
    if not source.startswith(MODEL_SCHEME):
        return None
    if not is_copy(version):
        return source.removeprefix(MODEL_SCHEME)
    place = client.get_model_version_download_uri(version.name, str(version.version))
    named = STORED.search(place)
    return named and named["model"]


def aliases_of(client: MlflowClient, name: str) -> dict[int, list[str]]:
    """{number of a version: aliases that point at it}, of a registered model; none of one gone."""
    model = if_there(lambda: client.get_registered_model(name))
    aliases: dict[int, list[str]] = {}
    for alias, number in (model.aliases if model else {}).items():
        aliases.setdefault(int(number), []).append(alias)
    return aliases


def is_copy(version: ModelVersion) -> bool:
    """Whether a version was made of one of another registered model, in MLflow."""
    source = version.source or ""
    return source.startswith(MODEL_SCHEME) and "/" in source.removeprefix(MODEL_SCHEME)


def milliseconds() -> int:
    return int(time.time() * 1000)
