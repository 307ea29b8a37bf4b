"""What a name in config.json may change, where the tables of the families do not list it."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

NEUTRAL: Mapping[str, object] = {
    "add_cross_attention": False,
    "alibi": False,
    "attention_bias": False,
    "attention_chunk_size": None,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "auto_map": None,
    "bias": False,
    "chunk_size_feed_forward": 0,
    "clip_qkv": None,
    "cross_attention_hidden_size": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "layer_types": None,
    "logit_scale": 1.0,
    "logit_softcapping": None,
    "logits_scaling": 1.0,
    "mlp_bias": False,
    "no_rope_layers": None,
    "num_experts": None,
    "num_local_experts": None,
    "parallel_attn": False,
    "partial_rotary_factor": 1.0,
    "per_layer_config": None,
    "pruned_heads": {},
    "qk_layernorm": False,
    "qkv_bias": False,
    "quantization_config": None,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "rotary_pct": 1.0,
    "scale_emb": 1.0,
    "sliding_window": None,
    "tie_encoder_decoder": False,
    "use_alibi": False,
    "use_dynamic_ntk": False,
    "use_logn_attn": False,
    "use_mrope": False,
    "use_parallel_residual": False,
    "use_qk_norm": False,
    "use_qkv_bias": False,
    "use_sliding_window": False,
}
"""Names that have changed what some model computes, in stock classes or in the code of published
checkpoints, and the value with which they do not."""
# What a stock class's forward pass reads that is written in files that all of them share.
_SHARED = ("masking_utils.py", "modeling_rope_utils.py", "cache_utils.py", "configuration_utils.py")
_READ = re.compile(r"""config\.(\w+)|getattr\(\s*(?:self\.)?config,\s*["'](\w+)["']""")
_DECLARED = re.compile(r"^    (\w+)\s*:\s*(?!ClassVar)", re.MULTILINE)


def is_neutral(name: str, config: Mapping) -> bool:
    """Whether ``config[name]`` says what would be so without it: null, or its neutral value."""
    value = config[name]
    if name == "sliding_window" and config.get("use_sliding_window") is False:
        return True
    if name == "layer_types" and isinstance(value, list):
        return all(kind == "full_attention" for kind in value)
    return value is None or (name in NEUTRAL and value == NEUTRAL[name])


def decides(name: str, model_type: str) -> bool:
    """Whether an attribute of config.json could decide what a model of ``model_type`` computes.

    So it is if it has done so in some model (``NEUTRAL``), or if the stock class declares it or
    reads it: what transformers neither declares nor reads cannot change what it computes.
    """
    return name in NEUTRAL or name in stock_names(model_type)


@cache
def stock_names(model_type: str) -> frozenset[str]:
    """Attributes that the stock class of ``model_type`` declares, or reads anywhere.

    Found in the source text of transformers, for importing its classes takes seconds.
    """
    found = find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    own = root / "models" / model_type
    files = [*own.glob("modeling_*.py"), *(root / name for name in _SHARED)]
    names = {name for file in files for pair in _READ.findall(_text(file)) for name in pair if name}
    declaring = [*own.glob("configuration_*.py"), root / "configuration_utils.py"]
    return frozenset(names.union(*(_DECLARED.findall(_text(file)) for file in declaring)))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
