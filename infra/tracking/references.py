"""What is said to who names a version of a registered model, and there is none of that name."""

from collections.abc import Sequence
from pathlib import Path

from infra.tracking.records import Version
from infra.tracking.runs import MODEL_SCHEME
from upcycle_core.errors import Fault

SHOWN = 5
"""Versions, or names, that a fault lists."""


def parsed(reference: str) -> tuple[str, str, str]:
    """Name, ``@`` or ``/``, and alias or number; the latter are empty where no version is named.

    Args:
        reference: ``NAME@ALIAS`` or ``NAME/NUMBER``, with or without ``models:/`` before it.
    """
    name, at, alias = reference.removeprefix(MODEL_SCHEME).partition("@")
    return (name, at, alias) if at else name.partition("/")


def unknown_fault(reference: str, versions: Sequence[Version], names: Sequence[str]) -> Fault:
    """Why a reference names no version, and which there are.

    Args:
        reference: As it was given.
        versions: Of the model that it names.
        names: Of all registered models.
    """
    name, _, alias = parsed(reference)
    if versions:
        aliases = sorted({f"@{alias}" for version in versions for alias in version.aliases})
        there = [*aliases, *(f"/{version.number}" for version in versions[-SHOWN:])]
        what = "not in the registry" if alias else "names no version"
        return Fault("model", reference, f"{what}; of {name} there is {', '.join(there)}")
    what = "is a path, and no registered model" if _is_path(reference) else "not in the registry"
    if not names:
        remedy = f"{what}, which holds no model yet: flows that make one register it at their end"
        return Fault("model", reference, remedy)
    alike = sorted(names, key=lambda other: (not name or name not in other, other))
    more = f", and {len(names) - SHOWN} more (make up)" if len(names) > SHOWN else ""
    scheme = MODEL_SCHEME if reference.startswith(MODEL_SCHEME) else ""
    remedy = f"{what}; name a version that is, {scheme}{alike[0]}@champion or "
    remedy += f"{scheme}{alike[0]}/NUMBER. Registered models: {', '.join(alike[:SHOWN])}{more}"
    return Fault("model", reference, remedy)


def _is_path(reference: str) -> bool:
    name = reference.removeprefix(MODEL_SCHEME)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        return "://" not in name
    return bool(name) and Path(name).exists()
