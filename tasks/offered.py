"""Whether a recipe can be deployed: ``python -m tasks.offered RECIPE [FILE ...]``.

It is what a flow looks at first, without a weight or a network: values, methods, texts, and that
given models, instructions and what tasks are made from are there. ``infra.services`` asks, in a
process of its own, for it knows no method.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.data.texts import gone_models, text_faults
from tasks.methods import METHODS
from tasks.recipes import load_recipe
from upcycle_core.errors import Fault, InputError, raise_faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is known of the recipe's method, as JSON; or every fault, and return 2."""
    parser = argparse.ArgumentParser(prog="python -m tasks.offered", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("added", type=Path, nargs="*", help="files of tasks or rows")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--elsewhere", action="store_true", help="texts and models are on other machines"
    )
    chosen = parser.parse_args(arguments)
    try:
        recipe = load_recipe(chosen.recipe, chosen.set, added=chosen.added)
        if not chosen.elsewhere:
            raise_faults([*text_faults(recipe), *gone_models(recipe), *_gone_files(recipe)])
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"lives": METHODS[recipe.method].life is not None}))
    return 0


def _gone_files(recipe: Recipe) -> Iterator[Fault]:
    """What instructions and tasks lack; what looks at them is imported where there are some."""
    if recipe.instructions.sources:
        from upcycle_core.corpora.tuning.readers import missing_files

        for name, source in recipe.instructions.sources.items():
            where = f"instructions.sources.{name}"
            yield from missing_files(where, source, recipe.text_folder)
    if recipe.tasks:
        from tasks.data.task_sets import task_set_faults

        yield from task_set_faults(recipe)


if __name__ == "__main__":
    sys.exit(main())
