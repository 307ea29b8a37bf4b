"""Where router files lie, and which statistics they are solved from."""

from pathlib import Path

from infra.recipe import Recipe
from tasks.stage import StageRun
from tasks.statistics import FILE

ROUTERS = {"calibration": "router.safetensors", "elsewhere": "elsewhere.safetensors"}


def splits(recipe: Recipe) -> list[str]:
    """The calibration texts that a router is solved from."""
    return ["calibration", "elsewhere"] if recipe.has_elsewhere else ["calibration"]


def statistics_files(run: StageRun, split: str) -> dict[str, Path]:
    """Every domain's statistics of a text; the usual ones where a domain has no text elsewhere."""
    return {
        name: run.path(f"statistics/{name}")
        / FILE.format(split=split if domain.elsewhere is not None else "calibration")
        for name, domain in run.recipe.domains.items()
    }
