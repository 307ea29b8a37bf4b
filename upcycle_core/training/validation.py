"""Loss on validation text, measured without a trace in the training that it interrupts."""

from collections.abc import Callable, Mapping, Sized
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from upcycle_core.training import workers
from upcycle_core.training.rows import collate, targets


@torch.no_grad()
def mean_loss(
    network: PreTrainedModel,
    dataset: Dataset,
    *,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager],
    options: Mapping[str, Any],
) -> float:
    """Mean loss over every target token of ``dataset``, nats a token, the same on every worker.

    In evaluation mode: no dropout, no random number drawn, no load counted. Batches are dealt to
    the workers in turn; their sums are added in fp64.

    Args:
        network: The model, not wrapped; left in the mode that it was in.
        dataset: Map-style rows as in training.
        batch_size: Rows in one forward pass.
        autocast: Makes the context of a forward pass: its arithmetic.
        options: What the model is called with beside the batch.
    """
    training = network.training
    network.eval()
    total = torch.zeros(2, dtype=torch.float64, device=network.device)
    rows = len(cast(Sized, dataset))
    for first in range(workers.rank() * batch_size, rows, workers.count() * batch_size):
        indices = range(first, min(first + batch_size, rows))
        batch = {
            name: values.to(network.device)
            for name, values in collate([dataset[index] for index in indices]).items()
        }
        count = targets(batch)
        with autocast():
            loss: Tensor = network(**{"labels": batch["input_ids"]} | batch, **options).loss
        if count:  # without a target the mean is 0 / 0
            total += torch.stack([loss.double() * count, count.double()])
    network.train(training)
    loss_sum, tokens = workers.total(total).tolist()
    return loss_sum / tokens
