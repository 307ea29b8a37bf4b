"""Stage ``sources`` of instruction tuning: its instructions beside text and seed."""

from collections.abc import Iterator
from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.data import sources as texts
from tasks.data.given import given_model
from tasks.engine.artifacts import INSTRUCTIONS
from tasks.engine.stage import StageRun, stage
from tasks.simoe.checks import is_tied, lengths, tied_heads
from tasks.simoe.labels import needed_labels
from tasks.simoe.limit import unchecked
from upcycle_core.corpora.tuning.prepare import instruction_faults, instruction_fingerprint
from upcycle_core.errors import Fault, raise_faults


@stage("sources", lambda recipe, item: (), params=(*texts.KEYS, "instructions"), always=True)
def sources(run: StageRun) -> None:
    """Write sha256 of all that is outside, of the instructions in ``instructions.json``."""
    recipe = run.recipe
    raise_faults(outside_faults(recipe, run.models))
    for line in unchecked(recipe):
        run.session.log(line)
    texts.write_sources(run)
    texts.write_forms(run)
    read = instruction_fingerprint(recipe.instructions, folder=recipe.text_folder)
    texts.write_fingerprints(run.out / f"{INSTRUCTIONS}.json", read)


def outside_faults(recipe: Recipe, cache: Path) -> list[Fault]:
    """What is wrong with texts, the seed and instructions outside the workspace."""
    found = texts.outside_faults(recipe, cache, lengths=lengths(recipe))
    seed = None
    if recipe.seed_model.model is not None and not found:
        seed = given_model(recipe, recipe.seed_model.model, cache)
    found += instruction_faults(
        recipe.instructions,
        folder=recipe.text_folder,
        tokenizer=seed,
        bos=recipe.corpus.bos,
        labels=needed_labels(recipe),
    )
    return found or list(_seed_faults(recipe, cache))


def _seed_faults(recipe: Recipe, cache: Path) -> Iterator[Fault]:
    """A head that is to be trained, of a given seed that has none."""
    if recipe.seed_model.model is None:
        return
    place = given_model(recipe, recipe.seed_model.model, cache)
    if (faults := [*tied_heads(recipe)]) and is_tied(place):
        yield from faults
