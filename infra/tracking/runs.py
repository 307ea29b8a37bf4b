"""Runs in MLflow.

Every call names its run: MLflow's fluent interface keeps a current run per process, over which
Prefect's threads would fight.
"""

import fcntl
import functools
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from infra.recipe.names import masked
from infra.settings import Settings
from infra.tracking.records import DatasetRecord, flatten, local_folder
from upcycle_core.errors import Fault, InputError

# What MLflow takes in one call, in one value.
METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
PARAM_LENGTH = 6000
DIGEST_LENGTH = 36

# Calls that copy files, which may take long and need the database but for a moment.
COPYING = frozenset({"log_artifacts", "log_model_artifacts", "log_text"})

WORKSPACE_TAG = "upcycle.workspace"


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
        points = [Metric(key, float(value), now, step) for key, value in values.items()]
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

    def describe(self, markdown: str) -> None:
        """Set what the run's page shows on top."""
        self.set_tags({"mlflow.note.content": markdown})


class Tracker:
    """Runs of one experiment.

    Args:
        settings: Names the database and the folder of files.
        experiment: Under which name the runs are listed; created if it does not exist.
    """

    def __init__(self, settings: Settings, experiment: str) -> None:
        self._client = open_database(settings)
        self._experiment_id = _experiment_id(self._client, settings, experiment)

    @contextmanager
    def start_run(
        self,
        name: str,
        *,
        workspace: Path | None = None,
        parent: Run | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Iterator[Run]:
        """Record a run: finished, failed or killed, as the block ends.

        Args:
            name: What the run is called.
            workspace: For a flow's run: the workspace that it has locked. Runs of an earlier flow
                there that still count as running were killed, and are marked so.
            parent: For a stage's run: the run of its flow.
            tags: Further tags.

        Yields:
            The run.
        """
        labels = {"mlflow.source.name": name, "mlflow.source.type": "LOCAL", **(tags or {})}
        if workspace is not None:
            self.close_interrupted(workspace)
            labels[WORKSPACE_TAG] = str(workspace.resolve())
        if parent is not None:
            labels["mlflow.parentRunId"] = parent.id
            labels |= {key: parent.tags[key] for key in (WORKSPACE_TAG,) if key in parent.tags}
        created = self._client.create_run(self._experiment_id, run_name=name, tags=labels)
        run = Run(self._client, self._experiment_id, created.info.run_id, labels)
        try:
            yield run
        except BaseException as error:
            killed = not isinstance(error, Exception)
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
        here = str(workspace.resolve())
        ids = [run.info.run_id for run in running if run.data.tags.get(WORKSPACE_TAG) == here]
        for run_id in ids:
            self._client.set_terminated(run_id, "KILLED")
        return ids


def open_database(settings: Settings) -> MlflowClient:
    """Return a client of the database, which is created first if it does not exist.

    Creating it is serialised: MLflow's migrations break when two processes start them at once. So
    are calls of a SQLite database by the threads of this process.

    Raises:
        InputError: It cannot be reached or read.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    settings.mlflow_artifacts.mkdir(parents=True, exist_ok=True)
    with (settings.mlflow_artifacts.parent / "database.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
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
    local = not settings.mlflow_tracking_uri.startswith("http")
    found = client.get_experiment_by_name(name)
    own = settings.mlflow_artifacts / name
    if found is not None:
        theirs = local_folder(found.artifact_location)
        is_shared = local and not settings.mlflow_tracking_uri.startswith("sqlite")
        if is_shared and theirs is not None and theirs.resolve() != own.resolve():
            remedy = f"another home uses it in the same database, with its files in {theirs}; give "
            remedy += "the recipe another `name`, or run in that home"
            raise InputError(Fault("MLflow experiment", name, remedy))
        return found.experiment_id
    try:
        return client.create_experiment(name, artifact_location=own.as_uri() if local else None)
    except MlflowException:  # another flow was first
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found.experiment_id


def _dataset_input(record: DatasetRecord) -> DatasetInput:
    dataset = Dataset(
        name=record.name,
        digest=record.sha256[:DIGEST_LENGTH],
        source_type="local",
        source=json.dumps({"uri": record.source}),
        profile=json.dumps({"sha256": record.sha256, **record.profile}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", record.context)])


def milliseconds() -> int:
    return int(time.time() * 1000)
