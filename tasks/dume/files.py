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


ROUTED = "routed"
"""Where experts lie that were repaired for what routers send them, a folder each."""


def solved_on(recipe: Recipe, domain: str) -> str:
    """Whose MLPs statistics are counted behind, and routers solved for."""
    return f"{'experts' if recipe.experts.repair == 'none' else 'repaired'}/{domain}"


def all_solved_on(recipe: Recipe) -> list[str]:
    """The same of every domain."""
    return [solved_on(recipe, domain) for domain in recipe.domains]


def solved_on_paths(run: StageRun) -> dict[str, Path]:
    """{domain: whose MLPs its router column is solved for}"""
    return {domain: run.path(solved_on(run.recipe, domain)) for domain in run.recipe.domains}


def repairs_routed(recipe: Recipe) -> bool:
    """Whether experts are repaired once more when routers are solved."""
    return recipe.experts.repair != "none" and recipe.experts.repair_tokens == "routed"


def all_joined(recipe: Recipe) -> list[str]:
    """What gives all domains' MLPs to the MoE."""
    return [ROUTED] if repairs_routed(recipe) else all_solved_on(recipe)


def all_experts(recipe: Recipe) -> list[str]:
    """Every expert, and beside it what it was repaired into, where it was."""
    return list(dict.fromkeys([*each(recipe, "experts/{domain}"), *all_joined(recipe)]))


def joined_paths(run: StageRun) -> dict[str, Path]:
    """{domain: what gives its MLPs to the MoE}"""
    if not repairs_routed(run.recipe):
        return solved_on_paths(run)
    return {domain: run.path(ROUTED) / domain for domain in run.recipe.domains}
