"""The command line: ``python -m infra.services up|pool|deploy|undeploy|down|status``."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from infra.permissions import permission_faults
from infra.recipe.names import masked
from infra.services.api import DeploymentError
from infra.services.deployments import deploy, undeploy
from infra.services.pools import HOME, create_pool
from infra.services.servers import ServiceError, down, status, up
from infra.settings import Settings, configure, full_disk_faults
from upcycle_core.errors import Fault, InputError, raise_faults


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says; end with a message and code 1 if that is not possible.

    ``status`` ends with code 1 where anything is down.
    """
    parser = argparse.ArgumentParser(prog="python -m infra.services", description=__doc__)
    commands = ["up", "pool", "deploy", "undeploy", "down", "status"]
    parser.add_argument("command", choices=commands)
    parser.add_argument(
        "subjects",
        nargs="*",
        metavar="RECIPE FILE ...|NAME|TYPE",
        help="deploy: a recipe in place of the embedded default, and files of tasks or rows beside "
        "it, as flows take them; undeploy: the name of a recipe; pool: docker or kubernetes",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="deploy: of the recipe; pool: a variable of its template, or env.NAME",
    )
    parser.add_argument(
        "--notice", metavar="TYPE/NAME", help="deploy: the block that failed nights go to, or none"
    )
    parser.add_argument(
        "--schedule", metavar="CRON", help='deploy: when a night is; at first "0 3 * * *"'
    )
    parser.add_argument(
        "--timezone", metavar="NAME", help="deploy: whose hours those are; at first UTC"
    )
    parser.add_argument(
        "--pool",
        metavar="NAME",
        help="deploy: the work pool that runs the flows; local: this machine",
    )
    parser.add_argument("--image", metavar="NAME:TAG", help="deploy and pool: what containers run")
    parser.add_argument("--pull-policy", metavar="POLICY", help="deploy: when the image is pulled")
    parser.add_argument("--name", help="pool: what it is called; its type unless given")
    parser.add_argument("--home", metavar="PATH", help=f"pool: the volume's place; {HOME}")
    chosen = parser.parse_intermixed_args(arguments)
    try:
        with permission_faults("file"), full_disk_faults():
            _do(configure(), chosen)
    except (InputError, ServiceError, DeploymentError) as error:
        sys.exit(str(error))


def _do(settings: Settings, chosen: argparse.Namespace) -> None:
    raise_faults(_misplaced(chosen))
    if chosen.command == "deploy":
        _deploy(settings, chosen)
    elif chosen.command == "pool":
        _pool(settings, chosen)
    elif chosen.command == "undeploy":
        _undeploy(settings, _subject(chosen))
    elif chosen.command == "status":
        sys.exit(0 if status(settings) else 1)
    else:
        {"up": up, "down": down}[chosen.command](settings)


def _subject(chosen: argparse.Namespace) -> str | None:
    """What a command that takes one word was given."""
    return chosen.subjects[0] if chosen.subjects else None


OPTIONS = {
    "deploy": {"set", "notice", "schedule", "timezone", "pool", "image", "pull_policy"},
    "pool": {"set", "image", "name", "home"},
}
"""Which options a command takes."""
WORDS = {"undeploy": 1, "pool": 1, "up": 0, "down": 0, "status": 0}
"""How many words a command takes at most; deploy takes any number of files."""


def _misplaced(chosen: argparse.Namespace) -> Iterator[Fault]:
    most = WORDS.get(chosen.command)
    for word in chosen.subjects[most:] if most is not None else ():
        remedy = f"{chosen.command} takes {'one word' if most else 'no words'}; leave it out"
        yield Fault("arguments", word, remedy)
    for option in sorted(set().union(*OPTIONS.values())):
        value = getattr(chosen, option)
        if value and option not in OPTIONS.get(chosen.command, ()):
            takers = " and ".join(name for name, taken in OPTIONS.items() if option in taken)
            remedy = f"{chosen.command} takes no such option; {takers} does"
            yield Fault(f"--{option.replace('_', '-')}", value, remedy)


def _deploy(settings: Settings, chosen: argparse.Namespace) -> None:
    files = [Path(subject) for subject in chosen.subjects]
    variables = {"image": chosen.image, "image_pull_policy": chosen.pull_policy}
    names = deploy(
        settings,
        recipe=files[0] if files else None,
        added=files[1:],
        changes=chosen.set,
        notice=chosen.notice or None,
        pool=chosen.pool or None,
        schedule=chosen.schedule or None,
        timezone=chosen.timezone or None,
        job_variables={name: value for name, value in variables.items() if value},
    )
    for name in names:
        print(f"Deployed {name}")
    print("Run one:")
    run = f"{sys.executable} -m prefect deployment run {names[0]}"
    print(f"  PREFECT_API_URL={masked(settings.prefect_api_url)} {run}")


def _pool(settings: Settings, chosen: argparse.Namespace) -> None:
    changes = [*chosen.set, *([f"image={chosen.image}"] if chosen.image else [])]
    kind, home = _subject(chosen) or "", chosen.home or HOME
    name = create_pool(settings, kind, name=chosen.name, home=home, changes=changes)
    print(f"Work pool {name}. Its worker, with the extra `{kind}` of pyproject.toml installed:")
    worker = f"{sys.executable} -m prefect worker start --pool {name} --type {kind}"
    print(f"  PREFECT_API_URL={masked(settings.prefect_api_url)} {worker}")
    print(f"Flows that it runs: python -m infra.services deploy --pool {name}")


def _undeploy(settings: Settings, recipe: str | None) -> None:
    if recipe is None:
        raise InputError(Fault("name", None, "say which recipe is deployed no more: its name"))
    for name in undeploy(settings, recipe):
        print(f"Deployed no more: {name}")
