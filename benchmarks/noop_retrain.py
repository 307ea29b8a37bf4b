"""A retrain that finds nothing new, against starting Python and importing what it needs.

    python -m benchmarks.noop_retrain [--recipe RECIPE] [--home FOLDER] [--repeats N]

Both are commands, timed from start to end. Beside them stands what a retrain reads of weights: what
the kernel had to load of them again, after it was told to forget them. Opening a file reads its
header, and the kernel some pages ahead; a pass over it reads it whole.

Without ``--home`` the recipe's model is built first, in a temporary home, with a few training
steps: what a retrain looks at has the same size. With it, the home is one where the model has been
built.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.children import ROOT, run_python
from benchmarks.common import median, parser_of, print_result, print_table
from benchmarks.page_cache import forget, held_bytes, weights_below

IMPORTS = "import prefect, torch, mlflow"
FEW_STEPS = (
    "seed_model.training.steps=60",
    "experts.training.steps=30",
    "evaluation.sweep_top_k=[]",
    "evaluation.sweep_ridge_lambda=[]",
    "evaluation.sweep_window=[]",
)
AT_MOST = 1.5


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=5)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "demo.yaml")
    parser.add_argument("--home", type=Path, help="where the recipe's model has been built")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="noop-") as folder:
        home = options.home or Path(folder)
        settings = () if options.home else FEW_STEPS
        arguments = [str(options.recipe), *(part for s in settings for part in ("--set", s))]
        if options.home is None:
            run(["-m", "flows.dume", *arguments], home)
        weights = list(weights_below(home))
        forget(weights)
        run(["-m", "flows.retrain", *arguments], home)
        read, size = sum(map(held_bytes, weights)), sum(f.stat().st_size for f in weights)
        pairs = [
            (run(["-c", IMPORTS], home), run(["-m", "flows.retrain", *arguments], home))
            for _ in range(options.repeats)
        ]
    imports, retrains = (median(list(times)) for times in zip(*pairs, strict=True))
    rows = [[IMPORTS, imports, 1.0], ["retrain, nothing new", retrains, retrains / imports]]
    print_table("command", ["command", "seconds", "ratio"], rows)
    print(f"weights read without news: {read / 1e6:.3f} of {size / 1e6:.3f} MB")
    figures = {
        "goal": {"at_most": AT_MOST, "weights_read_bytes": 0},
        "weights_read_bytes": read,
        "weights_bytes": size,
        "seconds": {"imports": imports, "retrain": retrains},
    }
    print_result("noop_retrain", retrains / imports, figures)


def run(arguments: Sequence[str], home: Path) -> float:
    """Wall seconds of a Python command that works in ``home``."""
    return run_python(arguments, environment={**os.environ, "UPCYCLE_HOME": str(home)})


if __name__ == "__main__":
    main()
