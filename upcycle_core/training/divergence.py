"""Where a gradient first stopped being finite."""

import torch
from torch import Tensor, nn

from upcycle_core.training import workers
from upcycle_core.training.config import TrainingConfig


class BackwardOrder:
    """The order in which the backward pass finishes the gradients of a model's parameters.

    It is taken down during the first step: hooks on every trained parameter, gone afterwards.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._order: dict[str, None] = {}  # a set that keeps its order
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda _parameter, name=name: self._order.setdefault(name)
            )
            for name, parameter in self._parameters.items()
        ]

    def first_step_is_over(self) -> None:
        """Take the hooks off; may be called again."""
        while self._hooks:
            self._hooks.pop().remove()

    def first_not_finite(self) -> str | None:
        """Name of the parameter nearest to the output whose gradient is not finite, if any.

        A tied embedding counts as the input's: its gradient is finished last.
        """
        for name in self._order:
            gradient = self._parameters[name].grad
            if gradient is not None and not workers.whole(torch.isfinite(gradient).all()):
                return name
        return None


def not_finite(
    step: int, loss: Tensor, name: str | None, config: TrainingConfig
) -> FloatingPointError:
    """The error that says where a step diverged and what to do.

    Args:
        step: The optimizer step, from 1; its weights are not changed.
        loss: Sum of the step's losses, a scalar.
        name: What ``first_not_finite`` found.
        config: What is trained with.
    """
    what = "gradient" if torch.isfinite(loss) else "loss"
    value = "" if torch.isfinite(loss) else f": it is {loss.item()}"
    where = f"the first such gradient, from the output backwards, is that of {name}"
    return FloatingPointError(
        f"The {what} of step {step} is not finite{value}; "
        f"{where if name else 'every gradient is finite'}. The last checkpoint before it is kept. "
        f"Lower learning_rate (now {config.learning_rate:g}), raise warmup_steps (now "
        f"{config.warmup_steps}) or set precision to fp32, and train with an empty checkpoint "
        "directory."
    )
