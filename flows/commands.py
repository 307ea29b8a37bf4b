"""What the command lines of flows share."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.artifacts import SUMMARY
from infra import settings as environment
from infra.reading import load_recipe
from infra.recipe import Recipe
from tasks.workspace import Workspace
from upcycle_core.errors import InputError


def recipe_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of ``RECIPE [ROWS ...] [--set KEY=VALUE ...]``."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument("recipe", type=Path, help="YAML file")
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="files of tasks or rows")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one value"
    )
    return parser


def run_flow(
    chosen: argparse.Namespace,
    look: Callable[[Recipe, Workspace], str | None],
    run: Callable[[Recipe], Any],
) -> int:
    """Load the recipe, look at it, run the flow and print what it left.

    Bad input is said before Prefect records a run that cannot begin.

    Args:
        chosen: Of ``recipe_parser``.
        look: Raises ``InputError`` with every fault of what is asked for; returns what to say where
            there is nothing to run.
        run: The flow; it leaves a summary in the workspace.

    Returns:
        The exit code: 2 after bad input.
    """
    settings = environment.configure()
    try:
        recipe = load_recipe(chosen.recipe, chosen.set, added=chosen.add)
        workspace = Workspace(settings.home / recipe.name)
        with workspace.lock("the start of a flow"):
            said = look(recipe, workspace)
        if said is not None:
            print(said)
            return 0
        run(recipe)
        print((workspace.root / SUMMARY).read_text())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
