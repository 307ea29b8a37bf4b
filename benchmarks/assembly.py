"""Joining two models of 349 M parameters: ours, load-all-then-save, and mergekit-moe.

    python -m benchmarks.assembly [--peer PYTHON] [--repeats N]

Each way is a process of its own with one thread, which ends with 100 MB shards of a 2-expert MoE
(bf16, random routers). Ours averages the backbone first, written to disk and read again, and brings
every file to the disk; the peer takes the first model's as it is. Memory is anonymous memory (not
mapped files) above that of a process that only imports.
"""

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

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
NAMES = ("a", "b")


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
    baselines = {way: child_command(run, None) for way, run in WAYS.items()}
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
        ours, theirs = (rows[way]["CPU s above imports"] for way in ("streamed", "mergekit-moe"))
        ratio["mergekit_cpu_above_imports"] = ours / theirs
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


# What child processes do: each way pays for its own imports only; no folder shows what they cost.


def streamed(folder: Path | None) -> None:
    """Our way: tensors stream through, backbone to disk, then the MoE."""
    import transformers.models.auto.tokenization_auto  # noqa: F401  asked of the tokenizer's class

    from upcycle_core.backbone.average import write_backbone
    from upcycle_core.checkpoints.reader import CheckpointReader
    from upcycle_core.moe.assemble import assemble

    if folder is None:
        return
    paths, out = {name: folder / name for name in NAMES}, folder / "streamed"
    readers = [CheckpointReader(path) for path in paths.values()]
    write_backbone(readers, out / "backbone", max_shard_bytes=SHARD_BYTES)
    config = readers[0].config
    routers = {layer: random_router(config, layer) for layer in range(config["num_hidden_layers"])}
    assemble(
        paths,
        out / "backbone",
        routers,
        out / "moe",
        top_k=1,
        max_shard_bytes=SHARD_BYTES,
    )


def load_all(folder: Path | None) -> None:
    """The plain way: both models in memory, the MoE in memory, then ``save_pretrained``."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        MixtralConfig,
        MixtralForCausalLM,
    )

    from upcycle_core.architectures.families import FAMILIES

    if folder is None:
        return
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


WAYS: dict[str, Callable[[Path | None], None]] = {"streamed": streamed, "load-all": load_all}


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
