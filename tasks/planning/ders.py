"""What runs on a finished model will need: rows to compare with, and DeRS."""

from collections.abc import Collection, Iterator

from infra.recipe.schema import Recipe
from tasks.ders.section import section
from tasks.planning.joined import mixture_row, scoring_row
from tasks.planning.parts import FP32, Subjects, joined, tokens_of
from tasks.planning.row import Planned
from tasks.training import trained_rows
from upcycle_core.planning import memory, work
from upcycle_core.planning.compression import compressed_bytes, compressing_bytes


def comparison_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    """Published ways of upcycling, trained and scored."""
    if names := trained_rows(recipe):
        yield compared_row(recipe, subjects, names)
    yield scoring_row("comparison", recipe, subjects, joined(recipe, subjects.shape))


def compared_row(recipe: Recipe, subjects: Subjects, names: Collection[str]) -> Planned:
    """Trainings of some rows of a comparison."""
    rows = {name: recipe.baselines[name] for name in names}
    shapes = dict.fromkeys(rows, joined(recipe, subjects.shape))
    return mixture_row("baselines", recipe, rows, shapes, kind="baselines", starts=True)


def compression_rows(recipe: Recipe, subjects: Subjects) -> Iterator[Planned]:
    """Every way to store the deltas, scored; the smallest that is good enough is kept."""
    shape, how, domains = joined(recipe, subjects.shape), section(recipe), subjects.domains
    resources, evaluation = recipe.compute.evaluation, recipe.evaluation
    stored = {name: compressed_bytes(shape, codec, domains) for name, codec in how.codecs.items()}
    storing = {n: compressing_bytes(shape, codec, domains) for n, codec in how.codecs.items()}
    scoring = memory.evaluation_bytes(shape, evaluation, experts=domains, device=resources.device)
    largest = max(stored, key=lambda name: stored[name])
    heaviest = max(storing, key=lambda name: storing[name])
    models, original = len(how.models), shape.itemsize * shape.mixture(domains)
    pieces = models * (1 + len(stored))
    read = domains * tokens_of(evaluation.tokens, subjects.heldout)
    flops = work.forward_flops(shape, read, evaluation.sequence_length, top_k=1 + recipe.moe.top_k)
    smaller = []
    if storing[heaviest] > scoring:
        smaller.append(f"leave compression.codecs.{heaviest} out")
    elif evaluation.precision == "fp32" and shape.itemsize < FP32:
        smaller.append("evaluation.precision = bf16")
    yield Planned(
        "sweeps",
        models,
        pieces,
        passing=min(pieces, len(stored)) * stored[largest],
        written=models * sum(stored.values()),
        read=models * (original * (1 + 3 * len(stored)) + sum(stored.values())),
        flops=pieces * flops or None,
        precision=evaluation.precision,
        memory=max(scoring, *storing.values()),
        kind="evaluation",
        resources=resources,
        remedies=smaller,
    )
    yield Planned(
        "compression",
        1,
        1,
        kept=stored[largest],
        registered=stored[largest],
        own_code="ders",
        read=3 * original,
        memory=max(storing.values()),
        resources=recipe.compute.assembly,
        remedies=[f"leave compression.codecs.{heaviest} out"],
    )
