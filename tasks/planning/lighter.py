"""Settings with which a training would fit, found where it does not."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, TypeVar

from infra.recipe.resources import Resources, WorkerResources
from tasks.planning.row import copied, dividing, gigabytes
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.planning.estimate import training_bytes
from upcycle_core.planning.rates import Arithmetic
from upcycle_core.planning.rehearsal import trained_parameters
from upcycle_core.planning.shape import Shape
from upcycle_core.training.checks import LARGEST_BF16_BETA
from upcycle_core.training.config import ExpertMethod, ExpertTrainingConfig, TrainingConfig

C = TypeVar("C", StatisticsConfig, EvaluationConfig)
SMALLER: Mapping[ExpertMethod | None, tuple[ExpertMethod, ...]] = MappingProxyType(
    {"full": ("ffn", "lora"), "layers": ("ffn", "lora"), "ffn": ("lora",)}
)
"""Ways to train an expert that hold less, the lightest last. What is no expert has one way."""
RECOMPUTED = "gradient_checkpointing = true"
DOUBLINGS = 6
"""Of workers, from one to as many GPUs as a machine has."""


def method_of(config: TrainingConfig) -> ExpertMethod | None:
    """How an expert is trained; None of what is none."""
    return config.method if isinstance(config, ExpertTrainingConfig) else None


def worker_bytes(shape: Shape, config: TrainingConfig, resources: WorkerResources) -> int:
    """Bytes of memory of one worker of a training at its peak."""
    divided, device = dividing(resources), resources.device
    needed = training_bytes(shape, config, device=device, workers=divided)
    return needed + copied(resources, trained_parameters(shape, method_of(config) or "full"))


@dataclass(frozen=True)
class Lighter:
    """What says the settings with which a training fits, each with what a worker holds then.

    A rehearsal of each takes a second: it is asked where a training does not fit.

    Args:
        shape: What is trained.
        config: How.
        resources: Of a worker.
        where: The section of a recipe that says how.
        kind: The section of ``compute`` that says with what.
    """

    shape: Shape
    config: TrainingConfig
    resources: WorkerResources
    where: str
    kind: str

    def __call__(self, there: int, gpus: int) -> list[str]:
        """The settings.

        Args:
            there: Bytes that a worker may hold.
            gpus: Of the machine.
        """
        changes = self._changes()
        settings = {self._said(each): partial(self._bytes, each) for each in changes}
        every = {name: value for each in changes for name, value in each.items()}
        whole = (self._said(every), partial(self._bytes, every))
        return [*fitting(settings, whole, there), *self._divided(there, gpus)]

    def _changes(self) -> list[dict[str, Any]]:
        config = self.config
        found: list[dict[str, Any]] = []
        if not config.gradient_checkpointing:
            found.append({"gradient_checkpointing": True})
        if config.batch_size > 1:
            rows = config.batch_size * config.gradient_accumulation
            found.append({"batch_size": 1, "gradient_accumulation": rows})  # of a step, as before
        slowest = max(config.adam_beta1, config.adam_beta2)
        if config.optimizer_state == "fp32" and slowest <= LARGEST_BF16_BETA:
            found.append({"optimizer_state": "bf16"})
        return found + [{"method": method} for method in SMALLER.get(method_of(config), ())]

    def _said(self, changes: Mapping[str, Any]) -> str:
        return " and ".join(f"{self.where}.{name} = {_said(of)}" for name, of in changes.items())

    def _bytes(self, changes: Mapping[str, Any]) -> int:
        return worker_bytes(self.shape, replace(self.config, **changes), self.resources)

    def _divided(self, there: int, gpus: int) -> Iterator[str]:
        def size(resources: WorkerResources, **changes: Any) -> int:
            accumulated = shared(self.config, resources)
            config = replace(self.config, gradient_accumulation=accumulated, **changes)
            return worker_bytes(self.shape, config, resources)

        sizes: dict[str, Callable[[WorkerResources], int]] = {"": size}
        if not self.config.gradient_checkpointing:
            recomputed = partial(size, gradient_checkpointing=True)
            sizes[f" and {self.where}.{RECOMPUTED}"] = recomputed
        return divided(self.kind, self.resources, sizes, there, gpus)


def fitting(
    settings: Mapping[str, Callable[[], int]], whole: tuple[str, Callable[[], int]], there: int
) -> list[str]:
    """Those of some settings with which a training fits; all together where none does alone.

    Args:
        settings: {setting: says the bytes of a worker with it}
        whole: All of them together.
        there: Bytes that a worker may hold.
    """
    asked = [*settings.items()]
    for group in (asked, [whole] if len(asked) > 1 else []):
        sizes = ((setting, of()) for setting, of in group)
        found = [f"{said} (then {gigabytes(size)})" for said, size in sizes if size <= there]
        if found:
            return found
    return []


def shared(config: TrainingConfig, resources: WorkerResources) -> int:
    """Micro-batches of a step, of which each worker has as many."""
    return -(-config.gradient_accumulation // resources.workers) * resources.workers


def divided(
    kind: str,
    own: WorkerResources,
    sizes: Mapping[str, Callable[[WorkerResources], int]],
    there: int,
    gpus: int,
) -> Iterator[str]:
    """More workers, who divide what one holds, on this machine's GPUs or on several machines.

    Who shares a GPU with others gets one of its own first.

    Args:
        kind: The section of ``compute``.
        own: What it says now.
        sizes: {what else is set: bytes of a worker of such resources then}, the least change first.
        there: Bytes that one may hold.
        gpus: Of the machine.
    """
    each = max(1.0, own.gpus) if own.gpus else 0.0
    count = int(gpus / each) if each else 0
    numbers = [2**n for n in range(1, DOUBLINGS + 1) if own.workers <= 2**n <= count]
    for (more, size), n in product(sizes.items(), numbers):
        found = replace(own, workers=n, sharding="full", gpus=each)
        if found != own and size(found) <= there:
            whole = "" if each == own.gpus else " and gpus = 1"
            said = f"compute.{kind}.workers = {n} and sharding = full{whole}{more} (then "
            yield f"{said}{gigabytes(size(found))} each; gradient_accumulation a multiple of {n})"
            return
    if dividing(own) == 1:
        yield f"compute.{kind}.sharding = full, with workers on several machines"


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def lighter_pass(
    where: str,
    config: C,
    resources: Resources,
    whole: Callable[[C], int],
    streamed: Callable[[C], int] | None,
) -> Callable[[int, int], Iterator[str]]:
    """What says the settings with which a pass over text fits, whole or layer by layer.

    Args:
        where: The section of a recipe that is ``config``.
        config: How; it has a ``precision`` and a ``batch_size``.
        resources: Of a piece.
        whole: Bytes of a piece that holds its model.
        streamed: Of one that goes layer by layer; None where none can.
    """
    way = getattr(resources, "streamed", "never") if streamed else "never"
    ways = [of for of, other in ((whole, "always"), (streamed, "never")) if of and way != other]

    def held(precision: Any, batch_size: int) -> int:
        own = replace(config, precision=precision, batch_size=batch_size)
        return min(of(own) for of in ways)

    return partial(fewer_rows, where, held, config.precision, config.batch_size)


def fewer_rows(
    where: str,
    held: Callable[[Arithmetic, int], int],
    precision: Arithmetic,
    batch_size: int,
    most: int,
    gpus: int,
) -> Iterator[str]:
    """The settings with which a pass over text fits that does not by itself.

    Args:
        where: The section of a recipe that says how.
        held: Bytes of a piece, of a precision and so many rows at once.
        precision: As the recipe has it.
        batch_size: Likewise.
        most: Bytes that a piece may hold.
        gpus: Of the machine.
    """
    if held(precision, batch_size) <= most:  # fewer side by side do, which the row says
        return
    sizes = [batch_size >> n for n in range(1, batch_size.bit_length())]
    rows = next((rows for rows in sizes if held(precision, rows) <= most), None)
    if rows is not None:
        yield f"{where}.batch_size = {rows}"
    if precision == "bf16":
        return
    fitting = (rows for rows in (batch_size, *sizes) if held("bf16", rows) <= most)
    narrow = next(fitting, None)
    if narrow == batch_size:
        yield f"{where}.precision = bf16"
    elif narrow is not None and rows is None:  # none alone: both
        yield f"{where}.precision = bf16 and batch_size = {narrow}"
