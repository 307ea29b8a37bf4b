"""Training a model of a real size: the library's trainer against a plain loop.

    python -m benchmarks.training_real [--steps N] [--repeats N]

Shape of SmolLM2-135M (H 576, I 1536, 30 layers, vocabulary 49152, tied head), random weights and
tokens: neither changes the time. The plain loop is what one writes with transformers and torch:
fp32 weights, autocast where the machine multiplies bf16 faster, fused AdamW, gradients clipped.
Each training is a process of its own with one thread, in turns. Tokens a CPU-second after two steps
of warm-up; memory is the peak of anonymous memory above that of the imports.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.children import call_in_child
from benchmarks.common import alternate, median, median_ratio, parser_of, print_result, print_table
from benchmarks.models import save_word_tokenizer
from benchmarks.training import Found, StepTimes, between
from upcycle_core.allocator import kept_memory
from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.precision import arithmetic
from upcycle_core.training.config import ExpertTrainingConfig
from upcycle_core.training.expert import train_expert

SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
BATCH, LENGTH = 2, 512
PLAIN, METHODS = "plain loop", ("full", "ffn", "lora")


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("--steps", type=int, default=6, help="of each training, two to warm up")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="training-") as name:
        folder = Path(name)
        make_model(folder)
        calls = {PLAIN: partial(call_in_child, plain_loop, folder, options.steps)}
        for method in METHODS:
            calls[method] = partial(call_in_child, ours, folder, options.steps, method)
        report(alternate(calls, options.repeats))


def make_model(folder: Path) -> None:
    """A random model with a tokenizer, in fp32."""
    torch.manual_seed(0)
    with quiet_loading():
        LlamaForCausalLM(LlamaConfig.from_dict(SHAPE)).save_pretrained(folder)
    save_word_tokenizer(folder, words=SHAPE["vocab_size"])


class Random(Dataset):
    """Rows of random tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, SHAPE["vocab_size"], (LENGTH,), generator=generator)


def plain_loop(folder: Path, steps: int) -> Found:
    """The loop that one writes without a trainer."""
    torch.set_num_threads(1)
    with quiet_loading():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    rows, times = Random(steps * BATCH), StepTimes()
    times.advance()
    for step in range(steps):
        ids = torch.stack([rows[step * BATCH + row] for row in range(BATCH)])
        with torch.autocast("cpu", torch.bfloat16, enabled=arithmetic("auto", "cpu") == "bf16"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.advance()
    return _found(times)


def ours(folder: Path, steps: int, method: Literal["full", "ffn", "lora"]) -> Found:
    """The same with ``train_expert``; the time of writing the result is not among the steps'."""
    torch.set_num_threads(1)
    config = ExpertTrainingConfig(
        method=method,
        steps=steps,
        batch_size=BATCH,
        sequence_length=LENGTH,
        learning_rate=1e-4,
        schedule="constant",
        warmup_steps=0,
        precision="auto",
        checkpoint_steps=steps,
        log_steps=steps,
    )
    times = StepTimes()
    with kept_memory(), tempfile.TemporaryDirectory(prefix="training-") as place:  # as in pieces
        train_expert(
            folder,
            Random(steps * BATCH),
            Path(place, "out"),
            config=config,
            seed=0,
            checkpoints=Path(place, "checkpoints"),
            progress=times,
            device="cpu",
        )
    return _found(times)


def _found(times: StepTimes) -> Found:
    # A step in which a checkpoint is written, the last, is none that is compared.
    return {
        "step_s": between(times.marks)[:-1],
        "step_cpu_s": between(times.cpu_marks)[:-1],
    }


def report(found: dict[str, list[Found]]) -> None:
    """Print the table and the result."""
    seconds = {name: [median(run["step_cpu_s"]) for run in runs] for name, runs in found.items()}
    memory = {name: median([run["memory_mb"] for run in runs]) for name, runs in found.items()}
    ratio: dict[str, float] = {}
    rows = []
    for name in found:
        faster = median_ratio(seconds[PLAIN], seconds[name])
        lighter = memory[name] / memory[PLAIN]
        rows.append([name, BATCH * LENGTH / median(seconds[name]), faster, memory[name], lighter])
        if name != PLAIN:
            ratio |= {name: faster, f"{name}_memory": lighter}
    columns = ["", "tokens a CPU-second", "/ plain loop", "memory MB", "/ plain loop"]
    precision = arithmetic("auto", "cpu")
    print_table(f"SmolLM2-135M's shape, 2 x 512 tokens, {precision}, one thread", columns, rows)
    print_result(
        "training_real", ratio, {"trainings": found, "shape": SHAPE, "precision": precision}
    )


if __name__ == "__main__":
    main()
