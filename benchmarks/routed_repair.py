"""What a second repair, on the tokens that routers really send, gives a model that is there.

    python -m benchmarks.routed_repair RECIPE [--set KEY=VALUE ...]

Reads the workspace of ``flows.dume RECIPE`` (with ``experts.repair``): nothing in it is
changed, nothing but the repair is computed. Percent of each domain's dense expert, mean of domains.
The same rows as whole flows: ``benchmarks.closed_form --rows "counts+repair, routed"``.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from benchmarks.closed_form import COLUMNS, table
from infra import settings as environment
from infra.recipe.schema import Recipe
from tasks.recipes import load_recipe
from upcycle_core.dume.config import RouterConfig
from upcycle_core.dume.routed import repair_routed
from upcycle_core.dume.router import solve_routers
from upcycle_core.dume.statistics import Statistics
from upcycle_core.evaluation.text.pieces import Variant, evaluate_checkpoint, evaluate_moe
from upcycle_core.evaluation.text.results import expert_row
from upcycle_core.evaluation.text.scores import Score
from upcycle_core.moe.assemble import assemble

ROUTERS: Mapping[str, RouterConfig] = {
    "unit columns": RouterConfig(),
    "as solved, x 8": RouterConfig(normalise="none", scale=8.0),
}


def main() -> None:
    """Measure both repairs under both ways to write the routers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args()
    recipe = load_recipe(chosen.recipe, chosen.set)
    workspace = environment.configure().home / recipe.name
    statistics = {
        domain: Statistics.load(workspace / "statistics" / domain / "calibration.safetensors")
        for domain in recipe.domains
    }
    repaired = {domain: workspace / "repaired" / domain for domain in recipe.domains}
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in ROUTERS.items():
            routers = solve_routers(statistics, config=config).weights
            found[f"repaired, {name}"] = measured(recipe, workspace, repaired, routers)
            started = time.monotonic()
            routed = twice_repaired(recipe, workspace, repaired, routers, Path(folder) / name)
            print(f"repaired once more in {time.monotonic() - started:.0f} s", flush=True)
            found[f"routed, {name}"] = measured(recipe, workspace, routed, routers)
            print(table(found), flush=True)


def twice_repaired(
    recipe: Recipe,
    workspace: Path,
    repaired: Mapping[str, Path],
    routers: Mapping[int, Tensor],
    out: Path,
) -> dict[str, Path]:
    """The experts, repaired for what these routers send them."""
    repair_routed(
        workspace / "backbone",
        {domain: workspace / "experts" / domain for domain in repaired},
        repaired,
        {domain: workspace / "corpora" / domain / "calibration" for domain in repaired},
        routers,
        out,
        config=recipe.statistics,
        max_shard_bytes=recipe.moe.max_shard_bytes,
    )
    return {domain: out / domain for domain in repaired}


def measured(
    recipe: Recipe, workspace: Path, experts: Mapping[str, Path], routers: Mapping[int, Tensor]
) -> dict[str, float]:
    """A row's figures."""
    texts = {domain: workspace / "corpora" / domain / "heldout" for domain in experts}
    report = json.loads((workspace / "report" / "metrics.json").read_text())
    config = recipe.evaluation

    def percent(scores: Mapping[str, dict[str, float]]) -> list[float]:
        return [
            100 * report["perplexity"][expert_row(domain)][domain] / perplexity
            for domain, score in scores.items()
            for perplexity in (Score.from_dict(score).perplexity,)
        ]

    with tempfile.TemporaryDirectory() as folder:
        moe, size = Path(folder) / "moe", recipe.moe.max_shard_bytes
        assemble(experts, workspace / "backbone", routers, moe, top_k=1, max_shard_bytes=size)
        variants = {"one": Variant(), "two": Variant(top_k=2)}
        scored = evaluate_moe(moe, variants, texts, config=config)
    oracle: dict[str, dict[str, float]] = {}
    for domain, expert in experts.items():
        oracle |= evaluate_checkpoint(expert, {domain: texts[domain]}, config=config)
    counts = scored["one"]["routing"]
    own = [
        sum(layer[index] for layer in counts[domain]) / sum(map(sum, counts[domain]))
        for index, domain in enumerate(experts)
    ]
    one, two = (percent(scored[name]["scores"]) for name in variants)
    figures = (percent(oracle), one, two, [100 * share for share in own])
    means = [sum(values) / len(values) for values in figures]
    return dict(zip(COLUMNS, (*means, min(one)), strict=True))


if __name__ == "__main__":
    main()
