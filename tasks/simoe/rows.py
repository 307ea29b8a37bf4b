"""The rows of the table of instruction tuning: what they are called, and where their models lie."""

from infra.recipe.schema import Recipe
from upcycle_core.simoe.config import SimoeUpcyclingConfig

SIMOE = "simoe"
"""The recipe's own model, found by instruction tuning."""
TITLES = {"seed": "Pre-trained", SIMOE: "SIMoE"}


def section(recipe: Recipe) -> SimoeUpcyclingConfig:
    """How the recipe's own experts are found."""
    return recipe.simoe or SimoeUpcyclingConfig()


def tuned(recipe: Recipe) -> tuple[str, ...]:
    """The rows: the seed, its rivals, its ablations, and itself."""
    return ("seed", *recipe.baselines, SIMOE)


def model_of(row: str) -> str:
    """The artifact that holds a row's model."""
    return {"seed": "seed", SIMOE: "model"}.get(row, f"baselines/{row}")


def row_title(recipe: Recipe, row: str) -> str:
    """What people call a row."""
    baseline = recipe.baselines.get(row)
    return TITLES[row] if baseline is None else baseline.title or row
