"""Registered models in MLflow."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

from mlflow.artifacts import download_artifacts
from mlflow.entities import LoggedModel, LoggedModelOutput, Metric
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from infra.recipe.names import masked
from infra.settings import Settings
from infra.temporary import owned_folder
from infra.tracking.descriptions import described
from infra.tracking.locations import copy_files, local_folder, side_by_side, sync_files
from infra.tracking.locks import locked
from infra.tracking.private import delete_files
from infra.tracking.records import Registration, Version, flatten
from infra.tracking.references import parsed, unknown_fault
from infra.tracking.runs import (
    METRICS_PER_CALL,
    MODEL_SCHEME,
    PARAM_LENGTH,
    Run,
    aliases_of,
    if_there,
    is_copy,
    milliseconds,
    model_id_of,
    open_database,
)
from infra.tracking.served import write_mlmodel
from upcycle_core.checkpoints.copy import place_files
from upcycle_core.checkpoints.place import make_once
from upcycle_core.errors import Fault, InputError

PROVENANCE_FOLDER = "upcycle"
CONFIGS = ("config.json", "adapter_config.json")
"""What a model has, or else an adapter; a tokenizer's does not count."""
DESCRIPTION = """`champion` is the version to use, `challenger` the newest one. Each says what
made it, and why it is champion or not. To take a champion back: `python -m flows.rollback {}`.
"""


class Registry:
    """Registered models: their versions, and the aliases that point at them.

    Args:
        settings: Names the database and the folder of files.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._uri = settings.mlflow_tracking_uri
        self._client = open_database(settings)

    def register(
        self, name: str, directory: Path, registration: Registration, *, run: Run
    ) -> Version:
        """Copy a checkpoint into MLflow and make it a new version of a registered model.

        A version appears only when its files are complete.

        Args:
            name: The registered model; created if it does not exist.
            directory: The checkpoint.
            registration: What is recorded with it.
            run: The run that made it.

        Returns:
            The version. No alias points at it yet.
        """
        model_id = self._store_model(name, directory, registration, run)
        if not self._client.search_registered_models(f"name = '{name}'"):
            self._client.create_registered_model(name, description=DESCRIPTION.format(name))
        create = partial(
            self._client.create_model_version,
            name,
            source=f"{MODEL_SCHEME}{model_id}",
            run_id=run.id,
            model_id=model_id,
            tags={**registration.tags, **registration.marks},
        )
        created = described(create, registration.description)
        # What links the model's page to its version.
        link = json.dumps([{"name": name, "version": int(created.version)}])
        self._client.set_logged_model_tags(model_id, {"mlflow.modelVersions": link})
        return self._version(created, created.aliases)

    def alone(self, name: str) -> AbstractContextManager[None]:
        """Let one command of this home at a time look at a registered model's versions and change
        them; the kernel lets go if the process dies. Not to be nested.

        Where other homes share the registry, no file locks it for all: who sets an alias asks who
        has it directly before. Between these two calls another home may still move it unseen.
        """
        mark = hashlib.sha256(name.encode()).hexdigest()[:12]
        waits = f"waiting for another command of this home that changes the model {name}"
        return locked(self._settings.mlflow_artifacts.parent / f"{mark}.lock", waits)

    def set_alias(self, version: Version, alias: str) -> None:
        """Let ``alias`` point at ``version``, and no longer at another."""
        self._client.set_registered_model_alias(version.name, alias, str(version.number))

    def set_tags(self, version: Version, tags: Mapping[str, str]) -> None:
        """Set tags of ``version``."""
        for key, value in tags.items():
            self._client.set_model_version_tag(version.name, str(version.number), key, value)

    def remove_tag(self, version: Version, key: str) -> None:
        """Remove a tag that ``version`` has."""
        self._client.delete_model_version_tag(version.name, str(version.number), key)

    def model_tags(self, name: str) -> dict[str, str]:
        """Tags of a registered model itself, which outlive its versions; none where it is none."""
        found = if_there(partial(self._client.get_registered_model, name))
        return {} if found is None else dict(found.tags)

    def set_model_tags(self, name: str, tags: Mapping[str, str]) -> None:
        """Set tags of a registered model itself."""
        for key, value in tags.items():
            self._client.set_registered_model_tag(name, key, value)

    def remove_model_tag(self, name: str, key: str) -> None:
        """Remove a tag that a registered model itself has."""
        self._client.delete_registered_model_tag(name, key)

    def describe(self, version: Version, markdown: str) -> None:
        """Set what the page of ``version`` shows on top."""
        update = partial(self._client.update_model_version, version.name, str(version.number))
        described(update, markdown)

    def description(self, version: Version) -> str:
        """What the page of ``version`` shows now."""
        return self._client.get_model_version(version.name, str(version.number)).description or ""

    def add_metrics(self, version: Version, metrics: Mapping[str, float], *, run: Run) -> None:
        """Add scores to the model of ``version``, measured in ``run``."""
        version.need_files()
        self._log_scores(version.model_id, metrics, run)

    def find(self, name: str, alias: str) -> Version | None:
        """Return the version that ``alias`` points at, or ``None`` if there is none."""
        version = if_there(partial(self._client.get_model_version_by_alias, name, alias))
        return None if version is None else self._version(version, version.aliases)

    def pointed(self, name: str, alias: str) -> int | None:
        """The number of the version that ``alias`` points at now; None if there is none.

        Raises:
            MlflowException: The registry cannot be read.
        """
        found = self.followed(name, alias)
        return None if found is None else found[0]

    def followed(self, name: str, alias: str) -> tuple[int, int] | None:
        """As ``pointed``, and when that version was made, in milliseconds: numbers begin anew in a
        registered model that is deleted and made again.

        One query, however many versions there are: for who asks again and again.
        """
        found = if_there(partial(self._client.get_model_version_by_alias, name, alias))
        return None if found is None else (int(found.version), int(found.creation_timestamp))

    def versions(self, name: str) -> list[Version]:
        """Return every version of the registered model, oldest first; none of one there is not."""
        if "'" in name:  # which would end the name in MLflow's query
            return []
        # Which a search leaves out. Read after it, one may point at a version it has not seen.
        aliases = aliases_of(self._client, name)
        found = self._client.search_model_versions(f"name = '{name}'")
        versions = (self._version(v, aliases.get(int(v.version), ())) for v in found)
        return sorted(versions, key=lambda version: version.number)

    def text(self, version: Version, file: str) -> str | None:
        """What is kept beside the checkpoint as ``file`` (``dvc.lock``); None if nothing is.

        A version that others registered has nothing.

        Raises:
            InputError: The files of the version cannot be read.
        """
        version.need_files()
        if not version.model_id:
            return None
        path = f"{PROVENANCE_FOLDER}/{file}"
        try:
            listed = self._client.list_logged_model_artifacts(version.model_id, PROVENANCE_FOLDER)
            if path not in {entry.path for entry in listed}:
                return None
            location = self._client.get_logged_model(version.model_id).artifact_location
            with owned_folder("registry") as folder:
                own = {"dst_path": str(folder), "tracking_uri": self._uri}
                return Path(download_artifacts(f"{location}/{path}", **own)).read_text()
        except (MlflowException, OSError, UnicodeError) as error:
            said = masked(str(error))
            remedy = f"its {file} cannot be read ({said}); see that MLflow's files are there"
            raise InputError(Fault("version", version.reference, remedy)) from error

    def attach(self, version: Version, files: Mapping[str, str]) -> None:
        """Keep texts beside the checkpoint, by file name; one that is there is replaced."""
        version.need_files()
        self._keep_files(version.model_id, files)

    def download(self, reference: str, destination: Path) -> Path:
        """Copy a registered checkpoint to ``destination``, all of it or nothing.

        Args:
            reference: ``models:/NAME@ALIAS`` or ``models:/NAME/NUMBER``.
            destination: A path where nothing lies yet.

        Returns:
            ``destination``.

        Raises:
            InputError: There is no such version, something lies at ``destination``, or the
                version's files cannot be read from here.
        """
        if destination.exists():
            raise InputError(Fault("destination", str(destination), "exists; name a new folder"))
        self.referenced(reference)  # MLflow gives what was deleted, until it is gone for good
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".download-", dir=destination.parent))
        try:
            folder = download_artifacts(
                reference, dst_path=str(staging), tracking_uri=self._uri, registry_uri=self._uri
            )
            if not any(path.name in CONFIGS for path in Path(folder).rglob("*config.json")):
                raise InputError(Fault("model", reference, self._empty(reference)))
            Path(folder).rename(destination)
        except MlflowException as error:
            remedy = f"its files cannot be copied to {destination.parent} ({masked(str(error))}); "
            remedy += "see that they are there, and that there is room"
            raise InputError(Fault("model", reference, remedy)) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return destination

    def lend(self, reference: str, destination: Path) -> Path:
        """As ``download``, for who reads alone: weights that lie on this disk stay on it once.

        Raises:
            InputError: As ``download``.
        """
        place = self.place(reference)
        if place is None or destination.exists():
            return self.download(reference, destination)
        place_files(place, destination)
        return destination

    def fetch(self, reference: str, folder: Path) -> Path:
        """Return the checkpoint directory of a registered model, ours or one that MLflow logged.

        Args:
            reference: ``models:/NAME@ALIAS`` or ``models:/NAME/NUMBER``.
            folder: Each version is copied there once.

        Raises:
            InputError: There is no such version.
        """
        version = self.referenced(reference)
        out = folder / version.folder(self._uri)
        lent = partial(self.lend, version.reference)
        return make_once(out, lambda new: side_by_side(lent(new / ".files"), new))

    def place(self, reference: str) -> Path | None:
        """Where a version's files lie on this machine; None where they do not.

        Args:
            reference: ``models:/NAME@ALIAS`` or ``models:/NAME/NUMBER``.

        Raises:
            InputError: There is no such version.
        """
        version = self.referenced(reference)
        model = self._client.get_logged_model(version.model_id) if version.model_id else None
        folder = None if model is None else local_folder(model.artifact_location, self._settings)
        return folder if folder is not None and (folder / "config.json").is_file() else None

    def _empty(self, reference: str) -> str:
        """Why nothing came of a version's files."""
        model_id = self.referenced(reference).model_id
        where = self._client.get_logged_model(model_id).artifact_location if model_id else "?"
        said = str(local_folder(where, self._settings) or masked(where))
        return (
            f"no config.json came from {said}, where its files are: that place must be reachable "
            "from this machine; or ask the server that has them: MLFLOW_TRACKING_URI=http://HOST:PORT"
        )

    def referenced(self, reference: str) -> Version:
        """The version that ``NAME@ALIAS`` or ``NAME/NUMBER`` names, for its files.

        Args:
            reference: With or without ``models:/`` before it.

        Raises:
            InputError: There is no such version, or its files are lost.
        """
        name, mark, alias = parsed(reference)
        versions = self.versions(name)
        for version in versions:
            if (alias in version.aliases) if mark == "@" else (alias == str(version.number)):
                version.need_files()
                return version
        names = [model.name for model in self._client.search_registered_models()]
        raise InputError(unknown_fault(reference, versions, names))

    def _store_model(self, name: str, directory: Path, registration: Registration, run: Run) -> str:
        client = self._client
        model = client.create_logged_model(
            run.experiment_id,
            name=name,
            source_run_id=run.id,
            tags=dict(registration.tags),
            params=flatten(registration.params, length=PARAM_LENGTH),
            model_type="transformers",
        )
        try:
            self._copy_files(model.model_id, directory, registration, run)
        except BaseException:
            self._remove_files(model)
            with suppress(MlflowException):  # a full disk: the database says no more
                client.finalize_logged_model(model.model_id, "FAILED")
            raise
        client.finalize_logged_model(model.model_id, "READY")
        self._log_scores(model.model_id, registration.metrics, run)
        client.log_outputs(run.id, [LoggedModelOutput(model.model_id, step=0)])
        return model.model_id

    def _remove_files(self, model: LoggedModel) -> None:
        """Remove what was copied of a model, which may be what filled the disk."""
        folder = local_folder(model.artifact_location, self._settings)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        with suppress(MlflowException, OSError):  # the error that brought us here is the one to see
            delete_files(model.artifact_location, self._uri)

    def _log_scores(self, model_id: str, metrics: Mapping[str, float], run: Run) -> None:
        now = milliseconds()
        scores = [
            Metric(key, float(value), now, 0, model_id=model_id, run_id=run.id)
            for key, value in metrics.items()
        ]
        for start in range(0, len(scores), METRICS_PER_CALL):
            self._client.log_batch(run.id, metrics=scores[start : start + METRICS_PER_CALL])

    def _copy_files(
        self, model_id: str, directory: Path, registration: Registration, run: Run
    ) -> None:
        if not directory.is_dir():  # MLflow would copy nothing and call it done
            raise NotADirectoryError(directory)
        location = self._client.get_logged_model(model_id).artifact_location
        if not copy_files(directory, location, self._settings):
            self._client.log_model_artifacts(model_id, str(directory))
        with owned_folder("registry") as folder:
            own = {"model_id": model_id, "run_id": run.id, "bos": registration.bos}
            write_mlmodel(folder / "served", directory, **own)
            self._client.log_model_artifacts(model_id, str(folder / "served"))
        self._keep_files(model_id, registration.files)

    def _keep_files(self, model_id: str, files: Mapping[str, str | bytes]) -> None:
        """Keep files beside the checkpoint; with all that lies there they are on the disk then."""
        with owned_folder("registry") as folder:
            for file, content in files.items():
                data = content.encode() if isinstance(content, str) else content
                (folder / file).write_bytes(data)
            self._client.log_model_artifacts(model_id, str(folder), PROVENANCE_FOLDER)
        sync_files(self._client.get_logged_model(model_id).artifact_location, self._settings)

    def _version(self, entity: ModelVersion, aliases: Iterable[str]) -> Version:
        model_id = model_id_of(self._client, entity)
        call = partial(self._client.get_logged_model, model_id or "")
        model = None if model_id is None else if_there(call)
        return Version(
            name=entity.name,
            number=int(entity.version),
            run_id=entity.run_id or "",
            model_id=model.model_id if model else "",
            description=entity.description or "",
            aliases=tuple(aliases),
            tags=dict(entity.tags),
            params=dict(model.params) if model else {},
            metrics={metric.key: metric.value for metric in (model and model.metrics) or ()},
            is_lost=model is None and model_id is not None,
            is_copy=is_copy(entity),
        )
