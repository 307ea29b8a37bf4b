"""The supported model families, as data."""

from collections.abc import Mapping

from upcycle_core.architectures.family import UNUSED_WIDTH, Family, Ffn, Target
from upcycle_core.errors import Fault, InputError

_LAYER = "model.layers.{layer}."
_ATTENTION = {
    _LAYER + "input_layernorm.weight": "H",
    _LAYER + "self_attn.q_proj.weight": "QH",
    _LAYER + "self_attn.k_proj.weight": "KH",
    _LAYER + "self_attn.v_proj.weight": "KH",
    _LAYER + "self_attn.o_proj.weight": "HQ",
    _LAYER + "post_attention_layernorm.weight": "H",
}
_QKV_BIAS = {
    _LAYER + "self_attn.q_proj.bias": "Q",
    _LAYER + "self_attn.k_proj.bias": "K",
    _LAYER + "self_attn.v_proj.bias": "K",
}
_QK_NORM = {
    _LAYER + "self_attn.q_norm.weight": "N",
    _LAYER + "self_attn.k_norm.weight": "N",
}
# Norms of whole queries and keys, and behind attention and FFN rather than before them.
_OLMO2 = {name: shape for name, shape in _ATTENTION.items() if "input_layernorm" not in name} | {
    _LAYER + "self_attn.q_norm.weight": "Q",
    _LAYER + "self_attn.k_norm.weight": "K",
    _LAYER + "post_feedforward_layernorm.weight": "H",
}
_O_BIAS = {_LAYER + "self_attn.o_proj.bias": "H"}
_BASE = {"model.norm.weight": "H"}

_KEPT = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_dropout",
    "initializer_range",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_IGNORED = frozenset(
    {
        "model_type",
        "architectures",
        "dtype",
        "transformers_version",
        "_attn_implementation",
        "_experts_implementation",
        # A way to compute Llama's matrix products in slices; the result is the same.
        "pretraining_tp",
        # What every configuration of transformers carries: outputs, labels, other kinds of models.
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "id2label",
        "label2id",
        "problem_type",
    }
)
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": None,
}
_LLAMA_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN3_DEFAULTS = {**_QWEN2_DEFAULTS, "head_dim": 128, "attention_bias": False}
_OLMO2_DEFAULTS = {
    **_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 50279,
}
_ERNIE_DEFAULTS = {
    **{name: value for name, value in _DEFAULTS.items() if name != "attention_dropout"},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "head_dim": 128,
    "use_bias": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BALANCE = {"output_router_logits": False, "router_aux_loss_coef": 0.001}

MIXTRAL = Target(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    router=_LAYER + "block_sparse_moe.gate.weight",
    expert=Ffn(
        gate=_LAYER + "block_sparse_moe.experts.{expert}.w1.weight",
        up=_LAYER + "block_sparse_moe.experts.{expert}.w3.weight",
        down=_LAYER + "block_sparse_moe.experts.{expert}.w2.weight",
    ),
    count_fields=("num_local_experts",),
    width_fields=("intermediate_size",),
    constants={**_BALANCE, "router_jitter_noise": 0.0},
)
_QWEN_EXPERT = Ffn(
    gate=_LAYER + "mlp.experts.{expert}.gate_proj.weight",
    up=_LAYER + "mlp.experts.{expert}.up_proj.weight",
    down=_LAYER + "mlp.experts.{expert}.down_proj.weight",
)
# Without norm_topk_prob a token's expert weights would not sum to one.
_EVERY_LAYER = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN2_MOE = Target(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    router=_LAYER + "mlp.gate.weight",
    expert=_QWEN_EXPERT,
    count_fields=("num_experts",),
    width_fields=("moe_intermediate_size", "intermediate_size"),
    constants={
        **_BALANCE,
        **_EVERY_LAYER,
        "qkv_bias": True,
        "shared_expert_intermediate_size": UNUSED_WIDTH,
    },
    zeros={
        _LAYER + "mlp.shared_expert_gate.weight": "1H",
        _LAYER + "mlp.shared_expert.gate_proj.weight": "SH",
        _LAYER + "mlp.shared_expert.up_proj.weight": "SH",
        _LAYER + "mlp.shared_expert.down_proj.weight": "HS",
    },
)
QWEN3_MOE = Target(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    router=_LAYER + "mlp.gate.weight",
    expert=_QWEN_EXPERT,
    count_fields=("num_local_experts", "num_experts"),
    width_fields=("moe_intermediate_size", "intermediate_size"),
    constants={**_BALANCE, **_EVERY_LAYER},
)
FLEX_OLMO = Target(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    router=_LAYER + "mlp.gate.weight",
    expert=_QWEN_EXPERT,
    count_fields=("num_experts",),
    width_fields=("intermediate_size",),
    constants={**_BALANCE, "norm_topk_prob": True},
)
# Its routers add a bias before the choice; zero chooses as if there were none.
ERNIE_MOE = Target(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    router=_LAYER + "mlp.gate.weight",
    expert=_QWEN_EXPERT,
    count_fields=("moe_num_experts", "num_experts"),
    width_fields=("moe_intermediate_size", "intermediate_size"),
    top_k_fields=("moe_k", "num_experts_per_tok"),
    constants={
        **_BALANCE,
        "use_bias": False,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    zeros={_LAYER + "mlp.moe_statics.e_score_correction_bias": "1D"},
)

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            target=MIXTRAL,
            base_tensors=_BASE,
            layer_tensors=_ATTENTION,
            bias_tensors={},
            kept=_KEPT,
            demanded={"attention_bias": False, "mlp_bias": False},
            ignored=_IGNORED,
            defaults=_LLAMA_DEFAULTS,
            windows="none",
        ),
        Family(
            model_type="mistral",
            target=MIXTRAL,
            base_tensors=_BASE,
            layer_tensors=_ATTENTION,
            bias_tensors={},
            kept=_KEPT,
            demanded={},
            ignored=_IGNORED,
            defaults=_MISTRAL_DEFAULTS,
            windows="model",
        ),
        Family(
            model_type="qwen2",
            target=QWEN2_MOE,
            base_tensors=_BASE,
            layer_tensors={**_ATTENTION, **_QKV_BIAS},
            bias_tensors={},
            kept=_KEPT,
            demanded={},
            ignored=_IGNORED,
            defaults=_QWEN2_DEFAULTS,
            windows="by-layer",
        ),
        Family(
            model_type="qwen3",
            target=QWEN3_MOE,
            base_tensors=_BASE,
            layer_tensors={**_ATTENTION, **_QK_NORM},
            bias_tensors={**_QKV_BIAS, **_O_BIAS},
            kept=(*_KEPT, "attention_bias"),
            demanded={},
            ignored=_IGNORED,
            defaults=_QWEN3_DEFAULTS,
            windows="all-or-none",
        ),
        Family(
            model_type="olmo2",
            target=FLEX_OLMO,
            base_tensors=_BASE,
            layer_tensors=_OLMO2,
            bias_tensors={**_QKV_BIAS, **_O_BIAS},
            kept=(*_KEPT, "attention_bias"),
            demanded={},
            ignored=_IGNORED,
            defaults=_OLMO2_DEFAULTS,
            windows="none",
            norms_first=False,
        ),
        Family(
            model_type="ernie4_5",
            target=ERNIE_MOE,
            base_tensors=_BASE,
            layer_tensors=_ATTENTION,
            bias_tensors={},
            kept=tuple(name for name in _KEPT if name != "attention_dropout"),
            demanded={"use_bias": False},
            ignored=_IGNORED | {"attention_dropout"},
            defaults=_ERNIE_DEFAULTS,
            windows="none",
        ),
    )
}

_LAYERNORM = ": no stock MoE has its LayerNorm and ungated FFN"
NO_STOCK_MOE: Mapping[str, str] = {
    "cohere": ": no stock MoE runs attention and FFN side by side",
    "falcon": _LAYERNORM,
    "gemma": ": no stock MoE scales its embedding and adds 1 to its norms",
    "gemma2": ": no stock MoE caps its logits and has its four norms a layer",
    "gemma3": ": no stock MoE has its four norms a layer and two ropes",
    "gemma3_text": ": no stock MoE has its four norms a layer and two ropes",
    "glm4": ": its stock MoE lacks its norms after attention and FFN",
    "gpt2": _LAYERNORM,
    "gpt_bigcode": _LAYERNORM,
    "gpt_neox": _LAYERNORM,
    "granite": ": its stock MoE keeps all experts in one tensor, which is not written here yet",
    "mixtral": ": it is a Mixture-of-Experts already",
    "mpt": _LAYERNORM,
    "olmo": ": no stock MoE has its LayerNorm without weights",
    "opt": _LAYERNORM,
    "phi": _LAYERNORM,
    "phi3": ": its stock MoE (PhiMoE) has LayerNorm and weights experts by sparsemixer",
    "smollm3": ": no stock MoE leaves out the rope in every fourth layer",
    "stablelm": ": no stock MoE has its LayerNorm and partial rope",
    "starcoder2": _LAYERNORM,
}
"""Architectures that people ask for, and why they are no experts of a stock MoE."""

STOCK_MOES = frozenset(family.target.model_type for family in FAMILIES.values())
"""The stock MoE architectures that the families' experts are joined in."""


def family_of(config: Mapping, *, field: str = "model_type") -> Family:
    """Look up the family of a dense checkpoint.

    Args:
        config: The content of config.json.
        field: How the error names the checkpoint.

    Raises:
        InputError: The family is not supported; the message lists those that are.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reason = NO_STOCK_MOE.get(str(model_type), "")
        remedy = f"is not supported{reason}; choose a model of {', '.join(FAMILIES)}"
        raise InputError(Fault(field, model_type, remedy))
    return FAMILIES[model_type]
