"""MLflow's tables, made once: each new home would run all migrations, for a second and more."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

from infra.tracking.private import create_database


def with_database(home: Path) -> None:
    """Give ``home``, unless it is one already, an empty database where a flow would make it."""
    if home.exists():
        return
    place = home / "mlflow" / "mlflow.db"
    place.parent.mkdir(parents=True)
    shutil.copyfile(_empty(), place)


@cache
def _empty() -> Path:
    place = Path(tempfile.mkdtemp()) / "mlflow.db"
    create_database(f"sqlite:///{place}")
    return place
