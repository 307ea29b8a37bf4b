"""One recipe with several seeds, and a page with means and deviations.

``python -m flows.seeds recipes/five-domains.yaml --seeds 0 1 2 --out docs/results --set folder=F``

Each seed is a whole run of the flow in a workspace of its own (``NAME-seed-0``, ...), so what is
finished is not run again.
"""

import sys

from flows.pages.model import folder_faults
from flows.pages.page import Command
from flows.pages.seeds import write_seeds
from flows.running.arguments import load, parser_of
from flows.running.command_line import command, run_apart
from upcycle_core.errors import raise_faults


@command
def main(arguments: list[str] | None = None) -> None:
    """Run every seed, then write ``NAME.md``, ``NAME.json`` and pictures."""
    chosen = parser_of("seeds").parse_args(arguments)
    recipe = load(chosen)
    raise_faults(folder_faults(chosen.out))
    workspaces = [run_apart("flows.dume", chosen, recipe, seed) for seed in chosen.seeds]
    write_seeds(Command.of("seeds", recipe, chosen), workspaces)


if __name__ == "__main__":
    sys.exit(main())
