"""What the command lines of flows share."""

import argparse
import functools
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import httpx
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_API_URL

from flows.running.own_server import start_server
from flows.running.planned import Begun, say_plan
from flows.running.turn import turn
from infra import settings as environment
from infra.cluster.capacity import compute_faults, machine, named_faults
from infra.disk import home_faults
from infra.permissions import permission_faults
from infra.recipe.names import masked
from infra.recipe.schema import Recipe
from infra.services.processes import read_records
from infra.services.stopping import run_command, run_stoppable
from tasks.engine.sources import CODE
from tasks.engine.workspace import Workspace
from tasks.living.lineage import with_lineage
from tasks.planning.made import EVERYTHING, Aim
from tasks.recipes import check
from upcycle_core.errors import Fault, InputError, raise_faults

SUMMARY = "summary.txt"
"""What a flow leaves in its workspace for its command to print."""
SERVER_SECONDS = 30
UNREACHED = "Failed to reach API at"
Result = TypeVar("Result")


def command(main: Callable[[list[str] | None], None]) -> Callable[..., int]:
    """A command line that ends with exit code 2 and every fault named after bad input, where a
    file is another user's, where the disk is full, or where a server has not answered for as long
    as it was asked again.

    A signal stops it; see ``run_stoppable``.
    """

    def attempt(arguments: list[str] | None) -> int:
        try:
            with permission_faults("file"), environment.full_disk_faults():
                main(arguments)
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
        except subprocess.CalledProcessError as error:  # of a command that has said why
            return error.returncode if error.returncode > 0 else 1
        except (httpx.HTTPError, RuntimeError) as error:
            fault = _server_fault(error)
            if fault is None:
                raise
            print(fault, file=sys.stderr)
            return 2
        return 0

    @functools.wraps(main)
    def run(arguments: list[str] | None = None) -> int:
        return run_stoppable(functools.partial(attempt, arguments))

    return run


def _server_fault(error: Exception) -> Fault | None:
    """What a server's error is to people: it is gone, or its database finds no room."""
    # Prefect's client wraps what its first request met.
    lost = error.__context__ if UNREACHED in str(error) else error
    if isinstance(lost, httpx.TransportError):
        return _lost_server(lost)
    if isinstance(error, httpx.HTTPStatusError) and error.response.is_server_error:
        return next(home_faults(environment.configure().home), None)
    return None


def _lost_server(error: httpx.TransportError) -> Fault:
    url = error.request.url
    address = f"{url.scheme}://{url.netloc.decode()}"  # without a name or a password
    remedy = f"does not answer any more ({error}); what is finished is kept: run the same command "
    return Fault("server", address, f"{remedy}again when it does")


def reach_server(settings: environment.Settings) -> None:
    """Knock at the server of ``make up`` or of the user: Prefect would end in a traceback.

    Where there is none, start the one that Prefect would start for the flow, but out of reach of
    Ctrl-C: it keeps the record of how the flow has ended.

    Raises:
        InputError: It does not answer, one on another machine has a database of this home, or
            there is no room for a database.
    """
    raise_faults([*_elsewhere_faults(settings), *home_faults(settings.home)])
    api = settings.prefect_api_url
    if api is None:
        if PREFECT_API_URL.value() is None:  # nor does Prefect's own profile name one
            start_server()
        return
    try:
        with urllib.request.urlopen(f"{api.rstrip('/')}/health", timeout=SERVER_SECONDS):
            return
    except urllib.error.HTTPError:
        return  # it is there, and asks for more
    except (OSError, ValueError) as error:
        raise InputError(_silent_server(settings, api, error)) from error


def _elsewhere_faults(settings: environment.Settings) -> Iterator[Fault]:
    """Of databases in the home that a server on another machine has open: two machines would write
    into one file, whose locks and shared memory are a machine's own."""
    records = read_records(settings.services_state)
    databases = {
        "prefect": ("PREFECT_API_URL", str(PREFECT_API_DATABASE_CONNECTION_URL.value())),
        "mlflow": ("MLFLOW_TRACKING_URI", settings.mlflow_tracking_uri),
    }
    if settings.prefect_api_url or PREFECT_API_URL.value():
        del databases["prefect"]
    for name, (variable, database) in databases.items():
        record = records.get(name)
        is_here = database.startswith("sqlite") and f":///{settings.home}/" in database
        if is_here and record is not None and record.is_elsewhere:
            remedy = f"{settings.home} is served by the machine {record.host}, at {record.url} "
            remedy += "there: run this there, or set this to that server's address, as a tunnel "
            remedy += f"leads to it. If that machine is gone: delete {settings.services_state}"
            yield Fault(variable, None, remedy)


def _silent_server(settings: environment.Settings, api: str, error: Exception) -> Fault:
    own = read_records(settings.services_state).get("prefect")
    if own is not None and api == f"{own.url}/api":
        remedy = f"what make up has started does not answer ({error}); it may still be starting: "
        remedy += "try again in a minute. If it stays so: make down, then make up; its log is "
        return Fault("server", masked(api), f"{remedy}{settings.services / 'prefect.log'}")
    remedy = f"no Prefect server answers there ({error}); start it, or unset this: a flow "
    return Fault("PREFECT_API_URL", masked(api), f"{remedy}brings a server along")


def run_flow(
    recipe: Recipe,
    run: Callable[[Recipe], Result],
    *,
    look: Callable[[Recipe, Workspace], str | None] | None = None,
    begun: Begun = with_lineage,
    aim: Aim = EVERYTHING,
    shown: str | None = SUMMARY,
) -> Result | None:
    """Look at the recipe, run the flow and print what it left.

    Args:
        recipe: What to make.
        run: The flow.
        look: Raises ``InputError`` with every fault of what is asked for; returns what to say where
            there is nothing to run. By default what the recipe names outside the workspace is
            looked at, before there is one.
        begun: The recipe that the flow will build, which is planned.
        aim: What it brings up to date of that.
        shown: The file of the workspace that is printed; None for none.

    Returns:
        What the flow returned.

    Raises:
        InputError: Bad input, what this machine cannot hold, a flow is at work in the workspace for
            longer than the recipe waits, or the Prefect server that is named does not answer: said
            before Prefect records a run that cannot begin.
    """
    settings = environment.configure()
    workspace = Workspace(settings.home / recipe.name)
    if settings.ray_address == "local":
        there = machine(recipe.compute.cpus)
        known = compute_faults(recipe.compute, [there], known=there)
        raise_faults([*known, *named_faults(recipe.compute)])
    if look is None:
        with _beside_models(recipe, settings, workspace):
            check(recipe, settings.home)
        say_plan(begun(recipe, workspace), settings, print, aim=aim)
    with turn(workspace, "the start of a flow", recipe):
        said = None if look is None else look(recipe, workspace)
    if said is not None:
        print(said)
        return None
    if look is not None:
        say_plan(begun(recipe, workspace), settings, print, aim=aim)
    reach_server(settings)
    result = run(recipe)
    if shown is not None:
        print((workspace.root / shown).read_text())
    return result


def _beside_models(
    recipe: Recipe, settings: environment.Settings, workspace: Workspace
) -> AbstractContextManager[None]:
    """Where the weights of models that a recipe names are read: on the cluster that is named."""
    given = [domain.expert or domain.origin for domain in recipe.domains.values()]
    if settings.ray_address == "local" or not any([*given, recipe.seed_model.model]):
        return nullcontext()
    from infra.cluster.compute import cluster  # imports Ray

    return cluster(settings, None, CODE, workspace=workspace.root)


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with one of several seeds: workspace and registered model are the seed's own, so
    that none becomes champion of what the recipe names."""
    end, named = f"-seed-{seed}", recipe.registry.model
    registry = replace(recipe.registry, model=None if named is None else f"{named}{end}")
    return replace(recipe, seed=seed, name=f"{recipe.name}{end}", registry=registry)


def run_apart(flow: str, chosen: argparse.Namespace, recipe: Recipe, seed: int) -> Path:
    """Run a flow with one seed, in a process and a workspace of its own; returns the workspace.

    Args:
        flow: Its module.
        chosen: Of either parser; its files and changes are the run's too.
        recipe: What they load.
        seed: The seed.
    """
    own = with_seed(recipe, seed)
    changes = [*chosen.set, f"seed={seed}", f"name={own.name}"]
    if own.registry.model is not None:
        changes.append(f"registry.model={own.registry.model}")
    options = [part for change in changes for part in ("--set", change)]
    first, *added = [str(path.resolve()) for path in (chosen.recipe, *chosen.add)]
    files = [first, *(["--add", *added] if added and flow == "flows.dume" else added)]
    # Relative paths of the recipe, and of changes, are seen from here.
    run_command([sys.executable, "-m", flow, *files, *options], directory=Path.cwd())
    return environment.configure().home / own.name
