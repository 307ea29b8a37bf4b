"""Which checkpoint a training continues from, and why it must not."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from upcycle_core.errors import Fault, InputError
from upcycle_core.training import workers
from upcycle_core.training.checkpoints import Checkpoint, discard_incomplete, newest_complete
from upcycle_core.training.config import (
    SAME_WEIGHTS,
    ExpertTrainingConfig,
    MoEObjective,
    TrainingConfig,
)
from upcycle_core.training.extension import Extension

_ABSENT = "nothing"
_STATE = "trainer_state.json"


def checkpoint_to_resume(checkpoints: Path, record: Mapping[str, Any]) -> Checkpoint | None:
    """The newest whole checkpoint, or None; what a kill left half-written is deleted.

    Args:
        checkpoints: Directory of one training's checkpoints.
        record: ``training_record`` of the training that goes on.

    Raises:
        InputError: The checkpoint is of another training; every difference is listed.
    """
    if workers.rank() == 0:
        one_is_kept = record["config"]["keep"] == "best" or bool(record["extension"])
        discard_incomplete(checkpoints, one_is_kept=one_is_kept)
    workers.wait()
    found = newest_complete(checkpoints)
    others = list(differences(found.record, record)) if found else []
    if others:
        remedy = (
            "holds checkpoints of another training; give an empty directory, or what it was "
            "trained with: " + "; ".join(others)
        )
        raise InputError(Fault("checkpoints", str(checkpoints), remedy))
    return found


def training_record(
    config: TrainingConfig,
    seed: int,
    objective: MoEObjective | None,
    fingerprint: Mapping[str, Any],
    extension: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What decides a training, for the markers of its checkpoints.

    Args:
        config: What is done.
        seed: Of what is random.
        objective: Of a Mixture-of-Experts.
        fingerprint: What the rows are made from, JSON values.
        extension: Settings of what a paper adds, JSON values.
    """
    return {
        "config": asdict(config),
        "seed": seed,
        "objective": asdict(objective) if objective else None,
        "fingerprint": dict(fingerprint),
        "extension": dict(extension or {}),
    }


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """One line a key, dotted, in which two records differ, with both values.

    A key that a checkpoint of an older version lacks has its default there. What does not change
    the result is passed over; with an extension it matters which steps have a checkpoint.
    """
    old, new = _flat(_complete(there)), _flat(_complete(here))
    same = {f"config.{name}" for name in SAME_WEIGHTS}
    if here.get("extension"):
        same.remove("config.checkpoint_steps")
    for key in sorted((old | new).keys() - same):
        left, right = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if left != right:
            yield f"{key} was {_shown(left)}, is {_shown(right)}"


def read_curves(checkpoint: Checkpoint) -> list[dict[str, float]]:
    """Every point logged until ``checkpoint``, those before a kill included."""
    state = json.loads((checkpoint.directory / _STATE).read_text())
    return [{k: v for k, v in point.items() if k != "epoch"} for point in state["log_history"]]


def kept_step(
    points: list[dict[str, float]], config: TrainingConfig, extension: Extension | None = None
) -> int | None:
    """The step whose checkpoint a training would end with, as far as ``points`` go.

    Among the checkpoints that the extension may keep, the last, or with ``keep`` = best that of the
    lowest validation loss, the first of equal ones. Once a checkpoint has lost to a later one it
    never wins again, so that it need not be stored.

    Args:
        points: The curves, in the order of steps.
        config: Which steps have checkpoints, and which is kept.
        extension: Which may be kept; all without one.

    Returns:
        A step, or None where no checkpoint may be kept yet.
    """
    merged: dict[int, dict[str, float]] = {}
    for point in points:
        step = int(point["step"])
        if "loss" in point or "validation_loss" in point:
            merged.setdefault(step, {}).update(point)
    saved = [
        point
        for step, point in merged.items()
        if (step % config.checkpoint_steps == 0 or step == config.steps)
        and (extension is None or extension.may_keep(point))
    ]
    if config.keep == "best":
        saved = sorted(_validated(saved), key=lambda point: point["validation_loss"])[:1]
    return max((int(point["step"]) for point in saved), default=None)


def validation_loss(points: list[dict[str, float]], step: int | None = None) -> float | None:
    """The validation loss at ``step``, by default the last; None if it was not validated."""
    found = {int(point["step"]): point["validation_loss"] for point in _validated(points)}
    return found.get(max(found) if step is None else step) if found else None


def _validated(points: list[dict[str, float]]) -> list[dict[str, float]]:
    return [point for point in points if "validation_loss" in point]


def _complete(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with every key of today, as JSON holds it."""
    objective = record.get("objective")
    whole = {
        "config": asdict(ExpertTrainingConfig()) | record["config"],
        "seed": record["seed"],
        "objective": asdict(MoEObjective()) | objective if objective else {},
        "fingerprint": dict(record.get("fingerprint", {})),
        "extension": dict(record.get("extension", {})),
    }
    return json.loads(json.dumps(whole))


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{dotted key: value} of nested mappings."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inside = isinstance(value, dict)
        flat |= _flat(value, f"{before}{key}.") if inside else {f"{before}{key}": value}
    return flat


def _shown(value: Any) -> str:
    return value if value is _ABSENT else repr(value)
