"""Stage ``sources`` of instruction tuning: its instructions beside text and seed."""

from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.data import sources as texts
from tasks.engine.artifacts import INSTRUCTIONS
from tasks.engine.stage import StageRun, stage
from upcycle_core.corpora.tuning.prepare import instruction_faults, instruction_fingerprint
from upcycle_core.errors import Fault, raise_faults


@stage("sources", lambda recipe, item: (), params=(*texts.KEYS, "instructions"), always=True)
def sources(run: StageRun) -> None:
    """Write sha256 of all that is outside, of the instructions in ``instructions.json``."""
    recipe = run.recipe
    raise_faults(outside_faults(recipe, run.models))
    texts.write_sources(run)
    texts.write_forms(run)
    read = instruction_fingerprint(recipe.instructions, folder=recipe.text_folder)
    texts.write_fingerprints(run.out / f"{INSTRUCTIONS}.json", read)


def outside_faults(recipe: Recipe, cache: Path) -> list[Fault]:
    """What is wrong with texts, the seed and instructions outside the workspace."""
    instructions = instruction_faults(recipe.instructions, folder=recipe.text_folder)
    return [*texts.outside_faults(recipe, cache), *instructions]
