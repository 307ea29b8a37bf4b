"""Stage ``router``: ridge regression on the saved statistics (DUME, equations 6 and 7)."""

from collections.abc import Mapping
from pathlib import Path

from infra.compute import Piece
from infra.recipe import Recipe
from tasks.routers import ROUTERS, splits, statistics_files
from tasks.sequential import solve_layer_by_layer
from tasks.stage import StageRun, each, stage
from upcycle_core.dume.config import RouterConfig
from upcycle_core.dume.router import save_routers, solve_routers
from upcycle_core.dume.statistics import Statistics
from upcycle_core.progress import Progress


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    found = list(each(recipe, "statistics/{domain}"))
    if recipe.router.solve == "sequential":
        found += [*each(recipe, "experts/{domain}"), *each(recipe, "corpora/{domain}"), "backbone"]
    return found


@stage(
    "router",
    inputs=_inputs,
    params=("router", "moe.top_k", "statistics", "compute.assembly"),
    sources=(
        "tasks/sequential.py",
        "upcycle_core/activations/capture.py",
        "upcycle_core/backbone/stitch.py",
        "upcycle_core/corpora/batches.py",
        "upcycle_core/corpora/mixture.py",
        "upcycle_core/corpora/seeded.py",
        "upcycle_core/dume/collect.py",
        "upcycle_core/dume/cross_validation.py",
        "upcycle_core/dume/ridge.py",
        "upcycle_core/dume/router.py",
        "upcycle_core/dume/sequential.py",
        "upcycle_core/moe/inspect.py",
    ),
    needed=lambda recipe: recipe.method == "dume",
)
def router(run: StageRun) -> None:
    """Write one file a calibration text: ``router`` and, where there is one, ``elsewhere``."""
    recipe = run.recipe
    if recipe.router.solve == "sequential":
        for split in splits(recipe):
            solve_layer_by_layer(run, split, statistics_files(run, split), run.out / ROUTERS[split])
        return
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


def solve_piece(
    *, out: Path, progress: Progress, statistics: Mapping[str, Path], config: RouterConfig
) -> None:
    """The piece: all layers."""
    progress.start("solving the routers", 1, "models")
    loaded = {name: Statistics.load(path) for name, path in statistics.items()}
    save_routers(solve_routers(loaded, config=config), out)
    progress.advance()
