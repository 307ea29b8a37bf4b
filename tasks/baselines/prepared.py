"""What the given models say against rows, before anything is trained."""

from collections.abc import Iterator

from tasks.data.given import given_model, given_models, known_files
from tasks.engine.stage import Session
from upcycle_core.architectures.families import MIXTRAL, family_of
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault


def row_faults(session: Session) -> Iterator[Fault]:
    """Rows that cannot be built on the given models' attention; of what is made here, the recipe's
    own faults tell.

    Args:
        session: Whose ``sources`` are there.
    """
    recipe, cache = session.recipe, session.workspace.models
    rows = [name for name, row in recipe.baselines.items() if row.method == "bam"]
    given = list(given_models(recipe).values())
    if not (rows and given):
        return
    known = known_files(recipe, cache)
    family = family_of(CheckpointReader(given_model(recipe, given[0], cache), known=known).config)
    if family.target is not MIXTRAL:
        remedy = f"has no stock attention to build on for {family.model_type}; remove the row"
        yield from (Fault(f"baselines.{name}.method", "bam", remedy) for name in rows)
