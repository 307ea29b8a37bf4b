"""Stage ``router``: ridge regression on the saved statistics (DUME, equations 6 and 7)."""

from collections.abc import Mapping
from pathlib import Path

from infra.compute import Piece
from infra.recipe import Recipe
from tasks.stage import StageRun, each, stage
from tasks.statistics import FILE
from upcycle_core.dume.config import RouterConfig
from upcycle_core.dume.router import save_routers, solve_routers
from upcycle_core.dume.statistics import Statistics
from upcycle_core.progress import Progress

ROUTERS = {"calibration": "router.safetensors", "elsewhere": "elsewhere.safetensors"}


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    found = list(each(recipe, "statistics/{domain}"))
    if recipe.router.solve == "sequential":
        found += [*each(recipe, "experts/{domain}"), *each(recipe, "corpora/{domain}"), "backbone"]
    return found


@stage(
    "router",
    inputs=_inputs,
    params=("router", "compute.assembly"),
    sources=(
        "upcycle_core/dume/cross_validation.py",
        "upcycle_core/dume/ridge.py",
        "upcycle_core/dume/router.py",
        "upcycle_core/dume/statistics.py",
    ),
)
def router(run: StageRun) -> None:
    """Write one file a calibration text: ``router`` and, where there is one, ``elsewhere``."""
    recipe = run.recipe
    pieces = [
        Piece(
            name=split,
            function=solve_piece,
            arguments={"statistics": statistics_files(run, split), "config": recipe.router},
        )
        for split in splits(recipe)
    ]
    for split, done in run.run(pieces, "assembly").items():
        done.path.rename(run.out / ROUTERS[split])


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


def solve_piece(
    *, out: Path, progress: Progress, statistics: Mapping[str, Path], config: RouterConfig
) -> None:
    """The piece: all layers."""
    progress.start("solving the routers", 1, "models")
    loaded = {name: Statistics.load(path) for name, path in statistics.items()}
    save_routers(solve_routers(loaded, config=config), out)
