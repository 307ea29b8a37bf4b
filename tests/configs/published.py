"""Published config.json files, their fields alone, and tiny checkpoints that say the same."""

import json
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.pico import save_pico_tokenizer

_FOLDER = Path(__file__).parent
PUBLISHED = {file.stem.replace("--", "/"): file for file in sorted(_FOLDER.glob("*.json"))}
"""Repository of the hub to the fields of its config.json."""
REFUSED = {
    "HuggingFaceTB/SmolLM3-3B": "leaves out the rope in every fourth layer",
    "bigcode/starcoder2-3b": "LayerNorm and ungated FFN",
    "google/gemma-2-2b": "caps its logits",
    "google/gemma-7b": "scales its embedding and adds 1 to its norms",
    "ibm-granite/granite-3.0-2b-base": "keeps all experts in one tensor",
    "microsoft/Phi-3-mini-4k-instruct": "weights experts by sparsemixer",
    "mistralai/Mixtral-8x7B-v0.1": "it is a Mixture-of-Experts already",
    "openai-community/gpt2": "LayerNorm and ungated FFN",
    "stabilityai/stablelm-2-1_6b": "LayerNorm and partial rope",
    "tiiuae/falcon-7b": "LayerNorm and ungated FFN",
}
"""Those that are refused, and what the refusal says."""


def published(name: str) -> dict:
    """The fields as they were published."""
    return json.loads(PUBLISHED[name].read_text())


def config_of(name: str) -> dict:
    """The fields as they were published, with sizes of a pico model.

    What agrees between two models of the table agrees between their pico sizes, but for sizes.
    """
    config = published(name)
    if "hidden_size" not in config or "num_attention_heads" not in config:
        return config
    grouped = config.get("num_key_value_heads") not in (None, config["num_attention_heads"])
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if grouped else 4,
        "vocab_size": 96 + config["vocab_size"] % 7,
    }
    small |= {"head_dim": 8} if config.get("head_dim") else {}
    small |= {"layer_types": config["layer_types"][:2]} if config.get("layer_types") else {}
    special = {key: 0 for key in config if key.endswith("_token_id") and config[key] is not None}
    return {**config, **small, **special}


def checkpoint(name: str, out: Path, *, seed: int | None = None) -> Path:
    """A pico checkpoint of a published model: its fields, random weights, a tokenizer.

    Models of one name differ in their FFNs, by the name of ``out``; the rest is the same.
    """
    config = config_of(name)
    stock = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(stock).eval()
    torch.manual_seed(sum(out.name.encode()) if seed is None else seed)
    with torch.no_grad():
        for tensor_name, parameter in model.named_parameters():
            if ".mlp." in tensor_name or seed is not None:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    model.to(torch.float32).save_pretrained(out)
    (out / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    save_pico_tokenizer(out, config["vocab_size"])
    return out
