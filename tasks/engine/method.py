"""What a method is, to everything that is not the method itself: data."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from infra.recipe.schema import Recipe
from tasks.engine.stage import Stage
from upcycle_core.errors import Fault


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to make a model.

    Args:
        name: As recipes and tables name it.
        title: For people.
        paper: Where it was published.
        stages: What makes its model and its report, in the order in which data flows.
        checks: What is wrong with what a recipe says about it, found without reading any file.
        figures: What the gate may name: figures that every report of it holds.
    """

    name: str
    title: str
    paper: str
    stages: tuple[Stage, ...]
    checks: Callable[[Recipe], Iterable[Fault]]
    figures: Callable[[Recipe], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Addition:
    """What runs on the finished model of a method.

    Args:
        name: For people.
        stages: In order.
        asked: Whether a recipe asks for it.
        checks: As a method's.
    """

    name: str
    stages: tuple[Stage, ...]
    asked: Callable[[Recipe], bool]
    checks: Callable[[Recipe], Iterable[Fault]] = lambda recipe: ()
