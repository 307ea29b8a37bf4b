"""Names and addresses in recipes: what may reach a folder, a shell, a URL or a query; no secrets.

What passes here needs no quoting anywhere: not in a file name, in the commands of dvc.yaml (which
DVC hands to a shell), in MLflow's filter strings, nor in the address of a page.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from upcycle_core.errors import Fault

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
BESIDE_WORKSPACES = ("mlflow", "models", "prefect", "remote", "services")
"""Folders that lie where workspaces do."""
BESIDE_DOMAINS = ("average", "instructions", "licences", "provenance", "seed")
"""Files that lie where a file of each domain does, and the column beside theirs."""

# scheme://user:password@host, https://token@host; what an address may carry as its query. Keys of
# clouds have slashes in them; host:9000/folder@v1 is a port.
PASSWORD = re.compile(r"(\w://[^/\s:@]*):(?!\d{2,5}/)[^\s]+@")
TOKEN = re.compile(r"(https?://)[^/\s:@]+@", re.I)
SIGNATURE = re.compile(r"([?&](?:[\w-]*(?:sig|signature|token|secret|password|key))=)[^&\s]+", re.I)
SECRET_KEY = re.compile(r"password|passwd|secret|token$|api_?key|access_?key|credential", re.I)


def name_fault(where: str, name: str, taken: tuple[str, ...] = ()) -> Iterator[Fault]:
    """What is wrong with a name that folders are called by.

    Args:
        where: Where the recipe gives it.
        name: The name.
        taken: Names that mean something else in the same folder.
    """
    if not NAME.fullmatch(name):
        remedy = "names a folder in the workspace and nothing outside it; use lower-case letters, "
        yield Fault(where, name, f"{remedy}digits, - and _, 64 at most")
    elif name in taken:
        yield Fault(where, name, "lies in the place of something else; choose another name")


def model_name_fault(where: str, name: str) -> Iterator[Fault]:
    """What is wrong with the name of a registered model."""
    if not MODEL_NAME.fullmatch(name):
        remedy = "names a registered model; use letters, digits, ., - and _, 128 at most"
        yield Fault(where, name, remedy)


def remote_fault(where: str, remote: str) -> Iterator[Fault]:
    """What is wrong with a place that DVC is told on its command line."""
    if not remote or remote.startswith("-") or not remote.isprintable():
        yield Fault(where, remote, "names no place; give a directory or a URL")


def secret_faults(values: object, where: str = "") -> Iterator[Fault]:
    """Passwords and signatures in a recipe: it is recorded in full, by DVC, MLflow and Prefect.

    Args:
        values: Plain values of the recipe, or of a part.
        where: The dotted key of that part.
    """
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from secret_faults(value, f"{where}.{key}".lstrip("."))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from secret_faults(value, where)
    elif isinstance(values, str) and masked(values) != values:
        remedy = (
            "holds a secret, and a recipe is recorded where others read it; write it without, and "
            "give the secret in the environment (AWS_SECRET_ACCESS_KEY, HF_TOKEN, ...) or with "
            "`dvc remote modify --local` in the workspace"
        )
        yield Fault(where, masked(values), remedy)


def masked(value: Any, key: str = "") -> Any:
    """``value`` as it may be shown: what looks like a secret in it is hidden.

    Args:
        value: Plain values.
        key: What it is called; ``password`` and its like hide a text whole.
    """
    if isinstance(value, Mapping):
        return {name: masked(part, str(name)) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [masked(part, key) for part in value]
    if not isinstance(value, str):
        return value
    if SECRET_KEY.search(key):
        return "***"
    for secret, shown in ((PASSWORD, ":***@"), (TOKEN, "***@"), (SIGNATURE, "***")):
        value = secret.sub(rf"\1{shown}", value)
    return value
