"""Training a DeRS-upcycled model against vanilla upcycling: memory and step time.

    python -m benchmarks.ders_training [--device cuda] [--precision bf16] [--steps N] [--repeats N]

One dense model (H 256, I 704, 8 layers), four experts in every layer, two a token: whole copies,
or one shared base with sparse or low-rank deltas. All are trained whole, base included, by the
library's trainer with AdamW and a load-balancing loss, each in a process of its own with one
thread, taking turns. ``ratio`` is theirs to vanilla upcycling's. Memory is anonymous memory above
that of the imports: weights, gradients, the optimizer's two moments, activations; on a GPU, the
allocator's. CPU time, which neighbours on the machine disturb less, stands beside the clock's.
"""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import alternate, parser_of, print_result, print_table
from benchmarks.models import EXPERTS, SHAPE, SHARD
from benchmarks.training import (
    DENSE,
    Found,
    Steps,
    Training,
    make_models,
    step_size,
    train_in_child,
)
from upcycle_core.baselines.mixture import copies_of, write_mixture
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.upcycle import write_ders_upcycling
from upcycle_core.moe.size import parameter_counts

VANILLA = "vanilla"
WAYS = {
    "sparse-0.9": DersUpcyclingConfig(codec="sparse", drop_rate=0.9),
    "sparse-0.99": DersUpcyclingConfig(codec="sparse", drop_rate=0.99),
    "rank-4": DersUpcyclingConfig(codec="low_rank", rank=4),
}
TOP_K = 2


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=1, device=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=7, help="of each training, two to warm up")
    options = parser.parse_args()
    how: dict[str, Any] = {"steps": options.steps, "precision": options.precision}
    how |= step_size(options.device) | {"device": options.device}
    with tempfile.TemporaryDirectory(prefix="ders-training-") as name:
        folder = Path(name)
        make(folder)
        calls = {
            model: partial(train_in_child, folder, Training(model=model, **how))
            for model in (DENSE, VANILLA, *WAYS)
        }
        found = alternate(calls, options.repeats)
        parameters = {model: parameter_counts(folder / model).total for model in calls}
    report(found, parameters, how)


def make(folder: Path) -> None:
    """The dense model, and what each way makes of it."""
    make_models(folder)
    dense = folder / DENSE
    write_mixture(
        copies_of(dense, EXPERTS),
        folder / VANILLA,
        top_k=TOP_K,
        router_seed=0,
        max_shard_bytes=SHARD,
    )
    for name, config in WAYS.items():
        write_ders_upcycling(
            dense,
            folder / name,
            config=config,
            experts=EXPERTS,
            top_k=TOP_K,
            seed=0,
            max_shard_bytes=SHARD,
        )


def report(
    found: Mapping[str, list[Found]], parameters: Mapping[str, int], how: Mapping[str, Any]
) -> None:
    """Print the table and the result."""
    steps = Steps(found)
    ratio: dict[str, float] = {}
    rows = []
    for name in found:
        beside = steps.beside(name, VANILLA)
        if name in WAYS:
            ratio |= {f"{name}_step": beside[1], f"{name}_memory": beside[-1]}
        added = (parameters[name] - parameters[DENSE]) / 1e6
        rows.append([name, added, *beside, found[name][0]["loss"][-1]])
    tokens = how["batch_size"] * how["sequence_length"]
    columns = ["", "added M", "step ms", "/ vanilla", "CPU time / vanilla"]
    columns += ["memory MB", "/ vanilla", "last loss"]
    title = f"training steps of {tokens} tokens on {how['device']}, {how['precision']}"
    print_table(f"{title}, {EXPERTS} experts, top {TOP_K}, one thread", columns, rows)
    figures = {"runs": found, "parameters": parameters, "shape": SHAPE, **how}
    print_result("ders_training", ratio, figures)


if __name__ == "__main__":
    main()
