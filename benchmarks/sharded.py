"""Memory of a worker that divides a training with others, beside that of one alone.

    python -m benchmarks.sharded [--shapes 1m 135m] [--layers 30] [--methods full] [--tokens 256]

Models of these shapes with random weights are made in a temporary folder and trained for three
steps, by a method of experts or as ``simoe``, with the same rows on 1, 2 and 4 processes, on gloo.
Two figures a worker, the largest of all workers': what it keeps between steps (weights and moments,
counted); and its peak of anonymous memory above the imports, in which gradients, a batch's
activations and what is gathered stand as well. Activations are recomputed, layer by layer.
"""

import gc
import os
import socket
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM

from benchmarks.children import call_in_child
from benchmarks.common import parser_of, print_result, print_table
from benchmarks.models import llama_of, save_word_tokenizer
from benchmarks.planned import SIZES
from upcycle_core.allocator import return_large_blocks
from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.progress import Silent
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.train import train_simoe
from upcycle_core.training.config import ExpertTrainingConfig, TrainingConfig
from upcycle_core.training.expert import train_expert

WORKERS, STEPS, MICRO_BATCHES = (1, 2, 4), 3, 4


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=[*SIZES], default=["1m", "135m"])
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--methods", nargs="+", default=["full"])
    parser.add_argument("--states", nargs="+", default=["fp32"], help="optimizer_state")
    parser.add_argument("--tokens", type=int, default=256, help="of a batch of one row")
    options = parser.parse_args()
    rows: list[list[object]] = []
    ratios: dict[str, float] = {}
    figures: dict[str, object] = {}
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(prefix="sharded-") as name:
            layers = options.layers or SIZES[shape]["layers"]
            make(Path(name), {**SIZES[shape], "layers": layers})
            for method in options.methods:
                for state in options.states:
                    label = f"{shape} {method}" + (f" {state}" if state != "fp32" else "")
                    config = training(method, state, options.tokens)
                    found = {count: measure(Path(name), config, count) for count in WORKERS}
                    for count, own in found.items():
                        over = {key: own[key] / found[1][key] for key in ("kept_mb", "memory_mb")}
                        rows.append(
                            [
                                label,
                                count,
                                own["kept_mb"],
                                over["kept_mb"],
                                own["memory_mb"],
                                over["memory_mb"],
                                own["loss"],
                            ]
                        )
                        ratios |= {f"{label}, {count}, {key}": over[key] for key in over}
                    figures[label] = found
    head = ["", "workers", "kept MB", "of one's", "peak MB", "of one's", "loss"]
    print_table("A worker's memory", head, rows)
    print_result("sharded", ratios, {"trainings": figures, "tokens": options.tokens})


def make(folder: Path, size: Mapping[str, int]) -> None:
    """A model in fp32, as training leaves them."""
    torch.manual_seed(0)
    with quiet_loading():
        LlamaForCausalLM(llama_of(size)).save_pretrained(folder / "model")
    save_word_tokenizer(folder / "model", words=size["vocabulary"])


def training(method: Any, state: Any, tokens: int) -> TrainingConfig:
    """Too short to learn; of an expert, or, as ``simoe``, of the deltas of one."""
    settings: dict[str, Any] = {
        "optimizer_state": state,
        "steps": STEPS,
        "batch_size": 1,
        "gradient_accumulation": MICRO_BATCHES,
        "sequence_length": tokens,
        "warmup_steps": 0,
        "checkpoint_steps": STEPS,
        "precision": "fp32",
        "gradient_checkpointing": True,
    }
    if method == "simoe":
        return TrainingConfig(**settings)
    return ExpertTrainingConfig(method=method, **settings)


def measure(folder: Path, config: TrainingConfig, count: int) -> dict[str, float]:
    """Figures of the worker that holds the most."""
    with socket.socket() as free, tempfile.TemporaryDirectory(dir=folder) as out:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        call = partial(call_in_child, work, folder / "model", config, Path(out), count, port)
        with ThreadPoolExecutor(count) as pool:
            found = list(pool.map(call, range(count)))
    return {key: max(own[key] for own in found) for key in ("kept_mb", "memory_mb", "loss")}


def work(
    model: Path, config: TrainingConfig, out: Path, count: int, port: int, rank: int
) -> dict[str, float]:
    """What a worker does."""
    return_large_blocks()  # one alone has no need to, but is measured alike
    if count > 1:  # else the Trainer would wrap one alone as one of several
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        place = f"tcp://127.0.0.1:{port}"
        distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=count)
    rows = Rows(config)
    settings: dict[str, Any] = {
        "seed": 0,
        "checkpoints": out / "checkpoints",
        "progress": Silent(),
        "device": "cpu",
        "divided": "full" if count > 1 else "none",
    }
    if isinstance(config, ExpertTrainingConfig):
        loss = train_expert(model, rows, out / "out", config=config, **settings).final_loss
    else:
        simoe = SimoeUpcyclingConfig(masks="real")  # gates could not close in so few steps
        result = train_simoe(model, rows, out / "out", config=config, simoe=simoe, **settings)
        loss = result.training.final_loss
    if count > 1:
        distributed.destroy_process_group()
    return {"kept_mb": rows.kept / 1e6, "loss": loss}


class Rows(Dataset):
    """Random rows; reading one looks at the tensors that are alive between steps."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config, self.kept = config, 0

    def __len__(self) -> int:
        return STEPS * MICRO_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.kept = tensor_bytes()  # the last is read after a step, before gradients
        generator = torch.Generator().manual_seed(index)
        return torch.randint(2048, (self.config.sequence_length,), generator=generator)


def tensor_bytes() -> int:
    """Bytes of all storages that tensors of this process have; mapped files would count."""
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {s.data_ptr(): s.nbytes() for t in local for s in [t.untyped_storage()]}
    return sum(storages.values())


if __name__ == "__main__":
    main()
