"""How far the gate's figures move between retrainings of the same text in another order.

    python -m benchmarks.gate_noise [--nights N] [--home FOLDER]

`recipes/nightly.yaml` is built once; then its growing domain gets new text, and the same home is
retrained N times from there, each time in a copy of its own. The recipe's seed is pinned; what
differs is the length of one short file beside the new text, which shifts what comes after it in
the batches. What the figures differ by between the nights is noise: no margin below it decides
anything. ``ratio`` is the recipe's margin over twice the standard deviation of what the gate
compares, challenger less champion, both judged in the same night; the interval of 95 % that a
bootstrap over the nights gives of that deviation stands beside it.
"""

import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.children import ROOT
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.noop_retrain import run
from infra.recipe.reading import load_recipe

RECIPE = ROOT / "recipes" / "nightly.yaml"
FIRST, HELDOUT, NEW = ("json", "email", "unittest"), ("http", "logging"), "asyncio"
LINE, LINES = "# The same text as in the other nights, but for this.\n", 40
SMALLEST = 1_000
"""Bytes of a source that is text to learn from."""
FIGURE = re.compile(r"(normalised_\w+) ([\d.]+) (?:of the challenger|against)\D*?([\d.]+)")


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--nights", type=int, default=6)
    parser.add_argument("--home", type=Path, help="of the built model; kept, and used again")
    options = parser.parse_args()
    gate = load_recipe(RECIPE, ["folder=texts"]).registry.gate
    with tempfile.TemporaryDirectory(prefix="gate-noise-") as folder:
        base = options.home or Path(folder, "home")
        texts = base.with_name("texts")
        if not base.exists():
            _write(texts, "python", FIRST)
            _write(texts, "heldout", HELDOUT)
            run(["-m", "flows.dume", str(RECIPE), *_changes(texts)], base)
        _write(texts, "python", (*FIRST, NEW))
        nights = [_night(base, Path(folder, f"night-{n}"), texts, n) for n in range(options.nights)]
    changes = {name: [night[name] for night in nights] for name in nights[0]}
    rows = [[name, np.mean(values), np.std(values, ddof=1)] for name, values in changes.items()]
    print_table("challenger less champion, points", ["figure", "mean", "deviation"], rows)
    decisive = np.asarray(changes[gate.metric])
    spread = stats.bootstrap((decisive,), lambda x, axis: np.std(x, ddof=1, axis=axis), rng=0)
    deviation = float(np.std(decisive, ddof=1))
    figures = {
        "margin": gate.margin,
        "changes": changes,
        "deviation": deviation,
        "interval": list(map(float, spread.confidence_interval)),
        "goal": {"at_least": 1.0},
    }
    print_result("gate_noise", gate.margin / (2 * deviation), figures)


def _changes(texts: Path) -> list[str]:
    return ["--set", f"folder={texts}", "--set", "registry.certificate=none"]


def _write(texts: Path, name: str, packages: tuple[str, ...]) -> None:
    library, folder = Path(sysconfig.get_paths()["stdlib"]), texts / name
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        for source in sorted((library / package).rglob("*.py")):
            if source.stat().st_size < SMALLEST:
                continue
            flat = "-".join(source.relative_to(library).with_suffix(".txt").parts)
            shutil.copyfile(source, folder / flat)


def _night(base: Path, home: Path, texts: Path, number: int) -> dict[str, float]:
    """Retrain in a copy of ``base``; each figure of the gate, challenger less champion."""
    shutil.copytree(base, home, symlinks=True)
    (texts / "python" / "a-night.txt").write_text(LINE * LINES * (1 + number))
    run(["-m", "flows.retrain", str(RECIPE), *_changes(texts)], home)
    summary = (home / "nightly" / "summary.txt").read_text()
    [reason] = [line for line in summary.splitlines() if line.startswith("Registry")]
    print(number, reason, file=sys.stderr, flush=True)
    shutil.rmtree(home)
    return {name: float(mine) - float(theirs) for name, mine, theirs in FIGURE.findall(reason)}


if __name__ == "__main__":
    main()
