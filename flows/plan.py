"""What a recipe will need: memory, disk and pieces of every stage, before anything is made.

``python -m flows.plan RECIPE [--set dotted.key=value ...] [--machine PART=AMOUNT ...]
[--rates RATE=AMOUNT ...] [--measure]``

From the models' headers, or their config.json alone: no weight is read. ``--machine memory=24GB
cpus=2 gpus=1 gpu_memory=80GB disk=500GB`` plans for another machine than this one
(``remote_disk=2TB`` of a DVC remote that is a directory on another disk). What cannot be is refused
(exit code 2), each with the setting that would make it possible.

Times are scaled from what a second brings on this machine, which is measured in a few seconds, kept
in the home folder and measured again when the machine or torch has changed, or by ``--measure``. Of
another machine they are known where ``--rates fp32=900G bf16=2T read=2GB write=1GB`` says so
(``gpu_bf16=300T`` of one GPU).
"""

import sys

from flows.running.arguments import load, parser_of
from flows.running.command_line import command
from flows.running.planned import in_vain
from infra import settings as environment
from infra.cluster.capacity import named_faults
from infra.cluster.memory import held_bytes
from infra.versioning.versions import remote_faults
from tasks.data.texts import absent_texts
from tasks.engine.workspace import Workspace
from tasks.living.lineage import with_lineage
from tasks.planning.machine import Machine, remote_directory
from tasks.planning.plan import plan
from tasks.planning.speed import given_rates, measured_rates
from upcycle_core.errors import raise_faults
from upcycle_core.planning.rates import Rates


@command
def main(arguments: list[str] | None = None) -> None:
    """Print the plan of a recipe file."""
    chosen = parser_of("plan").parse_args(arguments)
    recipe = load(chosen)
    base, settings = held_bytes(), environment.configure()
    home = settings.home
    raise_faults(remote_faults("versions.remote", recipe.versions.remote, home))
    remote = remote_directory(recipe.versions.remote, home)
    machine = Machine.here(home, recipe.compute.cpus, remote).changed(chosen.machine)
    described = {change.partition("=")[0] for change in chosen.machine}
    is_here = described <= {"disk", "memory", "remote_disk"}
    if chosen.rates:
        rates: Rates | None = given_rates(chosen.rates, machine.cpus)
    else:
        rates = measured_rates(home, again=chosen.measure) if is_here else None
    recipe = with_lineage(recipe, Workspace(home / recipe.name))
    made = plan(recipe, home, machine, base=base, rates=rates)
    print(made.table())
    print(made.places())
    print(made.summary())
    for line in in_vain(recipe):
        print(line)
    if absent := absent_texts(recipe):
        print(f"Not there yet, and planned as no text: {', '.join(absent)}.")
    # Of a cluster that is named the machines are not known, unless they are described.
    is_local = settings.ray_address == "local" or bool(chosen.machine)
    named = named_faults(recipe.compute) if settings.ray_address == "local" and is_here else ()
    raise_faults([*made.faults(is_local=is_local), *named])


if __name__ == "__main__":
    sys.exit(main())
