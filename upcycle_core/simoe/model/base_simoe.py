"""What the models of SIMoE share: a dense model of any family, kept whole, and its router.

This file needs torch and transformers alone: it is copied beside the weights, so that
``from_pretrained(..., trust_remote_code=True)`` works without the package it comes from.

B batch, M experts.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from .configuration_simoe import SimoeConfig, verify_checksums, write_checksums
from .layers_simoe import SimoeLinear, SimoeNorm, put_experts
from .routing_simoe import Mixture, Recomputed, SimoeRouter, SimoeTaskRouter


def gated_modules(model: nn.Module) -> dict[str, SimoeLinear | SimoeNorm]:
    """Every layer with experts, by its name, in the model's order."""
    kinds = (SimoeLinear, SimoeNorm)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


class SimoePreTrainedModel(PreTrainedModel):
    """What both models share.

    Args:
        config: The model's.
        dense: The dense model, which becomes ``model``.
    """

    config: SimoeConfig
    config_class = SimoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = ["log_phi", "mask"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: SimoeConfig, dense: Any) -> None:
        super().__init__(config)
        self.model: Any = dense
        self.mixture = Mixture()
        put_experts(self.model, config, self.mixture, "model.")
        by_task = config.routing == "task"
        self.router: Any = SimoeTaskRouter(config) if by_task else SimoeRouter(config)
        self.generation_config = dense.generation_config
        self._accepted = set(inspect.signature(dense.forward).parameters)
        self.post_init()
        self.freeze()

    def freeze(self) -> None:
        """Let gradients reach deltas, masks and the router alone."""
        self.model.requires_grad_(False)
        for module in gated_modules(self).values():
            module.delta.requires_grad_(True)
            if module.kept is None:
                module.log_phi.requires_grad_(True)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, after ``checksums.json`` of a local directory held.

        Raises:
            ValueError: A file that it names is missing or was altered.
        """
        verify_checksums(Path(str(pretrained_model_name_or_path)) / (kwargs.get("subfolder") or ""))
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).freeze()
        return loaded

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, with the checksums of what was written."""
        result = super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_checksums(Path(save_directory))
        return result

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.set_output_embeddings(value)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        settings = getattr(gradient_checkpointing_func, "keywords", {})
        if enable and settings.get("use_reentrant"):
            remedy = "the router's gradient needs False"
            raise ValueError(f"gradient_checkpointing_kwargs.use_reentrant = True: {remedy}")
        again = Recomputed(self.mixture, gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, again, every_n_layers)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Run ``model`` as it was pre-trained: no experts, no dropout, no gradient."""
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad(), self.mixture.using(None):
                yield
        finally:
            for module in training:
                module.training = True

    def _task_coefficients(self, task_ids: Tensor | None, inputs: Tensor) -> Tensor:
        """Coefficients [B, M]; without tasks, those of a task that was not trained."""
        if task_ids is None:
            if self.training:
                remedy = "give the number of each row's task in config.tasks"
                raise ValueError(f"task_ids = None: routing goes by task; {remedy}")
            task_ids = torch.full((len(inputs),), -1, device=inputs.device)
        return self.router(task_ids)
