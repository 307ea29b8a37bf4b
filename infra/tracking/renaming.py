"""Databases of earlier versions, which named files by folders of the machine that made them.

Such a folder is not there for a server's clients, nor after a move.
"""

from pathlib import Path

from mlflow.entities import LifecycleStage, ViewType
from sqlalchemy import make_url

from infra.settings import Settings
from infra.tracking.locations import address, home_id, local_folder
from infra.tracking.private import rename_location
from infra.tracking.runs import HOME_TAG, open_database


def rename_folders(settings: Settings) -> list[str]:
    """Name every experiment's files by the address that holds anywhere, not by a folder.

    Files of other homes in the same database, and of experiments that are not ours, stay as they
    are. So does all that was named so before.

    Returns:
        The experiments that were changed.
    """
    client, own = open_database(settings), settings.mlflow_artifacts.resolve()
    database = make_url(settings.mlflow_tracking_uri).database or ""
    is_own = settings.mlflow_tracking_uri.startswith("sqlite:") and (
        Path(database).resolve().is_relative_to(settings.home.resolve())
    )
    changed = []
    for found in client.search_experiments(ViewType.ALL):
        location = found.artifact_location
        folder = local_folder(location, settings) if location.startswith("file:") else None
        if folder is None or folder.parts[-3:] != (*own.parts[-2:], found.name):
            continue
        has_moved = is_own and (own / found.name).is_dir()
        if has_moved or folder.resolve() == own / found.name:
            if found.lifecycle_stage == LifecycleStage.ACTIVE:
                client.set_experiment_tag(found.experiment_id, HOME_TAG, home_id(settings))
            rename_location(settings.mlflow_tracking_uri, location, address(found.name))
            changed.append(found.name)
    return changed
