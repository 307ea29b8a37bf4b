"""The domains that instructions are labelled with: Branch-Train-MiX has an expert of each."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from infra.recipe.schema import Recipe
from upcycle_core.baselines.config import Baseline
from upcycle_core.corpora.families.catalogue import FAMILIES
from upcycle_core.errors import Fault


def labels_of(instructions: Path) -> list[str]:
    """Those of prepared instructions."""
    return sorted(file.stem for file in (instructions / "train").glob("*.jsonl"))


def label_faults(recipe: Recipe, labels: list[str]) -> Iterator[Fault]:
    """Rows of Branch-Train-MiX that these labels are too few for."""
    for name, row in _branched(recipe).items():
        needed = _needed(row)
        if len(labels) < needed:
            remedy = f"too few labels to train on for baselines.{name}, an expert of each: "
            remedy += f"it needs {needed}; give every category a domain, or leave the row out"
            yield Fault("instructions.domains", labels, remedy)


def needed_labels(recipe: Recipe) -> int:
    """How many rows of Branch-Train-MiX need; 0 without such a row."""
    return max((_needed(row) for row in _branched(recipe).values()), default=0)


def planned_labels(recipe: Recipe) -> int:
    """How many there are as far as the recipe says, before any record is read.

    Records may name more: at least as many as Branch-Train-MiX needs.
    """
    instructions = recipe.instructions
    of_category = dict(instructions.domains)
    if any(source.generate for source in instructions.sources.values()):
        of_category |= {name: family.domain for name, family in FAMILIES.items()}
    trained = set(instructions.train_categories or of_category)
    trained -= set(instructions.unseen_categories)
    known = {label for category, label in of_category.items() if category in trained}
    known |= {source.domain for source in instructions.sources.values() if source.domain}
    return max(len(known), needed_labels(recipe), 1)


def _branched(recipe: Recipe) -> Mapping[str, Baseline]:
    return {name: row for name, row in recipe.baselines.items() if row.method == "btx"}


def _needed(row: Baseline) -> int:
    """Labels without which a row has no experts to choose from."""
    return max(2, row.top_k) - row.seed_expert
