"""A training step of SIMoE against full finetuning and sparse upcycling, and inference once pruned.

    python -m benchmarks.simoe_step [--device cuda] [--precision bf16] [--steps N] [--repeats N]

One dense model (H 256, I 704, 8 layers) and the same batches of prompts with responses, 60 to 85 %
of a row prompt, for the library's trainer as it is: full finetuning; SIMoE with M = 8 in every
linear layer and norm, penalties and frozen prompt pass included, also with a mask entry a
parameter; sparse upcycling with 4 experts, two a token, with balance and z-loss. Each is a process
of its own with one thread, taking turns. ``ratio`` is SIMoE's step time divided by full
finetuning's (goal: at most 2.2). Memory is anonymous memory above that of the imports: weights,
gradients, the optimizer's two moments, activations; on a GPU, the allocator's. CPU time, which
neighbours on the machine disturb less, stands beside the clock's.

Inference: the dense model and SIMoE after pruning, with masks of which a quarter is not zero, drawn
for each expert alone (pruning leaves what any expert uses) and the same for all experts (a quarter
is left). Prefill is the prompts' pass with the first token, the frozen pass that routes included.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    alternate,
    measure_child,
    median,
    median_ratio,
    print_result,
    print_table,
    seconds_of,
)
from benchmarks.simoe_run import FULL, METHODS, PARAMETERS, SIMOE, UPCYCLING, Way, trained
from benchmarks.training_run import EXPERTS, VOCABULARY, make_models
from benchmarks.training_step import SHAPE
from upcycle_core.baselines.upcycling import write_sparse_upcycling
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model.modeling_simoe import gated_modules
from upcycle_core.simoe.prune import prune
from upcycle_core.simoe.upcycle import upcycle_in_memory

GOAL = 2.2
TAU = SimoeUpcyclingConfig.tau
DENSE, ALONE, SHARED = "dense", "pruned, a mask an expert", "pruned, one mask for all"
NEW_TOKENS = 32
SLOW_STEPS = 5
"""Of the one way that is not compared, but shown."""
Found = dict[str, Any]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=12, help="of each training, two to warm up")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.run:
        found = trained(options.folder, Way(**json.loads(options.run.read_text())), options.run)
        options.run.with_suffix(".found").write_text(json.dumps(found))
        return
    size: dict[str, Any] = {"batch_size": 4, "sequence_length": 128}
    if options.device != "cpu":  # more than its kernel launches
        size = {"batch_size": 64, "sequence_length": 256}
    how = {name: getattr(options, name) for name in ("device", "precision", "steps")} | size
    with tempfile.TemporaryDirectory(prefix="simoe-step-") as name:
        folder = Path(name)
        make_models(folder, SHAPE)
        write_sparse_upcycling(
            folder / "dense",
            folder / "upcycled",
            copies=EXPERTS,
            top_k=2,
            router_seed=0,
            max_shard_bytes=1 << 30,
        )
        calls = {method: partial(measure, folder, Way(method=method, **how)) for method in METHODS}
        slow = partial(measure, folder, Way(method=PARAMETERS, **how | {"steps": SLOW_STEPS}))
        steps = alternate(calls, options.repeats) | alternate({PARAMETERS: slow}, 1)
        answers = inference(folder / "dense", options, size)
    report(steps, answers, how)


def measure(folder: Path, way: Way) -> Found:
    """One training in a process of its own."""
    place = folder / "runs" / re.sub(r"\W+", "-", way.method)
    shutil.rmtree(place, ignore_errors=True)  # an earlier round would be resumed
    place.mkdir(parents=True)
    file = way.saved(place / "way.json")
    module = [sys.executable, "-m", "benchmarks.simoe_step"]
    child = measure_child([*module, "--folder", str(folder), "--run", str(file)])
    found = json.loads(file.with_suffix(".found").read_text())
    found["memory_mb"] = found["gpu_mb"] or child.peak_anonymous_mb - found["before_mb"]
    return found


def inference(
    dense: Path, options: argparse.Namespace, size: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """{model: ``parameters``, ``prefill_s`` and ``token_s`` of each round}, all taking turns."""
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    models: dict[str, Any] = {DENSE: load_causal_lm(dense, device=options.device, dtype=dtype)}
    for name, is_shared in ((ALONE, False), (SHARED, True)):
        models[name] = pruned(dense, options.device, is_shared=is_shared).to(dtype)
    torch.manual_seed(0)
    shape = (size["batch_size"], size["sequence_length"])
    ids = torch.randint(0, VOCABULARY, shape, device=options.device)
    calls = {name: partial(answered, model, ids) for name, model in models.items()}
    alternate(calls, 2)  # warm-up
    found = alternate(calls, 5 * options.repeats)
    return {
        name: {
            "parameters": sum(p.numel() for p in models[name].parameters()),
            "prefill_s": [prefill for prefill, _ in timings],
            "token_s": [token for _, token in timings],
        }
        for name, timings in found.items()
    }


def pruned(dense: Path, device: str, *, is_shared: bool) -> Any:
    """A SIMoE model with random experts whose masks are 1 - tau ones, the rest zeros."""
    model = upcycle_in_memory(dense, SimoeUpcyclingConfig(), seed=0, device=device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for gate in gated_modules(model).values():
            order = torch.rand(gate.log_phi.shape, generator=generator)
            if is_shared:
                order = order[:1].expand_as(gate.log_phi)
            zeros = round(TAU * order.shape[-1])
            log_phi = torch.where(order.argsort(-1).argsort(-1) < zeros, -3.0, 3.0)
            gate.log_phi.copy_(log_phi)
            gate.delta.copy_(0.02 * torch.randn(gate.delta.shape, generator=generator))
    return prune(model).eval()


def answered(model: Any, ids: Tensor) -> tuple[float, float]:
    """Seconds to the first token of each row, and of each token after it."""
    mask = torch.ones_like(ids)

    def generate(tokens: int) -> None:
        options = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options)

    prefill, whole = (
        seconds_of(partial(generate, tokens), device=ids.device.type) for tokens in (1, NEW_TOKENS)
    )
    return prefill, (whole - prefill) / (NEW_TOKENS - 1)


def report(
    steps: Mapping[str, list[Found]],
    answers: Mapping[str, Mapping[str, Any]],
    how: Mapping[str, Any],
) -> None:
    """Print the tables and the result."""
    seconds, cpu_seconds = (
        {name: [median(one[what]) for one in runs] for name, runs in steps.items()}
        for what in ("step_s", "step_cpu_s")
    )
    memory = {name: median([one["memory_mb"] for one in runs]) for name, runs in steps.items()}
    rows: list[list[object]] = [
        [
            name,
            1000 * median(seconds[name]),
            _ratio(seconds[name], seconds[FULL]),
            _ratio(cpu_seconds[name], cpu_seconds[FULL]),
            memory[name],
            memory[name] / memory[FULL],
            memory[name] / memory[UPCYCLING],
        ]
        for name in steps
    ]
    tokens = how["batch_size"] * how["sequence_length"]
    columns = ["", "step ms", "/ full", "CPU time / full", "memory MB", "/ full", "/ upcycling"]
    title = f"training steps of {tokens} tokens on {how['device']}, {how['precision']}, one thread"
    print_table(title, columns, rows)
    dense = answers[DENSE]
    rows = [
        [
            name,
            one["parameters"] / dense["parameters"],
            1000 * median(one["prefill_s"]),
            median_ratio(one["prefill_s"], dense["prefill_s"]),
            1000 * median(one["token_s"]),
            median_ratio(one["token_s"], dense["token_s"]),
        ]
        for name, one in answers.items()
    ]
    columns = ["", "parameters / dense", "prefill ms", "/ dense", "token ms", "/ dense"]
    print_table(f"{how['batch_size']} answers to {how['sequence_length']} tokens", columns, rows)
    ratio = median_ratio(seconds[SIMOE], seconds[FULL])
    goals = {
        "step": {"ratio": ratio, "at_most": GOAL},
        "memory": {"ratio": memory[SIMOE] / memory[UPCYCLING], "below": 1},
    }
    print_result("simoe_step", ratio, {"goals": goals, "runs": steps, "inference": answers, **how})


def _ratio(over: list[float], under: list[float]) -> float:
    """Median over the rounds; what has one round is held against all the other's."""
    return median_ratio(over, under) if len(over) == len(under) else median(over) / median(under)


if __name__ == "__main__":
    main()
