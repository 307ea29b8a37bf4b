"""One recipe with several seeds, and a page with means and deviations.

``python -m flows.seeds recipes/five-domains.yaml --seeds 0 1 2 --out docs/results --set folder=F``

Each seed is a whole run of the flow in a workspace of its own (``NAME-seed-0``, ...), so what is
finished is not run again.
"""

import sys
from pathlib import Path

from flows.pages.page import Command
from flows.pages.seeds import write_seeds
from flows.running.command_line import command, load, recipe_parser
from infra import settings as environment
from infra.services.stopping import run_command
from tasks.engine.sources import CODE


@command
def main(arguments: list[str] | None = None) -> None:
    """Run every seed, then write ``NAME.md``, ``NAME.json`` and pictures."""
    parser = recipe_parser("flows.seeds", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="folder for the page")
    chosen = parser.parse_args(arguments)
    home = environment.configure().home
    recipe = load(chosen)
    workspaces = []
    for seed in chosen.seeds:
        name = f"{recipe.name}-seed-{seed}"
        changes = [*chosen.set, f"seed={seed}", f"name={name}"]
        options = [part for change in changes for part in ("--set", change)]
        if chosen.add:
            options += ["--add", *(str(path.resolve()) for path in chosen.add)]
        words = [sys.executable, "-m", "flows.dume", str(chosen.recipe.resolve()), *options]
        run_command(words, directory=CODE)
        workspaces.append(home / name)
    made = Command.of("seeds", recipe, chosen)
    write_seeds(made, workspaces)


if __name__ == "__main__":
    sys.exit(main())
