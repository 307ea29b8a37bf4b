"""Recipes with every method's checks: what flows and stages read them with."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infra.recipe import reading
from infra.recipe.schema import Recipe
from infra.versioning.versions import remote_faults
from tasks.checks import faults
from tasks.methods import METHODS
from upcycle_core.errors import raise_faults


def load_recipe(path: Path, overrides: Sequence[str] = (), *, added: Sequence[Path] = ()) -> Recipe:
    """Read a recipe; see ``infra.recipe.reading.load_recipe``."""
    return reading.load_recipe(path, overrides, added=added, checks=faults, completed=with_method)


def validate(values: object) -> Recipe:
    """Turn plain values into a recipe; see ``load_recipe``."""
    return reading.validate(values, checks=faults, completed=with_method)


def with_method(recipe: Recipe) -> Recipe:
    """The recipe with its method's name, also the row of the result in tables, and what follows."""
    sections = {name: method.section for name, method in METHODS.items() if method.section}
    asked = [name for name, section in sections.items() if getattr(recipe, section) is not None]
    method = recipe.method or (asked[-1] if asked else next(iter(METHODS)))
    named = replace(recipe, method=method)
    return METHODS[method].completed(named) if method in METHODS else named


def check(recipe: Recipe, home: Path) -> None:
    """Look at everything that the recipe names outside the workspace.

    Args:
        recipe: What to make.
        home: Where workspaces are, and models from a hub.

    Raises:
        InputError: With every fault of every text, model and task, and of the DVC remote.
    """
    outside = METHODS[recipe.method].outside(recipe, home / "models")
    raise_faults([*outside, *remote_faults("versions.remote", recipe.versions.remote, home)])
