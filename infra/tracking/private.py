"""What we use of MLflow that MLflow does not promise to keep. Checked with MLflow 3.17.

Nothing else of ours names these. ``USES`` says what each is for; a test asks for every one, so that
an upgrade that has moved it is told what to look for.
"""

from collections.abc import Callable
from typing import Literal

from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking._tracking_service.utils import _get_store

USES = {
    "mlflow.store.artifact.artifact_repository_registry:get_artifact_repository": (
        "deletes files that do not lie on this machine; no client's call does"
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


def deletion(uri: str, kind: Literal["run", "logged_model"]) -> Callable[[str], None] | None:
    """How what lies in a database is deleted for good, by its id.

    Args:
        uri: The database's address.
        kind: Of what.

    Returns:
        None where a server stands before the database: it takes no such order.
    """
    return getattr(_get_store(uri), f"_hard_delete_{kind}", None)


def delete_files(location: str) -> None:
    """Delete the files of a run or a stored model, wherever MLflow keeps them."""
    get_artifact_repository(location).delete_artifacts()
