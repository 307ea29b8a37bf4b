"""What a recipe will need: memory, disk and pieces of every stage, before anything is made.

``python -m flows.plan RECIPE [--set dotted.key=value ...] [--machine PART=AMOUNT ...]``

From the models' headers, or their config.json alone: no weight is read. ``--machine memory=24GB
cpus=2 gpus=1 gpu_memory=80GB disk=500GB`` plans for another machine than this one. What cannot be
is refused (exit code 2), each with the setting that would make it possible.
"""

import sys

from flows.running.arguments import load, parser_of
from flows.running.command_line import command
from infra import settings as environment
from infra.cluster.memory import held_bytes
from tasks.planning.machine import Machine
from tasks.planning.plan import plan
from upcycle_core.errors import raise_faults


@command
def main(arguments: list[str] | None = None) -> None:
    """Print the plan of a recipe file."""
    chosen = parser_of("plan").parse_args(arguments)
    recipe = load(chosen)
    home = environment.configure().home
    machine = Machine.here(home, recipe.compute.cpus).changed(chosen.machine)
    made = plan(recipe, home, machine, base=held_bytes())
    print(made.table())
    print(made.places())
    print(made.summary())
    raise_faults(made.faults())


if __name__ == "__main__":
    sys.exit(main())
