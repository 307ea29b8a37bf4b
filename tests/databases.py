"""MLflow's tables, made once: each new home would run all migrations, for a second and more."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from infra import settings
from infra.tracking.private import create_database

TABLES = Path(os.environ["UPCYCLE_TESTS_SHARED"]) / "mlflow-tables"
"""A database that has just been made."""


def with_database(home: Path) -> None:
    """Give ``home``, unless it is one already, an empty database where a flow would make it."""
    if not home.exists():
        copy_tables(home)


def home_with_database(home: Path) -> settings.Settings:
    """The settings of a folder, empty or not there yet, that is a home with an empty database."""
    copy_tables(home)
    return settings.read({"UPCYCLE_HOME": str(home)})


def copy_tables(home: Path) -> None:
    """Put an empty database where a flow would make it, unless there is one."""
    place = home / "mlflow" / "mlflow.db"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_tables(), place)


def _tables() -> Path:
    with TABLES.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first makes them for all
        if not TABLES.exists():
            made = Path(tempfile.mkdtemp(dir=TABLES.parent)) / "mlflow.db"
            create_database(f"sqlite:///{made}")
            made.rename(TABLES)
    return TABLES
