"""BAM (Zhang et al., arXiv 2408.08274, NeurIPS 2024): experts in attention as well as in the FFN.

Of a Mixtral only the attention differs: query and output projections are experts, keys and values
are shared, and every token passes through all attention experts, weighted by a softmax (soft
routing). The paper's model runs attention and FFN in parallel; this one keeps the blocks of the
dense family, one after the other.

This file needs torch and transformers alone: it is copied beside the weights, so that
``from_pretrained(..., trust_remote_code=True)`` works without the package it comes from.

B batch, S positions, H hidden size, D experts, N head size.
"""

from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, MixtralModel, MixtralPreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import (
    MixtralAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class BamConfig(MixtralConfig):
    """A Mixtral's configuration: there are as many attention experts as FFN experts."""

    model_type = "bam"
    base_model_tp_plan = {}


class BamAttentionExpert(nn.Module):
    """One expert's query and output projections."""

    parameter_group = "experts"

    def __init__(self, config: BamConfig, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)


class BamAttentionRouter(nn.Linear):
    """softmax(W x) over all attention experts, [B, S, D]; W is [D, H]."""

    parameter_group = "router"

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        logits_BSD = super().forward(hidden_BSH)
        return logits_BSD.softmax(dim=-1, dtype=torch.float32).to(hidden_BSH.dtype)


class BamAttention(MixtralAttention):
    """y = sum_i softmax(W x)_i O_i attention(Q_i x, K x, V x)."""

    experts: Any

    def __init__(self, config: BamConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = self.q_proj.out_features
        del self.q_proj, self.o_proj
        count = config.num_local_experts
        self.router = BamAttentionRouter(config.hidden_size, count, bias=False)
        self.experts = nn.ModuleList(BamAttentionExpert(config, width) for _ in range(count))

    def forward(
        self,
        hidden_states,
        position_embeddings,
        attention_mask=None,
        past_key_values=None,
        **kwargs,
    ):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries = [expert.q_proj(hidden_states) for expert in self.experts]
        query = torch.cat([q.view(shape) for q in queries], dim=2).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        weights_BSD = self.router(hidden_states)
        queries = query.chunk(len(self.experts), dim=1)
        output, maps = torch.zeros_like(hidden_states), []
        for index, expert in enumerate(self.experts):
            mixed, attention = attend(
                self,
                queries[index],
                key,
                value,
                attention_mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                sliding_window=self.config.sliding_window,
                **kwargs,
            )
            mixed = mixed.reshape(*hidden_states.shape[:-1], -1).contiguous()
            output = output + weights_BSD[..., index, None] * expert.o_proj(mixed)
            maps.append(attention)
        return output, None if maps[0] is None else torch.cat(maps, dim=1)


class BamPreTrainedModel(MixtralPreTrainedModel):
    """What both models share."""

    config: BamConfig

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for its decorator in this file; it is on the Mixtral's experts.
        return True


class BamModel(BamPreTrainedModel, MixtralModel):
    """The decoder without its head."""

    config: BamConfig

    def __init__(self, config: BamConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = BamAttention(config, index)
        self.post_init()


class BamForCausalLM(BamPreTrainedModel, MixtralForCausalLM):
    """The language model."""

    config: BamConfig

    def __init__(self, config: BamConfig) -> None:
        super(MixtralForCausalLM, self).__init__(config)  # its own would build a Mixtral first
        self.model = BamModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_local_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.post_init()


# FFN experts lie in files one by one and in memory fused, as a Mixtral's do.
register_checkpoint_conversion_mapping(
    BamConfig.model_type, get_checkpoint_conversion_mapping("mixtral"), overwrite=True
)
