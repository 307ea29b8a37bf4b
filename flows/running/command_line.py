"""What the command lines of flows share."""

import argparse
import functools
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_API_URL

from infra import settings as environment
from infra.recipe.names import masked
from infra.recipe.schema import Recipe
from infra.services.stopping import out_of_reach, run_stoppable
from tasks.engine.workspace import Workspace
from tasks.recipes import load_recipe
from upcycle_core.errors import Fault, InputError

SUMMARY = "summary.txt"
"""What a flow leaves in its workspace for its command to print."""
SERVER_SECONDS = 30


def command(main: Callable[[list[str] | None], None]) -> Callable[..., int]:
    """A command line that ends with exit code 2 and every fault named after bad input.

    A signal stops it; see ``run_stoppable``.
    """

    def attempt(arguments: list[str] | None) -> int:
        try:
            main(arguments)
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
        return 0

    @functools.wraps(main)
    def run(arguments: list[str] | None = None) -> int:
        return run_stoppable(functools.partial(attempt, arguments))

    return run


def recipe_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of ``RECIPE [--add FILE ...] [--set KEY=VALUE ...]``."""
    parser = _parser(prog, description)
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="files of tasks or rows")
    return parser


def rows_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of ``RECIPE [FILE ...] [--set KEY=VALUE ...]``."""
    parser = _parser(prog, description)
    parser.add_argument("add", type=Path, nargs="*", metavar="FILE", help="files of tasks or rows")
    return parser


def load(chosen: argparse.Namespace) -> Recipe:
    """The recipe of either parser's command.

    Raises:
        InputError: With every fault of the files and changes.
    """
    return load_recipe(chosen.recipe, chosen.set, added=chosen.add)


def reach_server(settings: environment.Settings) -> None:
    """Knock at the server that the user has named: Prefect would end in a traceback.

    Where there is none, start the one that Prefect would start for the flow, but out of reach of
    Ctrl-C: it keeps the record of how the flow has ended.

    Raises:
        InputError: It does not answer.
    """
    api = settings.prefect_api_url
    if api is None:
        if PREFECT_API_URL.value() is None:  # nor does Prefect's own profile name one
            _start_server()
        return
    try:
        with urllib.request.urlopen(f"{api.rstrip('/')}/health", timeout=SERVER_SECONDS):
            return
    except urllib.error.HTTPError:
        return  # it is there, and asks for more
    except (OSError, ValueError) as error:
        remedy = f"no Prefect server answers there ({error}); start it, or unset this: a flow "
        remedy += "brings a server along"
        raise InputError(Fault("PREFECT_API_URL", masked(api), remedy)) from error


def _start_server() -> None:
    from prefect.server.api.server import SubprocessASGIServer  # all of the server's code

    with out_of_reach():
        SubprocessASGIServer().start()


def free_workspace(recipe: Recipe) -> Workspace:
    """The recipe's workspace, in which no flow works; and a Prefect server to work with.

    Asked before Prefect records a run that cannot begin.

    Raises:
        InputError: A flow is at work there, or the Prefect server that is named does not answer.
    """
    settings = environment.configure()
    workspace = Workspace(settings.home / recipe.name)
    with workspace.lock("the start of a flow"):
        pass
    reach_server(settings)
    return workspace


def run_flow(
    chosen: argparse.Namespace,
    look: Callable[[Recipe, Workspace], str | None],
    run: Callable[[Recipe], Any],
) -> None:
    """Load the recipe, look at it, run the flow and print what it left.

    Args:
        chosen: Of ``recipe_parser``.
        look: Raises ``InputError`` with every fault of what is asked for; returns what to say where
            there is nothing to run.
        run: The flow; it leaves a summary in the workspace.

    Raises:
        InputError: Bad input, said before Prefect records a run that cannot begin.
    """
    recipe = load(chosen)
    settings = environment.configure()
    workspace = Workspace(settings.home / recipe.name)
    with workspace.lock("the start of a flow"):
        said = look(recipe, workspace)
    if said is not None:
        print(said)
        return
    reach_server(settings)
    run(recipe)
    print((workspace.root / SUMMARY).read_text())


def _parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument("recipe", type=Path, help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one value"
    )
    return parser
