"""Rank-4 DeRS forward / dense forward, and what a compressed MoE takes beside a vanilla one.

    python -m benchmarks.ders_forward [--device cuda] [--repeats N] [--threads N]

H 256, I 704, 8 layers, 4 experts, one a token. A Mixtral whose experts are a dense Llama's FFNs and
a little noise (vanilla); the same as one base and deltas of rank 4, sparse 0.9 and 4 bit
(compressed); and the Mixtral that the rank-4 one expands to. ``ratio`` is the rank-4 forward's time
divided by the dense one's, in fp32 and under bf16 autocast, all taking turns in one process. CPU
time, which neighbours on the machine disturb less, stands beside the clock's. Load time and memory
are of a process of its own for each that loads the checkpoint and runs one row of tokens: resident
memory at its peak above that of the imports; on a GPU, the allocator's.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.children import call_in_child, memory_mb
from benchmarks.common import (
    Clocks,
    alternate,
    median,
    median_ratio,
    parser_of,
    print_result,
    print_table,
    time_in_turns,
)
from benchmarks.models import EXPERTS, SHAPE, SHARD, VOCABULARY, save_word_tokenizer
from benchmarks.moe_forward import TOKENS
from upcycle_core.baselines.mixture import copies_of, write_mixture
from upcycle_core.checkpoints.load import load_causal_lm, quiet_loading
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig
from upcycle_core.ders.expand import expand

BATCH, LENGTH = TOKENS["small"]
BOTH: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
GOAL = 1.25
DENSE, VANILLA, CHOSEN, EXPANDED = "dense", "vanilla", "rank 4", "expanded"
CODECS = {
    CHOSEN: CodecConfig(codec="low_rank", rank=4),
    "sparse 0.9": CodecConfig(codec="sparse", drop_rate=0.9),
    "4 bit": CodecConfig(codec="quantised", bits=4),
}
NAMES = (DENSE, VANILLA, *CODECS, EXPANDED)
LOADED = ("load_s", "tensors_mb", "peak_mb")
Found = dict[str, float]


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=15, device=True)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="ders-forward-") as name:
        folder = Path(name)
        make(folder)
        sizes = {name: _bytes(place(folder, name)) for name in NAMES}
        load = partial(call_in_child, load_and_run, threads=options.threads)
        children = {name: partial(load, place(folder, name), options.device) for name in NAMES}
        loads = alternate(children, min(3, options.repeats))
        times = forwards(folder, options.device, options.repeats)
    report(sizes, loads, times, options.device)


def make(folder: Path) -> None:
    """Write every checkpoint."""
    dense, generator = place(folder, DENSE), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    with quiet_loading():
        LlamaForCausalLM(LlamaConfig.from_dict(SHAPE)).save_pretrained(dense)
    save_word_tokenizer(dense)

    def noise(layer: int, expert: int, part: str, weight: torch.Tensor) -> torch.Tensor:
        return weight + 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)

    vanilla = place(folder, VANILLA)
    copies = copies_of(dense, EXPERTS)
    write_mixture(copies, vanilla, top_k=1, router_seed=0, max_shard_bytes=SHARD, edit=noise)
    for name, codec in CODECS.items():
        compress(vanilla, place(folder, name), config=codec, base=dense, max_shard_bytes=SHARD)
    expand(place(folder, CHOSEN), place(folder, EXPANDED), max_shard_bytes=SHARD)


def place(folder: Path, name: str) -> Path:
    """Where a checkpoint lies."""
    return folder / name.replace(" ", "-").replace(".", "")


def load_and_run(path: Path, device: str) -> Found:
    """Seconds to load, MB of its tensors, and MB at the peak of loading and one forward.

    In a process of its own.
    """
    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    started = time.perf_counter()
    model: Any = load_causal_lm(path, device=device)
    loaded = time.perf_counter() - started
    with torch.no_grad():
        model(input_ids=torch.arange(LENGTH, device=device)[None], use_cache=False)
    peak = torch.cuda.max_memory_allocated() / 1e6 if device != "cpu" else 0.0
    return {
        "load_s": loaded,
        "tensors_mb": model.get_memory_footprint() / 1e6,
        "peak_mb": peak or memory_mb("VmHWM") - before,
    }


def forwards(folder: Path, device: str, repeats: int) -> dict[str, Clocks]:
    """{precision: what each model's forward took}, all taking turns."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)
    found: dict[str, Clocks] = {}
    for precision in BOTH:
        calls: dict[str, Callable[[], object]] = {}
        for name in NAMES:
            model: Any = load_causal_lm(place(folder, name), device=device, precision=precision)
            calls[name] = partial(forward, model, ids, precision)
        found[precision] = time_in_turns(calls, repeats, device=device, warm_up=2)
    return found


def forward(model: Any, ids: torch.Tensor, precision: str) -> None:
    """One forward."""
    device = ids.device.type
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
        model(input_ids=ids, use_cache=False)


def report(
    sizes: Mapping[str, int],
    loads: Mapping[str, list[Found]],
    times: Mapping[str, Clocks],
    device: str,
) -> None:
    """Print the tables and the result."""
    rows: list[list[object]] = [
        [
            name,
            sizes[name] / 1e6,
            sizes[name] / sizes[VANILLA],
            *(median([one[what] for one in found]) for what in LOADED),
        ]
        for name, found in loads.items()
    ]
    columns = ["", "on disk MB", "/ vanilla", "load s", "tensors MB", "peak MB"]
    print_table(f"checkpoints of {EXPERTS} experts, fp32, on {device}", columns, rows)
    ratio: dict[str, float] = {}
    rows = []
    for precision, clocks in times.items():
        wall, cpu = clocks.wall, clocks.cpu
        ratio[precision] = median_ratio(wall[CHOSEN], wall[DENSE])
        rows += [
            [
                f"{precision} {name}",
                1000 * median(wall[name]),
                BATCH * LENGTH / median(wall[name]),
                median_ratio(wall[name], wall[DENSE]),
                median_ratio(cpu[name], cpu[DENSE]),
                median_ratio(wall[name], wall[VANILLA]),
            ]
            for name in wall
        ]
    columns = ["", "ms", "tokens/s", "/ dense", "CPU time / dense", "/ vanilla"]
    print_table(f"forward of {BATCH} x {LENGTH} tokens, one expert a token", columns, rows)
    figures = {"bytes": sizes, "loads": loads, "seconds": times, "goal": GOAL, "device": device}
    print_result("ders_forward", ratio, figures)


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


if __name__ == "__main__":
    main()
