"""Stages that train or score models of many kinds, whichever method has made them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from infra.recipe.resources import Resources, WorkerResources
from infra.recipe.schema import Recipe
from tasks.planning.lighter import RECOMPUTED, divided, fitting, lighter_pass, shared
from tasks.planning.parts import (
    FP32,
    Subjects,
    checkpoints_at_once,
    checkpoints_in_all,
    moments_bytes,
    tokens_of,
)
from tasks.planning.row import Planned, copied, dividing
from upcycle_core.baselines.config import Baseline
from upcycle_core.ders.config import CodecConfig
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.planning import memory, work
from upcycle_core.planning.compression import compressed_bytes
from upcycle_core.planning.estimate import training_bytes
from upcycle_core.planning.shape import Shape
from upcycle_core.planning.trained import (
    gate_parameters,
    gated_parameters,
    mixture_training_bytes,
    simoe_training_bytes,
    trained_of,
)
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.training.checks import LARGEST_BF16_BETA

OWN_KINDS = ("bam", "simoe")
"""Rows whose models no stock architecture is: no layer of theirs is taken alone."""


def mixture_row(
    stage: str,
    recipe: Recipe,
    rows: Mapping[str, Baseline],
    shapes: Mapping[str, Shape],
    *,
    kind: str,
    domains: int | None = None,
    starts: bool = False,
) -> Planned:
    """Trainings of finished models, a row of a comparison each.

    Args:
        stage: The stage.
        recipe: The recipe.
        rows: What is trained.
        shapes: {row: the dense part of it}.
        kind: Of the resources.
        domains: How many have an expert; the recipe's by default.
        starts: Whether what each begins with is put together beside it, and lies there meanwhile;
            a SIMoE begins with the seed itself.
    """
    resources = getattr(recipe.compute, kind)
    domains = len(recipe.domains) if domains is None else domains
    sizes = {name: _size(row, shapes[name], domains) for name, row in rows.items()}
    trained = {name: _trained(row, shapes[name], domains) for name, row in rows.items()}
    checkpoints = [
        FP32 * sizes[name] + moments_bytes(row.training) * trained[name]
        for name, row in rows.items()
    ]
    together = [
        checkpoints_at_once(row.training, may_end_before=_is_constrained(row)) * size
        + (starts and row.method != "simoe") * shapes[name].itemsize * sizes[name]
        for (name, row), size in zip(rows.items(), checkpoints, strict=True)
    ]
    steps = [checkpoints_in_all(row.training) for row in rows.values()]
    kept = sum(FP32 * _written(row, shapes[name], domains) for name, row in rows.items())
    return Planned(
        stage,
        len(rows),
        len(rows),
        kept=kept,
        each=max(together),
        written=kept + sum(n * size for n, size in zip(steps, checkpoints, strict=True)),
        read=sum(FP32 * size for size in sizes.values()),
        flops=sum(
            work.training_flops(
                shapes[n],
                row.trained_as,
                top_k=row.top_k if row.experts(domains) else 1,
                share=trained[n] / sizes[n],
            )
            for n, row in rows.items()
        ),
        precision=next(iter(rows.values())).training.precision,
        memory=max(_memory(row, shapes[name], domains, resources) for name, row in rows.items()),
        kind=kind,
        resources=resources,
        lighter=_lighter(kind, rows, shapes, domains, resources),
    )


@dataclass(frozen=True)
class _Lighter:
    """Settings with which the training of a row fits: as ``lighter.Lighter``, of any model.

    Args:
        kind: The section of ``compute``.
        where: The section that says how it is trained.
        row: What is trained.
        shape: The dense part of it.
        domains: How many have an expert.
        resources: Of a worker.
    """

    kind: str
    where: str
    row: Baseline
    shape: Shape
    domains: int
    resources: WorkerResources

    def __call__(self, there: int, gpus: int) -> list[str]:
        """The settings.

        Args:
            there: Bytes that a worker may hold.
            gpus: Of the machine.
        """
        changes = self._changes()
        settings = {said: partial(self._with, [change]) for said, change in changes.items()}
        whole = (" and ".join(changes), partial(self._with, changes.values()))
        found = fitting(settings, whole, there)
        if self.row.method == "bam" or (self.row.simoe and self.row.simoe.masks == "parameters"):
            return found  # nobody divides those
        sizes = {"": self._of_each}
        if not self.row.training.gradient_checkpointing:
            recomputed = partial(self._of_each, gradient_checkpointing=True)
            sizes[f" and {self.where}.training.{RECOMPUTED}"] = recomputed
        return [*found, *divided(self.kind, self.resources, sizes, there, gpus)]

    def _changes(self) -> dict[str, Callable[[Baseline], Baseline]]:
        row, training = self.row, self.row.training
        found: dict[str, Callable[[Baseline], Baseline]] = {}
        if row.method not in ("full-finetune", "simoe") and "all" in row.objective.trainable:
            found[f"{self.where}.objective.trainable = [router]"] = _router_alone
        if not training.gradient_checkpointing:
            said = f"{self.where}.training.{RECOMPUTED}"
            found[said] = partial(_trained_with, gradient_checkpointing=True)
        slowest = max(training.adam_beta1, training.adam_beta2)
        if training.optimizer_state == "fp32" and slowest <= LARGEST_BF16_BETA:
            said = f"{self.where}.training.optimizer_state = bf16"
            found[said] = partial(_trained_with, optimizer_state="bf16")
        return found

    def _with(self, changes: Iterable[Callable[[Baseline], Baseline]]) -> int:
        row = reduce(lambda changed, change: change(changed), changes, self.row)
        return self._bytes(row, self.resources)

    def _of_each(self, resources: WorkerResources, **more: Any) -> int:
        accumulated = shared(self.row.training, resources)
        row = _trained_with(self.row, gradient_accumulation=accumulated, **more)
        return self._bytes(row, resources)

    def _bytes(self, row: Baseline, resources: WorkerResources) -> int:
        return _memory(row, self.shape, self.domains, resources)


def _router_alone(row: Baseline) -> Baseline:
    return replace(row, objective=replace(row.objective, trainable=("router",)))


def _trained_with(row: Baseline, **settings: Any) -> Baseline:
    return replace(row, training=replace(row.training, **settings))


def _lighter(
    kind: str,
    rows: Mapping[str, Baseline],
    shapes: Mapping[str, Shape],
    domains: int,
    resources: WorkerResources,
) -> _Lighter:
    """Of the largest row."""
    name = max(rows, key=lambda name: _memory(rows[name], shapes[name], domains, resources))
    row, where = rows[name], f"baselines.{name}"
    if kind == "post_training":
        where = "tuning" if row.method == "simoe" else "post_training"
    return _Lighter(kind, where, row, shapes[name], domains, resources)


def _is_constrained(row: Baseline) -> bool:
    """Whether a model must be as sparse as is asked for, which its last checkpoint may not be."""
    return row.method == "simoe" and (row.simoe or SimoeUpcyclingConfig()).is_constrained


def _attention(row: Baseline, shape: Shape, experts: int) -> int:
    """Parameters of attention that is an expert's too (BAM)."""
    if row.method != "bam":
        return 0
    return (experts - 1) * 2 * shape.layers * shape.hidden * shape.heads_width


def _deltas(row: Baseline, shape: Shape, experts: int) -> int | None:
    """Parameters of a model whose experts are deltas; None of any other."""
    if row.ders is None:
        return None
    codec = CodecConfig(codec=row.ders.codec, drop_rate=row.ders.drop_rate, rank=row.ders.rank)
    deltas = compressed_bytes(shape, codec, experts + (row.ders.universal == "delta"))
    return deltas // shape.itemsize + (shape.ffns if row.ders.universal == "own" else 0)


def _size(row: Baseline, shape: Shape, domains: int) -> int:
    """Parameters while it is trained."""
    experts = row.experts(domains)
    if row.method == "simoe":
        own = row.simoe or SimoeUpcyclingConfig()
        return shape.whole + gated_parameters(shape, own) + gate_parameters(shape, own)
    if not experts:
        return shape.whole
    deltas = _deltas(row, shape, experts)
    if deltas is not None:
        return deltas
    return shape.mixture(experts) + _attention(row, shape, experts)


def _written(row: Baseline, shape: Shape, domains: int) -> int:
    """Parameters of what is published."""
    if row.method != "simoe":
        return _size(row, shape, domains)
    return pruned_parameters(shape, row.simoe or SimoeUpcyclingConfig())


def pruned_parameters(shape: Shape, config: SimoeUpcyclingConfig) -> int:
    """Of a SIMoE after pruning: where experts' masks are apart, few inputs have none."""
    used = 1 - config.tau if config.sparsity == "union" else 1 - config.tau**config.experts
    if config.masks == "real":
        used = 1.0
    grown = gated_parameters(shape, config) + gate_parameters(shape, config)
    return shape.whole + int(used * grown)


def _trained(row: Baseline, shape: Shape, domains: int) -> int:
    experts = row.experts(domains)
    if row.method == "simoe":
        return _size(row, shape, domains) - shape.whole
    if not experts:
        part = {"full": shape.whole, "layers": shape.linear, "ffn": shape.ffns, "lora": 0}
        return part[row.tuned]
    if row.ders is not None:
        return _trained_deltas(row, shape, domains)
    return trained_of(shape, experts, row.objective.trainable) + _attention(row, shape, experts)


def _trained_deltas(row: Baseline, shape: Shape, domains: int) -> int:
    """Of a model whose experts are deltas of a shared base."""
    size, experts = _size(row, shape, domains), row.experts(domains)
    routers = shape.layers * experts * shape.hidden
    backbone = shape.mixture(experts) - experts * shape.ffns - routers
    parts = {
        "router": routers,
        "shared_base": shape.ffns,
        "backbone": backbone,
        "experts": size - backbone - routers - shape.ffns,
        "all": size,
    }
    return min(size, sum(parts.get(group, 0) for group in dict.fromkeys(row.objective.trainable)))


def _memory(row: Baseline, shape: Shape, domains: int, resources: Resources) -> int:
    """Of one worker."""
    return _step(row, shape, domains, resources) + copied(resources, _trained(row, shape, domains))


def _step(row: Baseline, shape: Shape, domains: int, resources: Resources) -> int:
    experts, divided = row.experts(domains), dividing(resources)
    common: dict[str, Any] = {"device": resources.device, "workers": divided}
    if row.method == "simoe":
        own = row.simoe or SimoeUpcyclingConfig()
        return simoe_training_bytes(shape, row.training, own, **common)
    if not experts:
        return training_bytes(shape, row.trained_as, **common)
    needed = mixture_training_bytes(
        *(shape, row.training),
        experts=experts,
        top_k=row.top_k,
        trainable=row.objective.trainable,
        **common,
    )
    beside = _size(row, shape, domains) - shape.mixture(experts)
    learns = _trained(row, shape, domains) - trained_of(shape, experts, row.objective.trainable)
    return needed + FP32 * (beside + 3 * learns) // divided


def scoring_row(stage: str, recipe: Recipe, subjects: Subjects, shape: Shape) -> Planned:
    """Every model of a report on held-out text, the MoE's the largest."""
    config, resources = recipe.evaluation, recipe.compute.evaluation
    domains = subjects.domains
    merged = 2 * (1 + len(recipe.baselines))
    pieces = domains + 1 + merged
    length = config.sequence_length
    read = domains * tokens_of(config.tokens, subjects.heldout)
    dense = work.forward_flops(shape, read, length)
    crossed = sum(len(config.scored_on(d, recipe.domains)) for d in recipe.domains)
    mixed = work.forward_flops(shape, read, length, top_k=recipe.moe.top_k)
    rows, held = recipe.baselines.values(), dict[str, Any](device=resources.device)

    def whole(config: EvaluationConfig) -> int:
        return memory.evaluation_bytes(shape, config, experts=domains, device=resources.device)

    def streamed(config: EvaluationConfig) -> int:
        needed = memory.streamed_evaluation_bytes(shape, config, experts=domains, **held)
        if all(row.trains for row in rows):
            return needed
        return max(needed, memory.evaluation_bytes(shape, config, **held))  # an ensemble's are held

    streams = not any(row.method in OWN_KINDS or row.ders for row in rows)
    return Planned(
        stage,
        1,
        pieces,
        passing=shape.stored,
        read=(domains + 1) * shape.stored + merged * shape.itemsize * shape.mixture(domains),
        flops=(dense + crossed * dense // domains + merged * mixed) or None,
        precision=config.precision,
        memory=whole(config),
        streamed=streamed(config) if streams else None,
        states=memory.streamed_states_bytes(shape, config.precision, 2 * read, **held),
        kind="evaluation",
        resources=resources,
        lighter=lighter_pass("evaluation", config, resources, whole, streamed if streams else None),
    )
