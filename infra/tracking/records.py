"""What tracking records: plain values that know no MLflow."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from upcycle_core.errors import Fault, InputError

KEY_LENGTH = 250
NOT_IN_KEYS = re.compile(r"[^\w.\-:/ ]")
"""What MLflow's names of parameters and metrics have none of."""


@dataclass(frozen=True)
class DatasetRecord:
    """Text that a run reads.

    Args:
        name: Domain and split, as people call it (``python/train``).
        sha256: Of its content.
        source: Where it lies, seen from the home, which may be moved.
        context: What the run does with it (``training``, ``calibration``, ``evaluation``).
        profile: Numbers about it (documents, tokens, bytes).
    """

    name: str
    sha256: str
    source: str
    context: str
    profile: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Version:
    """One version of a registered model, as the registry holds it.

    Args:
        name: The registered model.
        number: Counts from 1.
        run_id: The run that made it.
        model_id: Its files and scores in MLflow.
        description: Markdown that its page shows.
        aliases: Names that point at it (``champion``, ``challenger``).
        tags: Git commit, recipe's sha256, reason of the decision, ...
        params: What made it, flattened.
        metrics: Its scores.
        is_lost: Whether MLflow has it no more, as when somebody deleted its model there.
        is_copy: Whether somebody promoted it in MLflow from another registered model, whose tags it
            has; numbers in them are that one's.
    """

    name: str
    number: int
    run_id: str
    model_id: str
    description: str
    aliases: tuple[str, ...]
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    is_lost: bool = False
    is_copy: bool = False

    @property
    def reference(self) -> str:
        """How MLflow names it: ``models:/NAME/NUMBER``."""
        return f"models:/{self.name}/{self.number}"

    def folder(self, registry: str) -> str:
        """A name for a copy of its files, which no version of another ``registry`` has."""
        marks = "\n".join([registry, self.reference, self.model_id, self.run_id])
        return f"{self.name}-{self.number}-{hashlib.sha256(marks.encode()).hexdigest()[:12]}"

    def need_files(self) -> None:
        """Say that its files are needed.

        Raises:
            InputError: They are lost.
        """
        if self.is_lost:
            remedy = f"version {self.number} of {self.name} has lost its files in MLflow: delete "
            raise InputError(Fault("version", self.reference, remedy + "the version"))


@dataclass(frozen=True)
class Registration:
    """What a new version of a registered model is made of.

    Args:
        params: What made it; nested mappings are flattened.
        metrics: Its scores.
        tags: Of the version (Git commit, recipe's sha256, ...).
        marks: Tags of the version alone, not of the stored model, for they do not last.
        files: What is kept beside the checkpoint, in ``upcycle/`` (``recipe.yaml``, ``dvc.lock``).
        description: Markdown that the version's page shows.
        bos: What stands before a text that the model is given: auto, always or never.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    description: str = ""
    bos: str = "auto"


def key_of(name: str) -> str:
    """The key that MLflow takes for ``name``: ``C++`` is ``C__``; what is too long is cut.

    Keys are paths to it, and may have no part that a path would lose.
    """
    parts = NOT_IN_KEYS.sub("_", name)[:KEY_LENGTH].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def flatten(values: Mapping[str, Any], *, length: int, prefix: str = "") -> dict[str, str]:
    """Flatten nested mappings to dotted keys (``router.ridge_lambda``), see ``key_of``, and text.

    Args:
        values: What is to be recorded; lists become JSON.
        length: Longer text is cut there, with an ellipsis.
        prefix: Put before every key.
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, length=length, prefix=f"{prefix}{key}.")
            continue
        is_list = isinstance(value, list | tuple)
        text = json.dumps(value, default=str) if is_list else str(value)
        flat[key_of(f"{prefix}{key}")] = text if len(text) <= length else text[: length - 1] + "…"
    return flat
