"""Dense forward / MoE top-1 forward: what routing costs.

    python -m benchmarks.moe_forward [--size small|135m] [--device cuda] [--repeats N]

Llama against Mixtral of four experts with the same attention: H 256, I 704, 8 layers, or
SmolLM2-135M's shape; in fp32, under bf16 autocast and with weights in bf16. The ratio is that of
the experts implementation that the library chooses for this machine; all of them are reported.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from benchmarks.common import (
    alternate,
    median,
    median_ratio,
    parser_of,
    print_result,
    print_table,
    seconds_of,
)
from benchmarks.models import EXPERTS, SHAPE, llama_of
from benchmarks.planned import SIZES
from upcycle_core.checkpoints.load import choose_experts_implementation

TOKENS: dict[str, tuple[int, int]] = {"small": (16, 256), "135m": (4, 512)}
"""Sequences of a batch and their length."""
PRECISIONS: dict[str, Literal["fp32", "bf16"]] = {
    "fp32": "fp32",
    "bf16 autocast": "bf16",
    "bf16 weights": "bf16",
}
"""Ways to compute, in this order: the last converts the models."""
IMPLEMENTATIONS = ("eager", "grouped_mm")


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=15, device=True)
    parser.add_argument("--size", choices=[*TOKENS], default="small")
    options = parser.parse_args()
    device, (batch, length) = options.device, TOKENS[options.size]
    torch.manual_seed(0)
    dense, moe = (model.to(device).eval() for model in models_of(options.size))
    vocabulary = dense.config.vocab_size
    ids = torch.randint(0, vocabulary, (batch, length), device=device)
    found: dict[str, dict[str, list[float]]] = {}
    for way in PRECISIONS:
        if way == "bf16 weights":
            dense, moe = dense.bfloat16(), moe.bfloat16()
        found[way] = measure(dense, moe, ids, way, options.repeats)
    chosen = {w: choose_experts_implementation(device, p) for w, p in PRECISIONS.items()}
    ratio: dict[str, float] = {
        way: median_ratio(times["dense"], times[chosen[way]]) for way, times in found.items()
    }
    rows: list[list[object]] = []
    for way, times_of in found.items():
        for name, times in times_of.items():
            over = median_ratio(times_of["dense"], times)
            rows.append([way, name, 1000 * median(times), over, "yes" * (name == chosen[way])])
    columns = ["precision", "experts", "ms", "dense / this", "chosen"]
    print_table(f"forward of {batch} x {length} tokens on {device}", columns, rows)
    goal = {"bf16 weights": 0.85} if options.size == "135m" else {}
    figures = {"device": device, "size": options.size, "seconds": found, "chosen": chosen}
    print_result("moe_forward", ratio, {"goal": {"at_least": goal}, **figures})


def models_of(size: str) -> tuple[LlamaForCausalLM, MixtralForCausalLM]:
    """Dense, and four experts of the same shape; random weights."""
    shape = SHAPE if size == "small" else llama_of(SIZES[size]).to_dict()
    shape = {name: value for name, value in shape.items() if name != "model_type"}
    routed = {"num_local_experts": EXPERTS, "num_experts_per_tok": 1}
    return (
        LlamaForCausalLM(LlamaConfig.from_dict(shape)),
        MixtralForCausalLM(MixtralConfig.from_dict({**shape, **routed})),
    )


def measure(
    dense: LlamaForCausalLM,
    moe: MixtralForCausalLM,
    ids: torch.Tensor,
    way: str,
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds of one forward, dense and with each implementation, taking turns."""
    device = ids.device

    def arithmetic() -> AbstractContextManager[Any]:
        if way == "bf16 autocast":
            return torch.autocast(device.type, dtype=torch.bfloat16)
        return nullcontext()

    def forward(name: str) -> float:
        model = dense if name == "dense" else moe
        if name != "dense":
            moe.set_experts_implementation(name)
        with torch.no_grad(), arithmetic():
            return seconds_of(partial(model, input_ids=ids, use_cache=False), device=str(device))

    names = ("dense", *IMPLEMENTATIONS)
    calls = {name: partial(forward, name) for name in names}
    alternate(calls, 2)  # warm-up
    return alternate(calls, repeats)


if __name__ == "__main__":
    main()
