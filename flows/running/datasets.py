"""Texts that runs read, as MLflow lists them."""

import json
from collections.abc import Iterable
from typing import Any

from infra.recipe.schema import Recipe
from infra.tracking.records import DatasetRecord
from tasks.engine.workspace import Workspace

CORPORA, INSTRUCTIONS = "corpora", "instructions"
CONTEXT = {
    "train": "training",
    "calibration": "calibration",
    "heldout": "evaluation",
    "elsewhere": "calibration",
}


def corpora_of(workspace: Workspace, recipe: Recipe) -> list[DatasetRecord]:
    """Every split of every domain's text."""
    return [record for domain in recipe.domains for record in _of_domain(workspace, domain)]


def instructions_of(workspace: Workspace) -> list[DatasetRecord]:
    """Every file of questions and answers."""
    return [
        DatasetRecord(
            name=f"{INSTRUCTIONS}/{name}",
            sha256=entry["sha256"],
            source=f"{workspace.root.name}/{INSTRUCTIONS}/{name}",
            context="training" if name.startswith("train/") else "evaluation",
            profile={"instances": entry["instances"]},
        )
        for name, entry in _manifest(workspace, INSTRUCTIONS)["files"].items()
    ]


def read_by(workspace: Workspace, inputs: Iterable[str]) -> list[DatasetRecord]:
    """What of them a stage reads.

    Args:
        workspace: Where it runs.
        inputs: What the stage declares, below the workspace: ``corpora/law/train``, ``seed``.
    """
    wanted = set(inputs)
    domains = sorted({name.split("/")[1] for name in wanted if name.startswith(f"{CORPORA}/")})
    found = [record for domain in domains for record in _of_domain(workspace, domain)]
    texts = [record for record in found if f"{CORPORA}/{record.name}" in wanted]
    return texts + (instructions_of(workspace) if INSTRUCTIONS in wanted else [])


def _of_domain(workspace: Workspace, domain: str) -> list[DatasetRecord]:
    return [
        DatasetRecord(
            name=f"{domain}/{split}",
            sha256=entry["sha256"],
            source=f"{workspace.root.name}/{CORPORA}/{domain}/{split}",
            context=CONTEXT[split],
            profile={key: entry[key] for key in ("documents", "tokens", "bytes")},
        )
        for split, entry in _manifest(workspace, f"{CORPORA}/{domain}")["splits"].items()
    ]


def _manifest(workspace: Workspace, artifact: str) -> Any:
    return json.loads((workspace.path(artifact) / "manifest.json").read_text())
