"""What workers that divide a model are asked to do."""

import os
import signal
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import upcycle_core.ders.model  # noqa: F401  (transformers learns of the architecture)
from tests.upcycle_core.training.runs import RandomRows, run
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.training import head, sharding, vocabulary, workers
from upcycle_core.training.config import ExpertTrainingConfig
from upcycle_core.training.expert import train_expert
from upcycle_core.training.head import sliced_head
from upcycle_core.training.rows import NO_LOSS
from upcycle_core.training.trainer import all_fp32

VOCABULARY = 97
"""Of the models whose ends are looked at: three workers cannot have the same share of it."""


class LoggedRows(RandomRows):
    """Random rows that say which were read; the worker that reads row ``deadly`` is killed."""

    def __init__(self, count: int, log: Path, deadly: int | None = None) -> None:
        super().__init__(count)
        self.log, self.deadly = log, deadly

    def __getitem__(self, index):
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        return super().__getitem__(index)


def train_any(folder, model, name, **options):
    """Train as the configuration says."""
    config = options["config"]
    if not isinstance(config, ExpertTrainingConfig):
        return run(folder, model, name, **options)
    rows = config.steps * config.gradient_accumulation * config.batch_size
    return train_expert(
        model,
        options.pop("rows", None) or RandomRows(rows),
        folder / name,
        seed=0,
        checkpoints=folder / f"{name}-checkpoints",
        **{"device": "cpu", **options},
    )


def text_of(rank):
    """A worker's own batch: other tokens, of another number than others', some not predicted."""
    chosen = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCABULARY, (1 + rank % 2, 7 + 5 * rank), generator=chosen)
    labels = ids.clone()
    labels[0, : 3 * rank] = NO_LOSS
    return {"input_ids": ids, "labels": labels}


def ends(folder, model, name, *, progress, among=None, bf16=False):
    """Loss and gradients of a network whose embedding and head are divided, a few at a time."""
    vocabulary.NUMBERS, head.SLICE = 5 * 3 * 16, 4 * VOCABULARY
    network = load_causal_lm(model)
    with sliced_head(network), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        sharding.shard(network, all_fp32, halves=frozenset(), device="cpu")
        own = network.get_input_embeddings().weight.to_local()
        loss = network(**text_of(workers.rank()), num_items_in_batch=among, use_cache=False).loss
        with torch.no_grad():
            again = network(**text_of(workers.rank()), num_items_in_batch=among).loss
    (2.5 * loss).backward()
    whole = {n: workers.whole(p.grad) for n, p in network.named_parameters()}
    return {"loss": loss.detach(), "again": again, "gradients": whole, "rows": len(own)}


def freed(folder, model, name, *, progress):
    """Parameters that a forward pass without a backward pass leaves whole, before and after."""
    network = load_causal_lm(model)
    sharding.shard(network, all_fp32, halves=frozenset(), device="cpu")
    with torch.no_grad():
        network(RandomRows(1)[0][None])
    left = [n for n, p in network.named_parameters() if not isinstance(p, DTensor)]
    sharding.free(network)
    return left, [n for n, p in network.named_parameters() if not isinstance(p, DTensor)]


def held(folder, model, name, *, progress):
    """Bytes of weights, gradients and moments that a worker holds after a step."""
    network = load_causal_lm(model)
    if workers.count() > 1:
        sharding.shard(network, all_fp32, halves=frozenset(), device="cpu")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    row = RandomRows(1)[0][None]
    network(row, labels=row).loss.backward()
    kept = [tensor for p in network.parameters() for tensor in (p, p.grad)]
    optimizer.step()
    kept += [m for state in optimizer.state.values() for n, m in state.items() if n != "step"]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in kept]
    return sum(tensor.nbytes for tensor in local)
