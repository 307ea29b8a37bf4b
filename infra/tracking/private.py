"""What we use of MLflow that MLflow does not promise to keep. Checked with MLflow 3.17.

Nothing else of ours names these. ``USES`` says what each is for; a test asks for every one, so that
an upgrade that has moved it is told what to look for.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import (
    _artifact_repository_registry,
    get_artifact_repository,
)
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking._tracking_service.utils import _get_store, get_tracking_uri
from mlflow.utils.uri import validate_path_is_safe
from sqlalchemy import text
from sqlalchemy.engine import make_url

from upcycle_core.durable import sync

LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Tables and columns of MLflow's database that say where files are."""
WATCH_SECONDS = 20
"""Between two looks at the machine: some ten numbers each, a tenth of a megabyte an hour."""
SCHEME = "mlflow-artifacts"
"""Of files that a server finds below its ``--artifacts-destination``."""
USES = {
    "mlflow.store.artifact.artifact_repository_registry:get_artifact_repository": (
        "deletes files that do not lie on this machine; no client's call does"
    ),
    "mlflow.store.artifact.artifact_repository_registry:_artifact_repository_registry": (
        "says who finds the files of an address; a plug-in would have to be an installed package"
    ),
    "mlflow.store.artifact.artifact_repo:ArtifactRepository": "what finds files",
    "mlflow.store.artifact.local_artifact_repo:LocalArtifactRepository": "finds them in a folder",
    "mlflow.store.artifact.mlflow_artifacts_repo:MlflowArtifactsRepository": (
        "finds them through a server"
    ),
    "mlflow.store.tracking.dbmodels.models:SqlRun.artifact_uri": (
        "where files are; no client's call changes it"
    ),
    "mlflow.store.model_registry.dbmodels.models:SqlModelVersion.storage_location": "likewise",
    "mlflow.system_metrics.system_metrics_monitor:SystemMetricsMonitor": (
        "writes down the machine's load; MLflow's own switch is for its current run alone"
    ),
    "mlflow.server:_build_uvicorn_command": "says which application `mlflow server` runs",
    "mlflow.server.fastapi_app:app": "all that it serves",
    "mlflow.cli:cli": "the command `mlflow`, in this process",
    "mlflow.utils.uri:validate_path_is_safe": "refuses a path that leads out of its folder",
    "mlflow.tracking._tracking_service.utils:get_tracking_uri": (
        "the address of whoever gives none"
    ),
    "mlflow.tracking._tracking_service.utils:_get_store": "the database behind an address",
    "mlflow.store.tracking.sqlalchemy_store:SqlAlchemyStore._hard_delete_run": (
        "deletes a run for good; a client marks it, and `mlflow gc` would empty everybody's bin"
    ),
    "mlflow.store.tracking.sqlalchemy_store:SqlAlchemyStore._hard_delete_logged_model": (
        "deletes a stored model for good, likewise"
    ),
}
"""{module:name: what it is for}."""


@contextmanager
def machine_watched(run_id: str, uri: str) -> Iterator[None]:
    """Log the machine's processors, memory, disk and network to a run, as MLflow itself does."""
    name = SystemMetricsMonitor.__module__
    logging.getLogger(name).setLevel(logging.WARNING)
    monitor = SystemMetricsMonitor(run_id, sampling_interval=WATCH_SECONDS, tracking_uri=uri)
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()


def run_server(arguments: Sequence[str], application: str) -> None:
    """``mlflow server``, with another application than its own.

    Args:
        arguments: Of ``mlflow``.
        application: ``module:factory``, for uvicorn.
    """
    import mlflow.server as server  # all of the server's code
    from mlflow.cli import cli

    build = server._build_uvicorn_command

    def command(*given: Any, **named: Any) -> list[str]:
        return [*build(*given, **named)[:-1], "--factory", application]

    server._build_uvicorn_command = command
    cli(list(arguments), prog_name="mlflow")


def whole_server() -> Any:
    """All that ``mlflow server`` serves, as an ASGI application."""
    from mlflow.server.fastapi_app import app

    return app


def deletion(uri: str, kind: Literal["run", "logged_model"]) -> Callable[[str], None] | None:
    """How what lies in a database is deleted for good, by its id.

    Args:
        uri: The database's address.
        kind: Of what.

    Returns:
        None where a server stands before the database: it takes no such order.
    """
    return getattr(_get_store(uri), f"_hard_delete_{kind}", None)


def create_database(uri: str) -> None:
    """Make MLflow's tables, if there are none; files of its default experiment are a server's.

    A database in a file is made beside its place and put there whole: MLflow cannot go on with the
    migrations of one that was killed among them.
    """
    files = f"{SCHEME}:/"
    database = make_url(uri).database
    if uri.startswith("sqlite:") and database and not Path(database).exists():
        place = Path(database)
        partial = place.with_name(f"{place.name}.partial")
        for name in (partial, partial.with_name(f"{partial.name}-journal")):
            name.unlink(missing_ok=True)
        _get_store(f"sqlite:///{partial}", files).engine.dispose()
        sync(partial)
        partial.replace(place)
        sync(place.parent)
    _get_store(uri, files)


def rename_location(uri: str, old: str, new: str) -> None:
    """Name the place of an experiment's files anew, with those of its runs and models.

    Args:
        uri: The address of the database.
        old: Where the experiment's files are, as the database says.
        new: What it is to say.
    """
    values = {"old": old, "new": new, "inside": f"{old}/"}
    with _get_store(uri).engine.begin() as connection:
        for table, column in LOCATIONS:
            rest = f"substr({column}, length(:old) + 1)"
            named = f"{column} = :old OR substr({column}, 1, length(:inside)) = :inside"
            change = f"UPDATE {table} SET {column} = :new || {rest} WHERE {named}"
            connection.execute(text(change), values)


def delete_files(location: str, uri: str) -> None:
    """Delete the files of a run or a stored model, wherever MLflow keeps them.

    Args:
        location: Where they are, as the database says.
        uri: The address of the database, or of its server.
    """
    get_artifact_repository(location, tracking_uri=uri).delete_artifacts()


def keep_files_in(folder: Path, uri: str) -> None:
    """Let this process find files in ``folder`` that MLflow itself would ask a server for.

    Args:
        folder: What a server has as its ``--artifacts-destination``.
        uri: Who works with this address finds them there.
    """
    _folders[uri] = folder
    _artifact_repository_registry.register(SCHEME, _files_of)


_folders: dict[str, Path] = {}


def _files_of(
    location: str, tracking_uri: str | None = None, registry_uri: str | None = None
) -> ArtifactRepository:
    uri = tracking_uri or get_tracking_uri()
    path = location.removeprefix(f"{SCHEME}:/")
    if uri not in _folders or path.startswith("/"):  # of a server that is named in it
        return MlflowArtifactsRepository(location, uri, registry_uri)
    folder = _folders[uri] / validate_path_is_safe(path)
    return LocalArtifactRepository(folder.as_uri(), uri, registry_uri)
