"""What a method is, to everything that is not the method itself: data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.recipe.schema import Recipe
from upcycle_core.errors import Fault
from upcycle_core.evaluation.text.results import expert_row

if TYPE_CHECKING:
    from tasks.engine.life import Life
    from tasks.engine.stage import Session, Stage

Checks = Callable[[Recipe], Iterable[Fault]]
Looks = Callable[["Session"], Iterable[Fault]]
Stages = Callable[[], "tuple[Stage, ...]"]
"""A recipe is judged before torch, Ray and MLflow are imported: what computes comes when asked."""
Models = Mapping[str, Sequence[str]]
"""{row of a report: the artifacts whose weights its model is the mean of}"""
ON_TEXT = ("seed_model.training", "experts.training", "statistics", "evaluation")
TEXT_METRICS = ("normalised_average", "normalised_worst")


def models_of_one_seed(recipe: Recipe) -> Models:
    """The experts, the seed where there is one, the experts' average, and what the method makes."""
    experts = tuple(f"experts/{domain}" for domain in recipe.domains)
    rows = {expert_row(d): (e,) for d, e in zip(recipe.domains, experts, strict=True)}
    seed = {"seed": ("seed",)} if recipe.has_seed else {}
    return {**rows, **seed, "model_averaging": experts, recipe.method: ("model",)}


def text_figures(recipe: Recipe) -> Sequence[str]:
    """Figures that a report of perplexity on held-out text holds."""
    return [*TEXT_METRICS, *(f"perplexity.{name}" for name in recipe.domains)]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to make a model.

    Args:
        name: As recipes and tables name it.
        title: For people.
        paper: Where it was published.
        stages: Imports what makes its model and its report, in the order in which data flows.
        outside: What is wrong with the files and models that a recipe names outside its workspace;
            takes the folder of models from a hub.
        checks: What is wrong with what a recipe says about it, found without reading any file.
        before: Imports {stage: a look at what earlier stages have made, of all items at once}. It
            is taken before the stage runs, and says what the recipe asks for in vain.
        unused: What a recipe of another method says of it in vain.
        section: The section of a recipe that asks for it, if it has one.
        completed: The recipe with what it says of itself by saying nothing.
        figures: What the gate may name: figures that every report of it holds.
        experts: Domains whose experts its model has, in their order.
        models: Rows of its report that are models of their own, beside the trained baselines.
        lengths: Sections whose ``sequence_length`` a model that is shaped here must have positions
            for.
        trains_shape: Whether any model begins with random weights here.
        has_seed: Whether its models begin with one seed.
        has_labels: Whether its domains, if it has any, are labels of instructions and no experts'.
        compares: Whether the rows to compare with are made after its own model and report.
        ablates: Whether its report holds the ablation table of joined models.
        flow: Who makes it, for people; with ``--rebuild`` all anew.
        life: Imports how its models live on, where parts of them may come, leave and learn.
    """

    name: str
    title: str
    paper: str
    stages: Stages
    outside: Callable[[Recipe, Path], Iterable[Fault]]
    checks: Checks = lambda recipe: ()
    before: "Callable[[], Mapping[str, Looks]]" = dict
    unused: Checks = lambda recipe: ()
    section: str | None = None
    completed: Callable[[Recipe], Recipe] = lambda recipe: recipe
    figures: Callable[[Recipe], Sequence[str]] = text_figures
    experts: Callable[[Recipe], Iterable[str]] = lambda recipe: recipe.domains
    models: Callable[[Recipe], Models] = models_of_one_seed
    lengths: Callable[[Recipe], Iterable[str]] = lambda recipe: ON_TEXT
    trains_shape: Callable[[Recipe], bool] = lambda recipe: recipe.trains_seed
    has_seed: bool = True
    has_labels: bool = False
    compares: bool = False
    ablates: bool = False
    flow: str = "flows.make"
    life: "Callable[[], Life] | None" = None


@dataclass(frozen=True, kw_only=True)
class Addition:
    """What runs on the finished model of a method.

    Args:
        name: For people.
        stages: Imports them, in order.
        asked: Whether a recipe asks for it.
        checks: As a method's.
    """

    name: str
    stages: Stages
    asked: Callable[[Recipe], bool]
    checks: Checks = lambda recipe: ()
