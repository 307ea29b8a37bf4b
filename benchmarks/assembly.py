"""Joining two models of 349 M parameters: ours, load-all-then-save, and mergekit-moe.

    python -m benchmarks.assembly [--peer PYTHON] [--repeats N]

Each way is a process of its own with one thread, which ends with 100 MB shards of a 2-expert MoE
(bf16, random routers). Ours averages the backbone first, written to disk and read again, and brings
every file to the disk; the peer takes the first model's as it is. Memory is anonymous memory (not
mapped files) above that of a process that only imports.
"""

import importlib
import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType

from benchmarks.children import ChildFigures, child_command, measure_child
from benchmarks.common import alternate, median, median_ratio, parser_of, print_result, print_table

SHARD_BYTES = 100_000_000
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2832,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
# Modules with a ``run``; each way pays for its own imports only.
WAYS = {"streamed": "benchmarks.assembly_streamed", "load-all": "benchmarks.assembly_plain"}


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=5)
    parser.add_argument("--peer", help="an interpreter that has mergekit 0.1.5")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="assembly-") as name:
        compare(Path(name), options.peer, options.repeats)


def compare(folder: Path, peer: str | None, repeats: int) -> None:
    """Make the models, measure every way in turns, print."""
    measure_child(child_command(make_models, folder))
    commands = {way: child_command(run_way, way, folder) for way in WAYS}
    baselines = {way: child_command(import_way, way) for way in WAYS}
    if peer:
        commands["mergekit-moe"] = _peer(peer, folder)
        baselines["mergekit-moe"] = [peer, "-c", "import mergekit.scripts.moe"]
    for command in commands.values():  # files into the page cache, bytecode onto the disk
        measure_child(command)
    measures = {way: partial(measure_child, command) for way, command in commands.items()}
    imports = {f"{way} imports": partial(measure_child, c) for way, c in baselines.items()}
    found = alternate(measures | imports, repeats)
    rows = {way: summary(found[way], found[f"{way} imports"]) for way in commands}
    ratio = {"memory": median_ratio(*(_memory(found, way) for way in WAYS))}
    ratio |= _time_ratios(found, "streamed", "load-all", "load_all")
    if peer:
        ratio |= _time_ratios(found, "streamed", "mergekit-moe", "mergekit")
        ratio["mergekit_memory"] = median_ratio(
            _memory(found, "streamed"), _memory(found, "mergekit-moe")
        )
    columns = list(next(iter(rows.values())))
    table = [[way, *(row[column] for column in columns)] for way, row in rows.items()]
    print_table("two 349 M Llamas to one MoE, one thread (medians)", ["way", *columns], table)
    print_table("ratio", ["streamed /", "value"], [list(pair) for pair in ratio.items()])
    figures = {"repeats": repeats, "ways": rows, "runs": found}
    if peer:
        figures["peer"] = _peer_versions(peer)
    print_result("assembly", ratio, figures)


def summary(runs: list[ChildFigures], imports: list[ChildFigures]) -> dict[str, float]:
    """Medians of one way, whole and without what its imports cost."""
    return {
        "wall s": median([run.wall_s for run in runs]),
        "CPU s": median([run.cpu_s for run in runs]),
        "CPU s above imports": median(
            [run.cpu_s - bare.cpu_s for run, bare in zip(runs, imports, strict=True)]
        ),
        "anonymous MB above imports": median(_above(runs, imports)),
    }


def make_models(folder: Path) -> None:
    """What a child process does first."""
    import_way("load-all").make_models(folder, SHAPE)


def run_way(way: str, folder: Path) -> None:
    """What a child process does."""
    import_way(way).run(folder, folder / way, max_shard_bytes=SHARD_BYTES)


def import_way(way: str) -> ModuleType:
    """The module of a way; what a child process does to show what imports cost."""
    return importlib.import_module(WAYS[way])


def _above(runs: list[ChildFigures], imports: list[ChildFigures]) -> list[float]:
    """Anonymous memory of each run above that of imports alone, in MB."""
    pairs = zip(runs, imports, strict=True)
    return [run.peak_anonymous_mb - bare.peak_anonymous_mb for run, bare in pairs]


def _memory(found: dict[str, list[ChildFigures]], way: str) -> list[float]:
    return _above(found[way], found[f"{way} imports"])


def _time_ratios(
    found: dict[str, list[ChildFigures]], ours: str, theirs: str, name: str
) -> dict[str, float]:
    return {
        f"{name}_{what}": median_ratio(
            [getattr(run, f"{what}_s") for run in found[ours]],
            [getattr(run, f"{what}_s") for run in found[theirs]],
        )
        for what in ("cpu", "wall")
    }


def _peer(python: str, folder: Path) -> list[str]:
    experts = [
        {"source_model": str(folder / name), "positive_prompts": [""]} for name in ("a", "b")
    ]
    config = {
        "base_model": str(folder / "a"),
        "gate_mode": "random",
        "dtype": "bfloat16",
        "experts": experts,
    }
    path = folder / "peer.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    program = Path(python).parent / "mergekit-moe"
    options = ["--out-shard-size", "100M", "--quiet", "--num-threads", "1"]
    return [python, str(program), str(path), str(folder / "peer"), *options]


def _peer_versions(python: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({n: m.version(n) for n in ('mergekit', 'torch', 'transformers')}))"
    )
    return json.loads(subprocess.check_output([python, "-c", code], text=True))


if __name__ == "__main__":
    main()
