"""Joining two models of 349 M parameters: ours, load-all-then-save, and mergekit-moe.

    python -m benchmarks.assembly [--peer PYTHON] [--repeats N]

Each way is a process of its own with one thread, which ends with 100 MB shards of a 2-expert MoE
(bf16, random routers). Ours averages the backbone first, written to disk and read again, and brings
every file to the disk. The peer takes a backbone as it is; so does ``assembly``, the second half of
ours. Memory is anonymous memory (not mapped files). What imports cost, of any, is what the process
itself has used once they are done, and what its end costs after its last line. Each begins when
nothing of before is left to be deleted, or to be written by the kernel.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import ChildFigures, child_command, measure_child, memory_mb
from benchmarks.common import alternate, median, median_ratio, parser_of, print_result, print_table
from upcycle_core.allocator import kept_memory
from upcycle_core.checkpoints.reader import CheckpointReader

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
NAMES = ("a", "b")
SETTINGS: dict[str, Any] = {"top_k": 1, "max_shard_bytes": SHARD_BYTES}
BACKBONE = Path("streamed", "backbone")
SPENT = "spent.json"
"""What a process writes into the folder at its end: see ``Run``."""
PEER = """
import json, re, sys, time
import mergekit.scripts.moe
held = re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())
path, begun = sys.argv.pop(1), time.process_time()
mergekit.scripts.moe.main(standalone_mode=False)
with open(path, "w") as file:
    json.dump({"cpu_s": time.process_time() - begun, "imports_mb": int(held[1]) / 1000}, file)
"""


@dataclass(frozen=True)
class Run:
    """One process that has joined the models."""

    figures: ChildFigures
    cpu_s: float
    """Seconds of CPU from the end of its imports to its last line."""
    imports_mb: float
    """Anonymous memory that its imports have taken."""

    @property
    def memory_mb(self) -> float:
        """Anonymous memory above that of its imports."""
        return self.figures.peak_anonymous_mb - self.imports_mb


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
    commands = {way: child_command(run, folder) for way, run in WAYS.items()}
    if peer:
        commands["mergekit-moe"] = _peer(peer, folder)
    for command in commands.values():  # files into the page cache, bytecode onto the disk
        measure_child(command)
    measures = {way: partial(_run, command, folder, way) for way, command in commands.items()}
    runs = alternate(measures, repeats)
    rows = {way: summary(runs[way]) for way in commands}
    ratio = _ratios(runs["streamed"], runs["load-all"], "load_all")
    if peer:
        ratio |= _ratios(runs["streamed"], runs["mergekit-moe"], "mergekit")
        ratio |= _ratios(runs["assembly"], runs["mergekit-moe"], "assembly_mergekit")
    columns = list(next(iter(rows.values())))
    table = [[way, *(row[column] for column in columns)] for way, row in rows.items()]
    print_table("two 349 M Llamas to one MoE, one thread (medians)", ["way", *columns], table)
    print_table("ratio", ["streamed /", "value"], [list(pair) for pair in ratio.items()])
    figures = {"repeats": repeats, "ways": rows, "runs": runs}
    if peer:
        figures["peer"] = _peer_versions(peer)
    print_result("assembly", ratio, figures)


def summary(runs: Sequence[Run]) -> dict[str, float]:
    """Medians of one way, whole and without what its imports cost."""
    return {
        "wall s": median([run.figures.wall_s for run in runs]),
        "CPU s": median([run.figures.cpu_s for run in runs]),
        "CPU s above imports": median([run.cpu_s for run in runs]),
        "anonymous MB above imports": median([run.memory_mb for run in runs]),
    }


def make_models(folder: Path) -> None:
    """Two random Llamas in bf16, with a tokenizer of as many words."""
    from transformers import LlamaConfig

    from benchmarks.models import save_word_tokenizer
    from upcycle_core.architectures.families import FAMILIES
    from upcycle_core.checkpoints.writer import TensorSpec, write_sharded

    family = FAMILIES["llama"]
    for seed, name in enumerate(NAMES):
        config = LlamaConfig.from_dict(
            {**SHAPE, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        )
        config.save_pretrained(folder / name)
        torch.manual_seed(seed)
        tensors = family.tensors(config.to_dict())
        specs = [TensorSpec(key, size, torch.bfloat16) for key, size in tensors.items()]

        def produce(key: str, tensors: Mapping = tensors) -> torch.Tensor:
            return (0.02 * torch.randn(tensors[key])).to(torch.bfloat16)

        write_sharded(folder / name, specs, produce, max_shard_bytes=10**10)
        save_word_tokenizer(folder / name, words=SHAPE["vocab_size"])


# What child processes do: each way pays for its own imports only.


@contextmanager
def _spent(folder: Path) -> Iterator[None]:
    imports_mb, begun = memory_mb("RssAnon"), time.process_time()
    yield
    spent = {"cpu_s": time.process_time() - begun, "imports_mb": imports_mb}
    (folder / SPENT).write_text(json.dumps(spent))


def streamed(folder: Path) -> None:
    """Our way: tensors stream through, backbone to disk, then the MoE."""
    import transformers.models.auto.tokenization_auto  # noqa: F401  asked of the tokenizer's class

    from upcycle_core.backbone.average import write_backbone
    from upcycle_core.moe.assemble import assemble

    with kept_memory(), _spent(folder):  # as pieces have it
        readers = [CheckpointReader(folder / name) for name in NAMES]
        write_backbone(readers, folder / BACKBONE, max_shard_bytes=SHARD_BYTES)
        assemble(*_parts(folder), folder / "streamed" / "moe", **SETTINGS)


def assembly(folder: Path) -> None:
    """What of our way the peer does too: the MoE alone, around the backbone that is there."""
    import transformers.models.auto.tokenization_auto  # noqa: F401  as above

    from upcycle_core.moe.assemble import assemble

    with kept_memory(), _spent(folder):
        assemble(*_parts(folder), folder / "assembly", **SETTINGS)


def _parts(folder: Path) -> tuple[dict[str, Path], Path, dict[int, torch.Tensor]]:
    """Experts, backbone and random routers."""
    paths = {name: folder / name for name in NAMES}
    config = CheckpointReader(paths[NAMES[0]]).config
    routers = {layer: random_router(config, layer) for layer in range(config["num_hidden_layers"])}
    return paths, folder / BACKBONE, routers


def load_all(folder: Path) -> None:
    """The plain way: both models in memory, the MoE in memory, then ``save_pretrained``."""
    import transformers.models.auto.modeling_auto
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401  loaded when asked for

    with _spent(folder):
        _load_all(folder)


def _load_all(folder: Path) -> None:
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        MixtralConfig,
        MixtralForCausalLM,
    )

    from upcycle_core.architectures.families import FAMILIES

    dense = [
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16) for name in NAMES
    ]
    states = [model.state_dict() for model in dense]
    config = json.loads((folder / NAMES[0] / "config.json").read_text())
    target = FAMILIES["llama"].target_config(config, experts=len(NAMES), top_k=1)
    moe = MixtralForCausalLM._from_config(MixtralConfig(**target), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            parameter.copy_(_part(name, states, config))
    moe.save_pretrained(folder / "load-all", max_shard_size=SHARD_BYTES)
    AutoTokenizer.from_pretrained(folder / NAMES[0]).save_pretrained(folder / "load-all")


WAYS: dict[str, Callable[[Path], None]] = {
    "streamed": streamed,
    "assembly": assembly,
    "load-all": load_all,
}


def random_router(config: Mapping, layer: int) -> torch.Tensor:
    """Random weights [H, D], the same for every way."""
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(config["hidden_size"], len(NAMES), generator=generator)


def _part(name: str, states: list[dict[str, torch.Tensor]], config: Mapping) -> torch.Tensor:
    """One fused parameter of the MoE, from whole state dictionaries."""
    prefix = name.split(".experts.")[0]
    if name.endswith("experts.gate_up_proj"):
        gates = [state[f"{prefix}.gate_proj.weight"] for state in states]
        ups = [state[f"{prefix}.up_proj.weight"] for state in states]
        return torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    if name.endswith("experts.down_proj"):
        return torch.stack([state[f"{prefix}.down_proj.weight"] for state in states])
    if name.endswith("mlp.gate.weight"):
        return random_router(config, int(name.split(".")[2])).T
    return torch.stack([state[name].float() for state in states]).mean(dim=0)


def _run(command: Sequence[str], folder: Path, way: str) -> Run:
    shutil.rmtree(folder / way)  # as large as what is written
    os.sync()
    figures = measure_child(command)
    return Run(figures, **json.loads((folder / SPENT).read_text()))


def _ratios(ours: Sequence[Run], theirs: Sequence[Run], name: str) -> dict[str, float]:
    figures: dict[str, Callable[[Run], float]] = {
        "cpu": lambda run: run.figures.cpu_s,
        "wall": lambda run: run.figures.wall_s,
        "cpu_above_imports": lambda run: run.cpu_s,
        "memory": lambda run: run.memory_mb,
    }
    return {
        f"{name}_{what}": median_ratio([of(run) for run in ours], [of(run) for run in theirs])
        for what, of in figures.items()
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
    arguments = [str(folder / SPENT), str(path), str(folder / "mergekit-moe")]
    options = ["--out-shard-size", "100M", "--quiet", "--num-threads", "1"]
    return [python, "-c", PEER, *arguments, *options]


def _peer_versions(python: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({n: m.version(n) for n in ('mergekit', 'torch', 'transformers')}))"
    )
    return json.loads(subprocess.check_output([python, "-c", code], text=True))


if __name__ == "__main__":
    main()
