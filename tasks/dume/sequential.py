"""``router.solve: sequential``: layer by layer, L passes (the ablation of DUME's section 2.3)."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from tasks.dume.files import solved_on_paths
from tasks.dume.statistics import in_shards
from tasks.engine.stage import StageRun
from upcycle_core.dume.router import save_routers, solve_routers, solve_sequentially
from upcycle_core.dume.router_reader import RouterSolution
from upcycle_core.dume.sequential import sequential_statistics
from upcycle_core.dume.statistics import Statistics
from upcycle_core.moe.assemble import assemble


def solve_layer_by_layer(
    run: StageRun, split: str, statistics: Mapping[str, Path], out: Path
) -> None:
    """Solve each router from inputs that the routers before it have shaped.

    Args:
        run: The router stage's run; its pieces are (layer, domain, shard).
        split: The calibration text.
        statistics: Files of the joint pass by domain; lambda is chosen on them.
        out: File to write the routers to.
    """
    joint = {name: Statistics.load(path) for name, path in statistics.items()}
    config = run.recipe.router
    first = solve_routers(joint, config=config)
    moe = _assembled(run, split, first)

    def gather(layer: int, routers: Mapping[int, Tensor]) -> dict[str, Statistics]:
        return _layer_statistics(run, split, moe, layer, routers)

    solution = solve_sequentially(
        next(iter(joint.values())).layout.layers,
        gather,
        choice=first.choice,
        config=config,
    )
    save_routers(solution, out)


def _assembled(run: StageRun, split: str, solution: RouterSolution) -> Path:
    """A MoE to send tokens through; its routers are replaced as they are solved."""
    recipe = run.recipe
    return run.done(
        f"{split}-moe",
        assemble,
        "assembly",
        experts=solved_on_paths(run),
        backbone=run.path("backbone"),
        routers=solution.weights,
        top_k=recipe.moe.top_k,
        normalise=recipe.moe.normalise_top_k,
        max_shard_bytes=recipe.moe.max_shard_bytes,
    ).path


def _layer_statistics(
    run: StageRun, split: str, moe: Path, layer: int, routers: Mapping[int, Tensor]
) -> dict[str, Statistics]:
    common = {"moe": moe, "routers": dict(routers), "layer": layer}
    texts = {
        f"{split}-{layer}-{domain}": {"corpus": _text(run, domain, split), **common}
        for domain in run.recipe.domains
    }
    files = in_shards(run, sequential_statistics, texts).values()
    return dict(zip(run.recipe.domains, map(Statistics.load, files), strict=True))


def _text(run: StageRun, domain: str, split: str) -> Path:
    has_it = split == "calibration" or run.recipe.domains[domain].elsewhere is not None
    return run.path(f"corpora/{domain}/{split if has_it else 'calibration'}")
