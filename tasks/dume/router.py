"""Stage ``router``: ridge regression on the saved statistics (DUME, equations 6 and 7)."""

from collections.abc import Mapping
from pathlib import Path

from infra.cluster.pieces import Piece
from infra.recipe.schema import Recipe
from tasks.dume.files import ROUTERS, all_solved_on, calibration_splits, splits, statistics_files
from tasks.dume.sequential import solve_layer_by_layer
from tasks.engine.params import router_keys
from tasks.engine.stage import StageRun, each, stage
from upcycle_core.dume.config import RouterConfig
from upcycle_core.dume.router import save_routers, solve_routers
from upcycle_core.dume.statistics import Statistics
from upcycle_core.progress import Progress


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    found = list(each(recipe, "statistics/{domain}"))
    if recipe.router.solve == "sequential":
        found += [*all_solved_on(recipe), "backbone"]
        found += [
            f"corpora/{name}/{split}"
            for name in recipe.domains
            for split in calibration_splits(recipe, name)
        ]
    return found


@stage("router", _inputs, params=lambda recipe, item: router_keys(recipe))
def router(run: StageRun) -> None:
    """Write one file a calibration text: ``router`` and, where there is one, ``elsewhere``."""
    recipe = run.recipe
    if recipe.router.solve == "sequential":
        for split in splits(recipe):
            solve_layer_by_layer(run, split, statistics_files(run, split), run.out / ROUTERS[split])
        return
    pieces = [
        Piece.of(split, solve_piece, statistics=statistics_files(run, split), config=recipe.router)
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
