"""SIMoE of an encoder-decoder model (T5): the encoder's last prompt state routes.

This file needs torch and transformers alone: it is copied beside the weights, so that
``from_pretrained(..., trust_remote_code=True)`` works without the package it comes from.

B batch, S positions of the prompt, R of the response, V vocabulary, M experts.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, GenerationMixin
from transformers.modeling_outputs import Seq2SeqLMOutput

from .base_simoe import SimoePreTrainedModel
from .routing_simoe import last_prompt_positions, no_coefficients, states_at


@dataclass
class SimoeSeq2SeqLMOutput(Seq2SeqLMOutput):
    """What an encoder-decoder model returns, and the experts' ``coefficients`` it used."""

    coefficients: Tensor | None = None


class SimoeForConditionalGeneration(SimoePreTrainedModel, GenerationMixin):
    """The encoder-decoder model; layers of both halves hold experts."""

    dense_class = AutoModelForSeq2SeqLM
    output_class = SimoeSeq2SeqLMOutput

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.get_encoder(*args, **kwargs)

    def get_decoder(self) -> Any:
        return self.model.get_decoder()

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The decoder's input [B, R] for ``labels`` [B, R]."""
        return self.model.prepare_decoder_input_ids_from_labels(labels)

    def coefficients(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        task_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The experts' coefficients of each prompt.

        Args:
            input_ids: [B, S] prompts; or ``inputs_embeds`` [B, S, H].
            attention_mask: [B, S], which positions hold tokens; all by default.
            task_ids: [B] numbers in ``config.tasks``, -1 for another; where routing goes by task.
            **_: What the language model looks at beside; the encoder reads the prompt alone.

        Returns:
            [B, M] fp32, each row of sum one.
        """
        inputs: Any = input_ids if inputs_embeds is None else inputs_embeds
        if self.config.routing == "task":
            return self._task_coefficients(task_ids, inputs)
        given = {"input_ids" if inputs_embeds is None else "inputs_embeds": inputs}
        with self.frozen():
            encoder = self.get_encoder()
            state_BSH = encoder(**given, attention_mask=attention_mask).last_hidden_state
        attended = inputs.new_ones(inputs.shape[:2]) if attention_mask is None else attention_mask
        last_B = last_prompt_positions(attended, None, None)
        return self.router(states_at(last_B, state_BSH))

    def _maybe_prepare_encoder_kwargs_for_generation(
        self,
        inputs_tensor: Tensor,
        model_kwargs: dict[str, Any],
        model_input_name: str | None,
        generation_config: Any,
    ) -> dict[str, Any]:
        """Find the coefficients of the prompts, once, and encode with them."""
        coefficients = model_kwargs.pop("coefficients", None)
        task_ids = model_kwargs.pop("task_ids", None)
        if coefficients is None:
            if model_kwargs.get("encoder_outputs") is not None:
                raise no_coefficients("encoder_outputs")
            given = {model_input_name or "input_ids": inputs_tensor}
            mask = model_kwargs.get("attention_mask")
            coefficients = self.coefficients(**given, attention_mask=mask, task_ids=task_ids)
        with self.mixture.using(coefficients):
            mixin: Any = super()
            found = mixin._maybe_prepare_encoder_kwargs_for_generation(
                inputs_tensor, model_kwargs, model_input_name, generation_config
            )
        return {**found, "coefficients": coefficients}
