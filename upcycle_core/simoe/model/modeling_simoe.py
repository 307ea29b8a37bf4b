"""SIMoE (Chen, Wei and Schwarz, arXiv 2506.12597): sparse interpolated experts in a dense model.

The dense model of any family is kept whole and frozen; its linear layers and norms are wrapped. The
prompt goes through it once as it was pre-trained, the last prompt token's hidden state gives the
experts' coefficients alpha, and with these it runs again.

This file needs torch and transformers alone: it is copied beside the weights, so that
``from_pretrained(..., trust_remote_code=True)`` works without the package it comes from.

B batch, S positions, H hidden size, V vocabulary, M experts.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .base_simoe import SimoePreTrainedModel, gated_modules
from .routing_simoe import (
    is_filled,
    last_prompt_positions,
    no_coefficients,
    positions_of,
    states_at,
)

__all__ = ["SimoeCausalLMOutput", "SimoeForCausalLM", "gated_modules"]


_PROMPT = ("attention_mask", "prompt_lengths", "task_ids", "position_ids", "inputs_embeds")


@dataclass
class SimoeCausalLMOutput(CausalLMOutputWithPast):
    """What a causal language model returns, and the experts' ``coefficients`` it used."""

    coefficients: Tensor | None = None


class SimoeForCausalLM(SimoePreTrainedModel, GenerationMixin):
    """The language model."""

    dense_class = AutoModelForCausalLM
    output_class = SimoeCausalLMOutput

    def coefficients(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
        task_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """The experts' coefficients of each prompt.

        Args:
            input_ids: [B, S] prompts, maybe with their responses; or ``inputs_embeds`` [B, S, H].
            attention_mask: [B, S], which positions hold tokens; all by default.
            labels: [B, S]; the prompt is what stands before the first that is not -100.
            prompt_lengths: [B], tokens of each prompt; without it and labels, all tokens are.
            task_ids: [B] numbers in ``config.tasks``, -1 for another; where routing goes by task.
            position_ids: [B, S]; counted by ``attention_mask`` by default.

        Returns:
            [B, M] fp32, each row of sum one; [B, S, M] where each token has its own.
        """
        inputs: Any = input_ids if inputs_embeds is None else inputs_embeds
        if self.config.routing == "task":
            return self._task_coefficients(task_ids, inputs)
        length = inputs.shape[1]
        last_B = None
        if self.config.routing == "instance":
            attended = (
                inputs.new_ones(inputs.shape[:2]) if attention_mask is None else attention_mask
            )
            last_B = last_prompt_positions(attended, labels, prompt_lengths)
            length = int(last_B.max()) + 1
        if position_ids is None and attention_mask is not None:
            position_ids = positions_of(attention_mask)
        given = {
            "input_ids" if inputs_embeds is None else "inputs_embeds": inputs[:, :length],
            "attention_mask": None if attention_mask is None else attention_mask[:, :length],
            "position_ids": None if position_ids is None else position_ids[..., :length],
        }
        with self.frozen():
            known = {k: v for k, v in given.items() if k != "position_ids" or k in self._accepted}
            state_BSH = self.model.base_model(**known, use_cache=False).last_hidden_state
        if last_B is None:
            return self.router(state_BSH)
        return self.router(states_at(last_B, state_BSH))

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Find the coefficients of the prompts, once; then repeat everything for beams."""
        if kwargs.get("coefficients") is None and self.config.routing != "token":
            if is_filled(kwargs.get("past_key_values")):
                raise no_coefficients("the cache")
            known = {key: kwargs.get(key) for key in _PROMPT}
            kwargs["coefficients"] = self.coefficients(input_ids, **known)
        mixin: Any = super()
        return mixin._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **kwargs
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare as transformers does. Where each token has coefficients of its own, the frozen
        model runs over the whole sequence so far at every step: slow.

        Raises:
            ValueError: Such a model is given ``inputs_embeds``, or a cache without its tokens.
        """
        if self.config.routing == "token":
            if inputs_embeds is not None:
                raise ValueError("inputs_embeds: routing by token generates from input_ids alone")
            if is_filled(past_key_values) and next_sequence_length is None:
                raise ValueError(
                    "input_ids: routing by token needs the tokens in the cache as well"
                )
            found = self.coefficients(input_ids, attention_mask)
            kwargs["coefficients"] = found[:, -(next_sequence_length or found.shape[1]) :]
        mixin: Any = super()
        return mixin.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length,
            past_key_values,
            attention_mask,
            inputs_embeds,
            is_first_iteration,
            **kwargs,
        )
