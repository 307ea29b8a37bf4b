"""Where router files lie, which statistics they are solved from, and which experts are joined."""

from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.engine.stage import each
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


def joined(recipe: Recipe, domain: str) -> str:
    """What gives a domain's MLPs to the MoE."""
    return f"{'experts' if recipe.experts.repair == 'none' else 'repaired'}/{domain}"


def all_joined(recipe: Recipe) -> list[str]:
    """The same of every domain."""
    return [joined(recipe, domain) for domain in recipe.domains]


def all_experts(recipe: Recipe) -> list[str]:
    """Every expert, and beside it what it was repaired into, where it was."""
    return list(dict.fromkeys([*each(recipe, "experts/{domain}"), *all_joined(recipe)]))


def joined_paths(run: StageRun) -> dict[str, Path]:
    """{domain: what gives its MLPs to the MoE}"""
    return {domain: run.path(joined(run.recipe, domain)) for domain in run.recipe.domains}
