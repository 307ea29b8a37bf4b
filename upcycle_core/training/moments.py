"""AdamW whose moments take half the room: bf16 between steps."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class NarrowAdamW(torch.optim.AdamW):
    """PyTorch's AdamW, a tensor at a time in fp32; its moments are rounded to bf16 afterwards.

    PyTorch's own gives moments the type of the weights, which must stay fp32. Of divided weights
    each worker steps its part: AdamW looks at no element's neighbours.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        assert closure is None  # the Trainer has none
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """PyTorch's; it widens moments to the type of the weights, and leaves the step where it was
        loaded, though the step of a fused AdamW lies beside them."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            state["step"] = state["step"].to(parameter.device)
            for name in MOMENTS:
                state[name] = state[name].to(torch.bfloat16)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        first, second = (_local(state[name]).float() for name in MOMENTS)
        adamw(
            [_local(parameter)],
            [_local(parameter.grad)],
            [first],
            [second],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, value in zip(MOMENTS, (first, second), strict=True):
            _local(state[name]).copy_(value)


def _local(tensor: Any) -> Tensor:
    """What this worker holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
