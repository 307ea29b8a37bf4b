"""Where MLflow's files lie: addresses that hold on every machine, and folders on this one.

MLflow's database names files as ``mlflow-artifacts:/EXPERIMENT/RUN/artifacts``, wherever they are.
A server finds them below its ``--artifacts-destination`` for everybody who has its address; a flow
that works on the database itself finds them below the home. So a home can be moved.
"""

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from infra.cluster.calls import near
from infra.durable import sync_tree, write_atomically
from infra.settings import Settings
from infra.tracking.private import SCHEME, create_database, keep_files_in
from upcycle_core.checkpoints.copy import TEMPLATES, place_files
from upcycle_core.durable import sync


def address(name: str) -> str:
    """Where the files of an experiment are, for the database."""
    return f"{SCHEME}:/{name}"


def is_database(settings: Settings) -> bool:
    """Whether MLflow is its database here, with no server before it."""
    return not settings.mlflow_tracking_uri.startswith("http")


def holds_files(settings: Settings) -> bool:
    """Whether MLflow's files lie in this home: not if a server elsewhere is asked for them."""
    own = settings.mlflow_tracking_uri.rstrip("/") == settings.mlflow_url
    return own or is_database(settings)


def local_folder(location: str, settings: Settings) -> Path | None:
    """The folder on this machine that an address of MLflow's is; None of any other."""
    parsed = urlparse(location)
    if parsed.scheme == "file":  # as they were named before
        return Path(url2pathname(parsed.path))
    inside = Path(parsed.path.lstrip("/"))
    if parsed.scheme != SCHEME or parsed.netloc or ".." in inside.parts:
        return None
    return settings.mlflow_artifacts / inside if holds_files(settings) else None


def copy_files(directory: Path, location: str, settings: Settings) -> bool:
    """Copy what is published to an address; weights are on the disk once where that is on it.

    Returns:
        Whether it is a folder of this machine; nothing was copied if it is not.
    """
    folder = local_folder(location, settings)
    if folder is None:
        return False
    _beside(folder, settings)(place_files, directory, folder)
    return True


def sync_files(location: str, settings: Settings) -> None:
    """Bring all files at an address to the disk, with their names; a server sees to its own."""
    folder = local_folder(location, settings)
    if folder is None:
        return
    _beside(folder, settings)(sync_tree, folder)
    for parent in folder.parents:
        if parent.is_relative_to(settings.mlflow_artifacts):
            sync(parent)


def _beside(folder: Path, settings: Settings) -> Callable[..., Any]:
    """What calls a function where a folder lies."""
    is_shared = folder.is_relative_to(settings.home)  # by all machines of a cluster
    return near if is_shared else lambda function, *arguments: function(*arguments)


def use_files(settings: Settings) -> None:
    """Let MLflow find what lies in this home without a server."""
    settings.mlflow_artifacts.mkdir(parents=True, exist_ok=True)
    if holds_files(settings):
        keep_files_in(settings.mlflow_artifacts, settings.mlflow_tracking_uri)


def home_id(settings: Settings) -> str:
    """What tells this home from others that share its database, and moves with it."""
    return _home_id(settings).read_text()


def prepare_home(settings: Settings) -> None:
    """Make the home's id, and its database unless a server has it; the database's lock is held."""
    if _home_id(settings).exists():
        return
    if is_database(settings):
        create_database(settings.mlflow_tracking_uri)
    write_atomically(_home_id(settings), uuid.uuid4().hex)


def _home_id(settings: Settings) -> Path:
    return settings.mlflow_artifacts.parent / "home-id"


def side_by_side(files: Path, out: Path) -> None:
    """Move a registered model's files into ``out``: checkpoint and tokenizer, side by side.

    MLflow's own flavour of transformers keeps them in folders of their own.
    """
    for folder in (files, files / "model", files / "components" / "tokenizer", files / "tokenizer"):
        for path in sorted([*folder.glob("*"), *folder.glob(TEMPLATES)]):
            target = out / path.relative_to(folder)
            if path.is_file() and not target.exists():
                target.parent.mkdir(exist_ok=True)
                path.rename(target)
    shutil.rmtree(files)
