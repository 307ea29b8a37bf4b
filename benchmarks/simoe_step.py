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
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    alternate,
    median,
    median_ratio,
    parser_of,
    print_result,
    print_table,
    seconds_of,
)
from benchmarks.models import EXPERTS, SHARD, VOCABULARY
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
from upcycle_core.checkpoints.load import DTYPES, load_causal_lm
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model.modeling_simoe import gated_modules
from upcycle_core.simoe.prune import prune
from upcycle_core.simoe.upcycle import upcycle_in_memory

GOAL = 2.2
TAU = SimoeUpcyclingConfig.tau
ALONE, SHARED = "pruned, a mask an expert", "pruned, one mask for all"
NEW_TOKENS = 32
SLOW_STEPS = 5
"""Of the one way that is not compared, but shown."""
FULL, UPCYCLING, SIMOE = "full finetuning", "sparse upcycling", "SIMoE"
PARAMETERS = f"{SIMOE}, parameter masks"
MODELS = {FULL: DENSE, UPCYCLING: "upcycled", SIMOE: DENSE, PARAMETERS: DENSE}
SETTINGS = {
    SIMOE: SimoeUpcyclingConfig(multiplier_learning_rate=1.0),
    PARAMETERS: SimoeUpcyclingConfig(masks="parameters", multiplier_learning_rate=1.0),
}
MASK_TRAVEL = 8.0
"""How far log phi may come in a training; 3 closes a mask."""
LOG_STEPS = 10
"""As training has it by default."""


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=3, device=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=12, help="of each training, two to warm up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = step_size(options.device)
    how = {name: getattr(options, name) for name in ("device", "precision", "steps")} | size
    with tempfile.TemporaryDirectory(prefix="simoe-step-") as name:
        folder = Path(name)
        make_models(folder)
        write_mixture(
            copies_of(folder / DENSE, EXPERTS),
            folder / MODELS[UPCYCLING],
            top_k=2,
            router_seed=0,
            max_shard_bytes=SHARD,
        )
        calls = {
            method: partial(train_in_child, folder, training_of(method, how))
            for method in (FULL, UPCYCLING, SIMOE)
        }
        steps = alternate(calls, options.repeats)
        slow = training_of(PARAMETERS, how | {"steps": SLOW_STEPS})
        steps[PARAMETERS] = [train_in_child(folder, slow)]
        answers = inference(folder / DENSE, options, size)
    report(steps, answers, how)


def training_of(method: str, how: Mapping[str, Any]) -> Training:
    """What a method's training is."""
    simoe = SETTINGS.get(method)
    if simoe is not None:
        # Fast enough to make masks sparse in so few steps, so that every part of the step has work.
        simoe = replace(simoe, mask_learning_rate=MASK_TRAVEL / how["steps"])
    model = MODELS[method]
    return Training(model=model, simoe=simoe, rows="instructions", log_steps=LOG_STEPS, **how)


def inference(
    dense: Path, options: argparse.Namespace, size: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """{model: ``parameters``, ``prefill_s`` and ``token_s`` of each round}, all taking turns."""
    dtype = DTYPES[options.precision]
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
    measured = Steps(steps)
    seconds, memory = measured.seconds, measured.memory
    rows: list[list[object]] = [
        [name, *measured.beside(name, FULL), memory[name] / memory[UPCYCLING]] for name in steps
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


if __name__ == "__main__":
    main()
