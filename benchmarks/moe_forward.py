"""Dense forward / MoE top-1 forward: what routing costs.

    python -m benchmarks.moe_forward [--device cuda] [--repeats N]

H 256, I 704, 8 layers, 4 experts, Llama against Mixtral with the same attention, in fp32 and under
bf16 autocast. The ratio is that of the experts implementation that the library chooses for this
machine; all of them are reported.
"""

from functools import partial
from typing import Literal

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
from benchmarks.models import EXPERTS, SHAPE, VOCABULARY
from upcycle_core.checkpoints.load import choose_experts_implementation

BATCH, LENGTH = 16, 256
PRECISIONS: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
IMPLEMENTATIONS = ("eager", "grouped_mm")


def main() -> None:
    """Measure and print."""
    options = parser_of(__doc__, repeats=15, device=True).parse_args()
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig.from_dict(SHAPE)).to(options.device).eval()
    moe = MixtralForCausalLM(
        MixtralConfig.from_dict({**SHAPE, "num_local_experts": EXPERTS, "num_experts_per_tok": 1})
    )
    moe = moe.to(options.device).eval()
    found = {p: measure(dense, moe, options.device, p, options.repeats) for p in PRECISIONS}
    chosen = {p: choose_experts_implementation(options.device, p) for p in PRECISIONS}
    ratio: dict[str, float] = {
        p: median_ratio(found[p]["dense"], found[p][chosen[p]]) for p in PRECISIONS
    }
    rows: list[list[object]] = []
    for p in PRECISIONS:
        for name, times in found[p].items():
            over = median_ratio(found[p]["dense"], times)
            rows.append([p, name, 1000 * median(times), over, "yes" * (name == chosen[p])])
    columns = ["precision", "experts", "ms", "dense / this", "chosen"]
    print_table(f"forward of {BATCH} x {LENGTH} tokens on {options.device}", columns, rows)
    figures = {"device": options.device, "seconds": found, "chosen": chosen}
    print_result("moe_forward", ratio, figures)


def measure(
    dense: LlamaForCausalLM,
    moe: MixtralForCausalLM,
    device: str,
    precision: Literal["fp32", "bf16"],
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds of one forward, dense and with each implementation, taking turns."""
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)
    autocast = torch.autocast(
        torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16"
    )

    def forward(name: str) -> float:
        model = dense if name == "dense" else moe
        if name != "dense":
            moe.set_experts_implementation(name)
        with torch.no_grad(), autocast:
            return seconds_of(partial(model, input_ids=ids, use_cache=False), device=device)

    names = ("dense", *IMPLEMENTATIONS)
    calls = {name: partial(forward, name) for name in names}
    alternate(calls, 2)  # warm-up
    return alternate(calls, repeats)


if __name__ == "__main__":
    main()
