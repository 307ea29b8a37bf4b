"""The losses of a training step, added up for its gradient, its curves and its watch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from upcycle_core.training import workers
from upcycle_core.training.config import MoEObjective, TrainingConfig
from upcycle_core.training.extension import Extension
from upcycle_core.training.losses import Routing, balance_loss, record_routers, z_loss
from upcycle_core.training.watch import Watch, router_layers

TEXT, BALANCE, Z = "loss", "loss/balance", "loss/z"


class StepLosses:
    """Makes text + balance_coefficient x balance + z_coefficient x z, and remembers each.

    Args:
        model: What is trained.
        objective: Coefficients and how often is watched; None for the text's loss alone.
        config: When there is a checkpoint: then there is a point, so that curves survive a kill.
        extension: Losses and curves of a paper's own.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: MoEObjective | None,
        config: TrainingConfig,
        extension: Extension | None = None,
    ) -> None:
        self._model, self._objective, self._config = model, objective, config
        self._extension = extension
        self._routed = objective is not None and bool(router_layers(model))
        self._watch = None if objective is None else Watch(model)
        self._routing: Routing | None = None
        self._sums: dict[str, Tensor] = {}
        self._step_loss: Tensor | None = None
        self._last_step = 0

    def start(self, step: int) -> None:
        """Begin, or go on, after ``step``."""
        self._last_step = step

    def is_watched(self, step: int) -> bool:
        """Whether there is a point of the watch after ``step``: also at every checkpoint."""
        if self._objective is None:
            return False
        saved = step % self._config.checkpoint_steps == 0 or step == self._config.steps
        return saved or step % self._objective.watch_steps == 0

    @contextmanager
    def recording(self, attention_mask: Tensor | None) -> Iterator[None]:
        """Listen to the routers in the forward pass inside, where there are any."""
        if not self._routed:
            yield
            return
        with record_routers(self._model, attention_mask) as self._routing:
            yield

    def add(self, text: Tensor, *, micro_batches: int) -> Tensor:
        """The loss of one micro-batch.

        Args:
            text: Its language-model loss, nats a token.
            micro_batches: How many this worker has in the step; each is the same share of it.
        """
        loss, parts = text, {TEXT: text}
        if self._routing is not None and self._objective is not None and self._watch is not None:
            for name, term, coefficient in (
                (BALANCE, balance_loss, self._objective.balance_coefficient),
                (Z, z_loss, self._objective.z_coefficient),
            ):
                with torch.set_grad_enabled(coefficient > 0):
                    parts[name] = term(self._routing)
                loss = loss + coefficient * parts[name] if coefficient else loss
            self._watch.add(self._routing)
        if self._extension is not None:
            loss = loss + self._extension.penalty()
        if self._routing is not None or self._extension is not None:
            for name, value in parts.items():
                share = value.detach() / micro_batches
                self._sums[name] = self._sums[name] + share if name in self._sums else share
        self._routing = None
        whole = loss.detach()
        self._step_loss = whole if self._step_loss is None else self._step_loss + whole
        return loss

    def end_backward(self, step: int) -> Tensor:
        """Look at the step's gradients; the sum of its losses on all workers: is it finite?"""
        if self._watch is not None and self.is_watched(step):
            self._watch.gradients()
        assert self._step_loss is not None
        loss, self._step_loss = workers.total(self._step_loss), None
        return loss

    def point(self, step: int) -> dict[str, float]:
        """Each loss alone, without its coefficient: a mean over workers and the steps since the
        last point. At a watched step also the point of the watch, and always that of the
        extension. All workers must call it."""
        steps, self._last_step = step - self._last_step, step
        scale = workers.count() * steps
        values = {name: workers.total(total).item() / scale for name, total in self._sums.items()}
        self._sums = {}
        if self._watch is not None and self.is_watched(step):
            values |= self._watch.point()
        if self._extension is not None:
            values |= self._extension.point()
        return values
