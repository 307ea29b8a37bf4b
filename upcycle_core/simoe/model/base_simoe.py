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
from transformers.utils.generic import can_return_tuple

from .configuration_simoe import SimoeConfig, verify_checksums, write_checksums
from .layers_simoe import SimoeLinear, SimoeNorm, put_experts
from .routing_simoe import (
    Mixture,
    Recomputed,
    SimoeRouter,
    SimoeTaskRouter,
    is_filled,
    no_coefficients,
    positions_of,
)

_OWN = ("coefficients", "prompt_lengths", "task_ids")
"""What a pass is told that no other model's is."""


def gated_modules(model: nn.Module) -> dict[str, SimoeLinear | SimoeNorm]:
    """Every layer with experts, by its name, in the model's order."""
    kinds = (SimoeLinear, SimoeNorm)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


class SimoePreTrainedModel(PreTrainedModel):
    """What both models share: ``dense_class`` makes the dense model, which becomes ``model``, and
    ``output_class`` is what a pass returns."""

    dense_class: Any
    output_class: Any

    config: SimoeConfig
    config_class = SimoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = ["log_phi", "mask", "state_mean", "state_deviation"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: SimoeConfig) -> None:
        super().__init__(config)
        dense = self.dense_class.from_config(config.dense, dtype=torch.get_default_dtype())
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

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        coefficients: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
        task_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return logits [B, S, V] of the last ``logits_to_keep`` positions (0: all), the loss of
        ``labels`` [B, S] if given, and the coefficients.

        Args:
            coefficients: [B, M] or [B, S, M], as an earlier pass returned them; found by
                ``coefficients`` by default, which says what the other arguments mean.

        Raises:
            ValueError: ``past_key_values`` or ``encoder_outputs`` of an earlier pass without its
                coefficients.
        """
        if coefficients is None:
            if is_filled(past_key_values):
                raise no_coefficients("the cache")
            if kwargs.get("encoder_outputs") is not None:
                raise no_coefficients("encoder_outputs")
            coefficients = self.coefficients(
                input_ids,
                attention_mask,
                labels=labels,
                prompt_lengths=prompt_lengths,
                task_ids=task_ids,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
            )
        at_start = position_ids is None and not is_filled(past_key_values)
        if at_start and attention_mask is not None and attention_mask.dim() == 2:
            position_ids = positions_of(attention_mask)
        kept = _kept_positions(input_ids, inputs_embeds, logits_to_keep)
        own = {"position_ids": position_ids, "logits_to_keep": kept}
        own = {key: value for key, value in own.items() if key in self._accepted}
        with self.mixture.using(coefficients):
            outputs = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                labels=labels,
                use_cache=use_cache,
                **own,
                **kwargs,
            )
        known = self.output_class.__dataclass_fields__
        found = {name: outputs[name] for name in known if name in outputs}
        return self.output_class(**found, coefficients=coefficients)

    def coefficients(self, *args: Any, **kwargs: Any) -> Tensor:
        """The experts' coefficients of each prompt."""
        raise NotImplementedError

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Let another model draft what this one checks (speculative decoding).

        One of another kind, such as the dense model, is not told of coefficients.
        """
        drafter = kwargs.get("assistant_model")
        if drafter is not None and drafter.config.model_type != self.config.model_type:
            given = kwargs["model_kwargs"].items()
            kwargs["model_kwargs"] = {key: value for key, value in given if key not in _OWN}
        mixin: Any = super()
        return mixin._get_candidate_generator(*args, **kwargs)

    def _task_coefficients(self, task_ids: Tensor | None, inputs: Tensor) -> Tensor:
        """Coefficients [B, M]; without tasks, those of a task that was not trained."""
        if task_ids is None:
            if self.training:
                remedy = "give the number of each row's task in config.tasks"
                raise ValueError(f"task_ids = None: routing goes by task; {remedy}")
            task_ids = torch.full((len(inputs),), -1, device=inputs.device)
        return self.router(task_ids)


def _kept_positions(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, kept: int | Tensor
) -> int | Tensor:
    """``logits_to_keep`` as positions, int64, where that is some of them: a copy of states lies
    together. Of states that do not, torch copies a head without gradients for every row."""
    inputs = input_ids if inputs_embeds is None else inputs_embeds
    if inputs is None or not isinstance(kept, int) or not 0 < kept < inputs.shape[1]:
        return kept
    length = inputs.shape[1]
    return torch.arange(length - kept, length, device="cpu")  # the head may be on any device
