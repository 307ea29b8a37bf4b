"""What the DVC remote holds in parts alone, of a registered version that is restored."""

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager

from infra.tracking.records import Version
from infra.tracking.registry import Registry
from tasks.engine.stage import Session, Stage
from tasks.engine.workspace import PROVENANCE, Workspace
from tasks.release.champion import changed_files
from tasks.release.versions import COMPRESSED_TAG, MODEL_TAG
from upcycle_core.errors import InputError

_logger = logging.getLogger(__name__)

Opened = Callable[[], AbstractContextManager[None]]


def recover(
    stage: Stage,
    session: Session,
    *,
    registry: Registry,
    version: Version,
    pull: Callable[[], None],
    compute: Opened,
) -> None:
    """Bring back what ``stage`` has published: from the nearest of three places.

    They are the version's own files, where they are those that were registered; the remote, where
    an earlier version of this project pushed them; and the parts, put together again.

    Args:
        stage: The stage; ``Stage.in_parts``. What it reads is in the workspace.
        session: The version's recipe at work, in the workspace that is restored.
        registry: Where the version is.
        version: The version.
        pull: Brings it from the remote; ``InputError`` where it is not there.
        compute: Opens the Ray that puts the parts together.

    Raises:
        InputError: A part is missing, or does not fit what the version was made from.
    """
    if _taken(stage, session.workspace, registry, version):
        return
    try:
        pull()
    except InputError as error:  # a remote that holds the parts alone, or a damaged one
        _logger.info("%s is put together again from its parts: %s", stage.artifact(""), error)
        with compute():
            stage.ensure(session)


def _taken(stage: Stage, workspace: Workspace, registry: Registry, version: Version) -> bool:
    """Whether the version's own files were there, whole, and are the workspace's now."""
    if COMPRESSED_TAG in version.tags:
        return False  # they are another model
    artifact = stage.artifact("")
    lent = workspace.staging / f"lent-{artifact}"
    try:
        registry.lend(version.reference, lent)
        if changed := changed_files(lent, version.tags.get(MODEL_TAG)):
            _logger.warning(
                "%s: not as registered: %s; looking elsewhere",
                version.reference,
                ", ".join(changed),
            )
            return False
        files = json.loads((lent / PROVENANCE).read_text())["files"]
        staged = workspace.stage(artifact)
        for name in (*files, PROVENANCE):
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(lent / name, staged / name)
        staged.rename(workspace.path(artifact))
        return True
    except (InputError, OSError, ValueError, KeyError) as error:
        _logger.warning("%s: its files cannot be had (%s)", version.reference, error)
        return False
    finally:
        shutil.rmtree(lent, ignore_errors=True)
