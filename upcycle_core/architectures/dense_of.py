"""From a stock MoE's config.json back to the dense model that each of its experts would be.

H hidden size, I intermediate size of an expert, D experts.
"""

from collections.abc import Mapping

from upcycle_core.architectures.families import (
    ERNIE_MOE,
    FAMILIES,
    FLEX_OLMO,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
)
from upcycle_core.architectures.family import WINDOW_ATTRIBUTES, Family, Target
from upcycle_core.architectures.judged import decides, is_neutral
from upcycle_core.errors import Fault, InputError, raise_faults

_DENSE = {
    MIXTRAL.model_type: "llama",
    QWEN2_MOE.model_type: "qwen2",
    QWEN3_MOE.model_type: "qwen3",
    FLEX_OLMO.model_type: "olmo2",
    ERNIE_MOE.model_type: "ernie4_5",
}
TARGETS = {
    target.model_type: target for target in (MIXTRAL, QWEN2_MOE, QWEN3_MOE, FLEX_OLMO, ERNIE_MOE)
}
_COUNT_FIELDS = tuple({n: 0 for t in TARGETS.values() for n in t.count_fields})
_TOP_K_FIELDS = tuple({n: 0 for t in TARGETS.values() for n in t.top_k_fields})
# Where config.json says nothing, the stock class of the MoE takes this and the dense one does not.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    MIXTRAL.model_type: {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
    QWEN2_MOE.model_type: {"norm_topk_prob": False, "decoder_sparse_step": 1},
    QWEN3_MOE.model_type: {"norm_topk_prob": False, "decoder_sparse_step": 1, "head_dim": None},
    FLEX_OLMO.model_type: {
        "norm_topk_prob": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "pad_token_id": 100277,
        "eos_token_id": 100257,
    },
    ERNIE_MOE.model_type: {
        "head_dim": None,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
}
# What says how tokens are routed, or how experts are computed and trained: no dense model has it.
_OF_ROUTING = {
    "num_experts_per_tok",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "qkv_bias",
    "shared_expert_intermediate_size",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "num_local_experts",
    "num_experts",
    "moe_intermediate_size",
    "intermediate_size",
    "experts_implementation",
    "_experts_implementation",
}


def target_of(config: Mapping, *, field: str = "model_type") -> Target:
    """Look up the stock MoE architecture of a checkpoint.

    Args:
        config: The content of config.json.
        field: How the error names the checkpoint.

    Raises:
        InputError: It is no MoE that is supported; the message lists those that are.
    """
    model_type = config.get("model_type")
    if model_type not in TARGETS:
        remedy = f"is not supported; choose a MoE of {', '.join(TARGETS)}"
        raise InputError(Fault(field, model_type, remedy))
    return TARGETS[model_type]


def experts_of(config: Mapping) -> tuple[int, int]:
    """D and the number of experts a token passes through, of a MoE's config.json; 0 if unsaid."""
    experts, top_k = (
        next((config[name] for name in names if config.get(name)), 0)
        for names in (_COUNT_FIELDS, _TOP_K_FIELDS)
    )
    return experts, top_k


def normalises(config: Mapping) -> bool:
    """Whether the weights of a token's experts sum to one, in a supported MoE."""
    is_always = TARGETS[config["model_type"]].always_normalises
    return is_always or bool(config.get("norm_topk_prob"))


def dense_of(config: Mapping, *, like: Family | None = None, field: str = "moe") -> dict:
    """The config.json of a dense model whose FFN has the size of one expert.

    ``Family.target_config`` the other way round: it turns the result into ``config`` again.

    Args:
        config: The content of a stock MoE's config.json (Mixtral, Qwen2Moe, Qwen3Moe), written by
            this project or another.
        like: Family that is preferred where two fit: a Mixtral is a Mistral or, unless it has a
            sliding window, a Llama. Llama by default.
        field: How errors name the MoE.

    Returns:
        Every attribute, explicit.

    Raises:
        InputError: Not supported; not every layer is a MoE; an attribute that the dense family does
            not have.
    """
    target = target_of(config, field=f"{field}.config.model_type")
    said = {**_DEFAULTS[target.model_type], **config}
    family = _family(target, said, like)
    raise_faults(_faults(said, target, family, field))
    said["intermediate_size"] = said.get("moe_intermediate_size") or said.get("intermediate_size")
    if family.windows == "all-or-none":
        # The dense model says from which layer on; this MoE has windows in every layer or in none.
        windowed = said.get("use_sliding_window") and said.get("sliding_window")
        said["max_window_layers"] = 0 if windowed else said["num_hidden_layers"]
    full = family.resolve(said, field=f"{field}.config")
    carried = (*family.kept, *family.demanded, *WINDOW_ATTRIBUTES[family.windows])
    dense = {
        "architectures": [f"{family.model_type.capitalize()}ForCausalLM"],
        "model_type": family.model_type,
        **{name: full[name] for name in carried if name in full},
        "intermediate_size": full["intermediate_size"],
        "dtype": full.get("dtype") or "float32",
    }
    raise_faults(family.config_faults(dense, field))
    return dense


def moe_tensors(config: Mapping, dense: Mapping) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of a stock MoE must hold.

    Args:
        config: The content of its config.json.
        dense: What ``dense_of`` returns of it.

    Returns:
        Name to shape.
    """
    target, family = TARGETS[config["model_type"]], FAMILIES[dense["model_type"]]
    (experts, _), shared = experts_of(config), shared_width(config)
    width, hidden = dense["intermediate_size"], dense["hidden_size"]
    sizes = {"H": hidden, "S": shared, "D": experts, "1": 1}
    names = family.tensors(dense, ffn=False)
    for layer in range(dense["num_hidden_layers"]):
        names[target.router_name(layer)] = experts, hidden
        for name, letters in target.zeros.items():
            names[name.format(layer=layer)] = tuple(sizes[letter] for letter in letters)
        for expert in range(experts):
            gate, up, down = target.expert_ffn(layer, expert)
            names |= {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}
    return names


def shared_width(config: Mapping) -> int:
    """Intermediate size of the shared expert that a Qwen2Moe has; its stock default is 5632."""
    return config.get("shared_expert_intermediate_size") or 5632


def _family(target: Target, said: Mapping, like: Family | None) -> Family:
    name = _DENSE[target.model_type]
    if target is MIXTRAL:
        fits_mistral = like is not None and like.model_type == "mistral"
        name = "mistral" if said.get("sliding_window") or fits_mistral else "llama"
    return FAMILIES[name]


def _faults(said: Mapping, target: Target, family: Family, field: str) -> list[Fault]:
    """What no dense model of the family expresses, and what nobody has judged."""
    faults = []
    only = {"decoder_sparse_step": 1, "mlp_only_layers": [], "qkv_bias": True}
    only |= {name: value for name, value in target.constants.items() if name.startswith("moe_")}
    if said.get("moe_layer_end_index") == said["num_hidden_layers"] - 1:
        del only["moe_layer_end_index"]  # what the stock class makes of -1
    for name, value in only.items():
        if said.get(name, value) not in (value, None):
            remedy = f"only {value!r} is supported: every layer a MoE, of one kind"
            faults.append(Fault(f"{field}.config.{name}", said[name], remedy))
    experts, top_k = experts_of(said)
    if not 1 <= top_k <= experts:
        remedy = f"must be 1 to {experts}, the number of experts"
        faults.append(Fault(f"{field}.config.num_experts_per_tok", top_k, remedy))
    judged = {*family.kept, *family.demanded, *family.ignored, *_OF_ROUTING, "torch_dtype"}
    judged |= {"rope_theta", "rope_scaling", "sliding_window", *WINDOW_ATTRIBUTES[family.windows]}
    judged |= {*target.count_fields, *target.width_fields, *target.constants}
    judged |= set(target.top_k_fields)
    for name in sorted(set(said) - judged):
        if decides(name, target.model_type) and not is_neutral(name, said):
            remedy = "is unknown; delete it if the model computes the same without it"
            faults.append(Fault(f"{field}.config.{name}", said[name], remedy))
    return faults
