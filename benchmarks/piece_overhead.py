"""What a piece costs beside what it computes: many tiny pieces, and the same calls of bare Ray.

    python -m benchmarks.piece_overhead [--pieces N] [--repeats N]

Both send one queue of calls to the same local Ray of two CPUs, its worker processes already
started, and wait for all. A call returns a number and does nothing else. A piece leaves its files
beside: what it came to, how far it has come, that it is finished.
"""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT
from benchmarks.common import (
    alternate,
    median,
    median_ratio,
    parser_of,
    print_result,
    print_table,
    seconds_of,
)
from infra import settings as environment
from infra.recipe.resources import Resources

CPUS = 2
WARM_UP = 8
"""Calls that are not counted: the first ones start processes and import torch."""


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=1)
    parser.add_argument("--pieces", type=int, default=2000)
    options = parser.parse_args()
    report(measured(options.pieces, options.repeats), options.pieces)


def tiny(*, number: int, **_: Any) -> int:
    """What each computes; a piece is handed its folder and its progress, and leaves them alone."""
    return number


def measured(count: int, repeats: int) -> Mapping[str, list[float]]:
    """Seconds of a queue of ``count``, one a round, by who runs it."""
    from infra.cluster.compute import cluster

    settings = environment.configure()
    with (
        tempfile.TemporaryDirectory(prefix="overhead-") as folder,
        cluster(settings, CPUS, ROOT),
    ):
        measures: dict[str, Callable[[int], None]] = {
            "pieces": partial(run_as_pieces, Path(folder)),
            "bare": run_bare,
        }
        for run in measures.values():
            run(WARM_UP)
        timed = {name: partial(seconds_of, partial(run, count)) for name, run in measures.items()}
        return alternate(timed, repeats)


def run_as_pieces(folder: Path, count: int) -> None:
    """Through our own layer."""
    from infra.cluster.compute import run_pieces
    from infra.cluster.pieces import Piece

    pieces = [Piece.of(f"piece-{i}", tiny, number=i) for i in range(count)]
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        done = run_pieces(
            pieces, directory=Path(directory), resources=Resources(), label="overhead"
        )
    check([piece.result for piece in done.values()], count)


def run_bare(count: int) -> None:
    """Without it."""
    import ray

    one_cpu: Any = ray.remote(num_cpus=1)  # typed for functions without keyword arguments
    call = one_cpu(tiny)
    check(ray.get([call.remote(number=i) for i in range(count)]), count)


def check(results: list[int], count: int) -> None:
    """Whether each call was made, and told from the others."""
    if results != list(range(count)):
        raise ValueError(f"{count} calls came to {results[:10]} ...")


def report(seconds: Mapping[str, list[float]], count: int) -> None:
    """Print the table and the result."""
    each = {name: 1000 * median(values) / count for name, values in seconds.items()}
    names = {"pieces": "run_pieces", "bare": "ray.get of ray.remote"}
    rows = [[names[name], median(seconds[name]), each[name]] for name in names]
    print_table(f"{count} calls on {CPUS} CPUs", ["", "seconds", "ms each"], rows)
    print_result(
        "piece_overhead",
        median_ratio(seconds["pieces"], seconds["bare"]),
        {"seconds": seconds, "ms_each": each, "pieces": count},
    )


if __name__ == "__main__":
    main()
