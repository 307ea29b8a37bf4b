"""What the stages of SIMoE will need."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from infra.recipe.schema import Recipe
from tasks.methods import scored_models
from tasks.planning.joined import mixture_row, pruned_parameters
from tasks.planning.lighter import fewer_rows
from tasks.planning.parts import FP32, Subjects, seed_row, text_rows, training
from tasks.planning.row import Planned
from tasks.planning.scored import enough
from tasks.simoe.checks import tied_heads
from tasks.simoe.labels import planned_labels
from tasks.simoe.rows import SIMOE, section, tuned
from tasks.training import trained_rows
from upcycle_core.baselines.config import Baseline
from upcycle_core.errors import raise_faults
from upcycle_core.planning import memory
from upcycle_core.planning.answering import answering_bytes, pruned_held
from upcycle_core.planning.rates import Arithmetic
from upcycle_core.planning.shape import Shape

ASKED = 3
"""Pieces of a row's answers, one after the other: two splits, and a look at its structure."""


def simoe_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    """A row a stage, in the order in which they run.

    Raises:
        InputError: Experts of a head are asked for that the seed does not have.
    """
    shape, tuning = subjects.shape, recipe.tuning
    raise_faults(tied_heads(recipe) if shape.is_tied else [])
    yield from text_rows(recipe, subjects)
    seed = seed_row(recipe, shape)
    if seed is not None:
        yield seed
    if names := trained_rows(recipe):
        yield rivals_row(recipe, subjects, names)
    own = Baseline(method="simoe", simoe=section(recipe), training=tuning.training)
    made = mixture_row("model", recipe, {SIMOE: own}, {SIMOE: shape}, kind="post_training")
    size = FP32 * pruned_parameters(shape, section(recipe))
    yield replace(made, registered=size, own_code="simoe")
    yield _answers_row(recipe, shape, size)
    scored, precision = len(scored_models(recipe)), recipe.task_evaluation.precision
    asking = recipe.compute.of("task_evaluation")
    needed = pruned_held(size, precision, device=asking.device)
    of_each = partial(memory.divided_bytes, needed, shape, precision, asking.device)
    yield Planned(
        "task_scores",
        scored,
        scored,
        read=scored * size,
        flops=None,
        memory=of_each(asking.gpus),
        kind=recipe.compute.named("task_evaluation"),
        resources=asking,
        lighter=partial(enough, of_each) if asking.gpus else None,
    )


def _answers_row(recipe: Recipe, shape: Shape, size: int) -> Planned:
    """What models answer to instructions that were held out, and a look at their structure."""
    tuning, labels, rows = recipe.tuning, planned_labels(recipe), recipe.baselines.values()
    count, resources = len(tuned(recipe)), recipe.compute.evaluation
    experts = max((row.experts(labels) for row in rows if row.trains), default=1)

    def held(precision: Arithmetic, batch_size: int, device: str = resources.device) -> int:
        length = tuning.training.sequence_length + tuning.max_new_tokens
        mixed: dict[str, int] = {"pruned": size, "experts": max(1, experts)}
        return answering_bytes(shape, (batch_size, length), precision, device=device, **mixed)

    asked: tuple[Arithmetic, int] = (tuning.precision, tuning.batch_size)
    return Planned(
        "answers",
        count,
        ASKED * count,
        rounds=ASKED,
        read=count * size,
        flops=None,
        memory=held(*asked),
        on_cpus=held(*asked, "cpu") if resources.gpus else None,
        kind="evaluation",
        resources=resources,
        lighter=partial(fewer_rows, "tuning", held, *asked),
    )


def rivals_row(recipe: Recipe, subjects: Subjects, names: Collection[str]) -> Planned:
    """Trainings of some rivals and ablations, and of the experts that some begin with."""
    rows = {name: recipe.baselines[name] for name in names}
    shapes, labels = dict.fromkeys(rows, subjects.shape), planned_labels(recipe)
    common: dict[str, Any] = {"kind": "baselines", "domains": labels, "starts": True}
    trained = mixture_row("baselines", recipe, rows, shapes, **common)
    count = labels * sum(row.method == "btx" for row in rows.values())
    if not count:
        return trained
    resources = recipe.compute.experts
    expert = training(subjects.shape, recipe.experts.training, resources)
    experts = replace(
        expert,
        stage="baselines: experts",
        items=count,
        pieces=count,
        kept=0,
        read=count * subjects.shape.stored,
        written=count * expert.writes,
        flops=None if expert.flops is None else count * expert.flops,
        kind="experts",
        resources=resources,
    )
    return replace(trained, passing=count * expert.kept, also=experts)
