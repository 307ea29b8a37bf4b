"""A recipe that is to be deployed, looked at as its flows will."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.services.api import DeploymentError
from infra.settings import REPOSITORY, Settings, environment_of

CHECK = "tasks.offered"
"""Run, and not imported: methods are on a floor above this one."""


def check_recipe(
    settings: Settings,
    recipe: Path,
    added: Sequence[Path],
    changes: Sequence[str],
    *,
    sees_paths: bool,
) -> bool:
    """Refuse a recipe that its flows would refuse, each night anew.

    Args:
        settings: Of the flows.
        recipe: The recipe's file.
        added: Files of tasks or rows beside it.
        changes: ``dotted.key=value`` settings.
        sees_paths: Whether texts and models are looked for on this machine.

    Returns:
        Whether models of its method grow, shrink and learn.

    Raises:
        DeploymentError: With every fault.
    """
    options = [word for change in changes for word in ("--set", change)]
    options += [] if sees_paths else ["--elsewhere"]
    done = subprocess.run(
        [sys.executable, "-m", CHECK, str(recipe), *map(str, added), *options],
        env=environment_of(settings, PYTHONPATH=str(REPOSITORY)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DeploymentError(f"Nothing was deployed:\n{done.stderr.strip()}")
    return bool(json.loads(done.stdout)["lives"])
