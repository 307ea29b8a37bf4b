"""Where router files lie, and which statistics they are solved from."""

from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.engine.stage_run import StageRun

STATISTICS = "{split}.safetensors"
"""Of one calibration text, in a domain's artifact."""
ROUTERS = {"calibration": "router.safetensors", "elsewhere": "elsewhere.safetensors"}


def splits(recipe: Recipe) -> list[str]:
    """The calibration texts that a router is solved from."""
    has_elsewhere = any(domain.elsewhere is not None for domain in recipe.domains.values())
    return ["calibration", "elsewhere"] if has_elsewhere else ["calibration"]


def calibration_splits(recipe: Recipe, domain: str) -> list[str]:
    """The calibration texts of one domain."""
    own = recipe.domains[domain]
    return ["calibration"] if own.elsewhere is None else ["calibration", "elsewhere"]


def statistics_files(run: StageRun, split: str) -> dict[str, Path]:
    """Every domain's statistics of a text; the usual ones where a domain has no text elsewhere."""
    return {
        name: run.path(f"statistics/{name}")
        / STATISTICS.format(split=split if domain.elsewhere is not None else "calibration")
        for name, domain in run.recipe.domains.items()
    }
