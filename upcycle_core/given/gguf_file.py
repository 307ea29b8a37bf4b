"""A GGUF file as an ordinary checkpoint: dequantised tensor by tensor, names as data.

llama.cpp stores the rows of q and k of a Llama interleaved by pairs; here they are put back.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from upcycle_core.architectures.families import family_of
from upcycle_core.checkpoints.given_as import write_given_as
from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.checkpoints.writer import TensorSpec, write_json, write_sharded
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.given.gguf_split import ADDS_BOS, MODEL, PRE, split_as_said, split_faults

MAX_SHARD_BYTES = 5_000_000_000
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
}
"""Modules by what llama.cpp calls them, without the number of their block."""
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architectures whose tensors and settings are all understood. Mistral's files say ``llama``."""
INTERLEAVED = {"llama": ("attn_q", "attn_k")}
SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
DERIVED = ("attention.key_length", "attention.head_count_kv")
"""Those that follow from the others where a file does not say them."""
TOLD_ELSEWHERE = ("rope.freq_base", "vocab_size")
NEUTRAL = {
    "attention.causal": True,
    "rope.scaling.type": "none",
    "tensor_data_layout": "Meta AI original pth",
}
"""Settings that change nothing at this value, or at 0."""
SPECIAL = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
THETA = 10000.0
ROPE_SCALES = "rope_freqs.weight"
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What all published models of Llama 3.1 to 3.3 have; files keep what comes of it alone."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What matrices are stored as that are not quantised. What is, becomes bf16."""
BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<name>.+)")
SHOWN = 5


@dataclass(frozen=True)
class GgufFile:
    """What a file's header says.

    Args:
        path: The file.
        config: The config.json that it amounts to.
        tensors: The file's tensors by the checkpoint's names.
        dtype: Type that all weights get.
        types: ggml types of its matrices, ascending (``Q4_K``, ``Q6_K``).
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Any]
    dtype: torch.dtype
    types: tuple[str, ...]

    @property
    def said(self) -> str:
        """In words, what a checkpoint was made from."""
        stored, written = "/".join(self.types), str(self.dtype).removeprefix("torch.")
        return f"GGUF file ({stored}), dequantised to {written}"


def open_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file, and account for all that it says.

    Raises:
        InputError: No GGUF file, or a part of one; an architecture, setting, rope or type of block
            that is not understood; tensors that are missing, misshapen or without a place.
    """
    reader = gguf_reader(path)
    values = {key: field.contents() for key, field in reader.fields.items() if _is_read(key)}
    kind = values.get("general.architecture")
    if kind not in CLASSES:
        remedy = f"only {', '.join(CLASSES)} are read; give safetensors of it"
        raise InputError(Fault(f"{path.name}: general.architecture", kind, remedy))
    shapes = {tensor.name: tuple(map(int, tensor.shape[::-1])) for tensor in reader.tensors}
    scales = next((t.data for t in reader.tensors if t.name == ROPE_SCALES), None)
    raise_faults([*_setting_faults(values, kind, scales, path), *split_faults(values, path)])
    shapes.pop(ROPE_SCALES, None)
    stored = sorted({t.tensor_type.name for t in reader.tensors if len(t.shape) > 1})
    dtype = PLAIN[stored[0]] if len(stored) == 1 and stored[0] in PLAIN else torch.bfloat16
    config = _config(values, kind, shapes, dtype)
    if scales is not None:
        config["rope_parameters"] |= scaled_rope(scales, config["rope_parameters"]["rope_theta"])
    tensors = {_name(tensor.name) or tensor.name: tensor for tensor in reader.tensors}
    raise_faults(_tensor_faults(config, shapes, path))
    return GgufFile(path, config, tensors, dtype, tuple(stored))


def write_gguf(file: GgufFile, out: Path) -> None:
    """Write a GGUF file as an ordinary checkpoint with its tokenizer and chat template.

    Args:
        file: As ``open_gguf`` found it.
        out: Empty directory to fill. One tensor at a time is held, in fp32 and in its type.

    Raises:
        InputError: A type of block that cannot be dequantised; a tokenizer that cannot be rebuilt.
    """
    _write_tokenizer(file.path, out)
    kind, heads = file.config["model_type"], file.config["num_attention_heads"]
    groups = {"attn_q": heads, "attn_k": file.config["num_key_value_heads"]}

    def produce(name: str) -> Tensor:
        tensor = file.tensors[name]
        values = dequantised(tensor, file.path)
        if not values.flags.writeable:  # those of F32 are the file's own
            values = np.array(values)
        weights = torch.from_numpy(values)
        own = tensor.name.split(".")[-2]
        if own in INTERLEAVED.get(kind, ()):
            weights = paired_apart(weights, groups[own])
        return weights.to(file.dtype)

    family = family_of(file.config)
    specs = [TensorSpec(n, s, file.dtype) for n, s in family.tensors(file.config).items()]
    write_sharded(out, specs, produce, max_shard_bytes=MAX_SHARD_BYTES)
    write_json(out / "config.json", file.config)
    write_given_as(out, file.said)


def paired_apart(rows: Tensor, heads: int) -> Tensor:
    """Put rows of q or k, whose rotated pairs llama.cpp lays side by side, back into halves.

    Args:
        rows: [heads x N, ...], N the head size.
        heads: Query or key-value heads.

    Returns:
        The same shape, in transformers' order.
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def scaled_rope(scales: np.ndarray, theta: float) -> dict[str, Any]:
    """The rope of Llama 3.1 from what its wavelengths are divided by; empty if it is another.

    Args:
        scales: [N / 2], N the head size: 1 for short waves, the factor for long ones.
        theta: Base of the rope.
    """
    factor = float(scales.max())
    exponents = np.arange(len(scales)) / len(scales)
    turns = LLAMA3["original_max_position_embeddings"] / (2 * np.pi * theta**exponents)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(scales, expected, rtol=1e-4, atol=0):
        return {}
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def gguf_reader(path: Path) -> Any:
    """The header and mapped tensors of a GGUF file.

    Raises:
        InputError: No GGUF file, a part of one, or the package gguf is not installed.
    """
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
        remedy = "is a part of a file; join the parts with llama-gguf-split --merge"
        raise InputError(Fault("gguf", str(path), remedy))
    try:
        from gguf import GGUFReader  # nobody else needs it
    except ImportError as error:
        remedy = "needs the package gguf; install it, or give safetensors"
        raise InputError(Fault("gguf", str(path), remedy)) from error
    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError, OSError) as error:
        remedy = f"is truncated or no GGUF file ({error}); fetch it again"
        raise InputError(Fault("gguf", str(path), remedy)) from error


def _is_read(key: str) -> bool:
    """Whether a value is a setting, and not a vocabulary."""
    return not key.startswith("tokenizer.") or key in (*SPECIAL, PRE, MODEL)


def _setting_faults(
    values: Mapping[str, Any], kind: str, scales: np.ndarray | None, path: Path
) -> Iterator[Fault]:
    """What is missing, and what could change a computation and has no neutral value."""
    own = {k.removeprefix(f"{kind}."): v for k, v in values.items() if k.startswith(f"{kind}.")}
    for key in SETTINGS:
        if key not in own and key not in DERIVED:
            yield Fault(f"{path.name}: {kind}.{key}", None, "is missing; fetch the file again")
    heads, hidden = own.get("attention.head_count", 1), own.get("embedding_length", 0)
    width = own.get("attention.key_length", hidden // heads if heads else 0)
    neutral = {"rope.dimension_count": width, "attention.value_length": width, **NEUTRAL}
    for key, value in own.items():
        if key not in (*SETTINGS, *TOLD_ELSEWHERE) and value not in (neutral.get(key), 0, False):
            remedy = "is not understood, and could change the result; give safetensors"
            yield Fault(f"{path.name}: {kind}.{key}", value, remedy)
    if scales is not None and not scaled_rope(scales, own.get("rope.freq_base", THETA)):
        remedy = "scales the rope in another way than Llama 3.1; give safetensors"
        yield Fault(f"{path.name}: tensor", ROPE_SCALES, remedy)


def _config(
    values: Mapping[str, Any],
    kind: str,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """config.json; numbers that are stored in fp32 are written as short as fp32 can tell."""
    told: dict[str, Any] = {ours: values.get(f"{kind}.{key}") for key, ours in SETTINGS.items()}
    told["num_key_value_heads"] = told["num_key_value_heads"] or told["num_attention_heads"]
    told["head_dim"] = told["head_dim"] or told["hidden_size"] // told["num_attention_heads"]
    config = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        **{key: _short(value) for key, value in told.items()},
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _short(values.get(f"{kind}.rope.freq_base", THETA)),
        },
        "tie_word_embeddings": "output.weight" not in shapes,
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        **{ours: values.get(key) for key, ours in SPECIAL.items()},
        "dtype": str(dtype).removeprefix("torch."),
        "transformers_version": transformers.__version__,
    }
    return {**config, **({"use_sliding_window": False} if kind != "llama" else {})}


def _short(value: Any) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _name(stored: str) -> str | None:
    """The checkpoint's name of a tensor of the file; None if it has no place."""
    block = BLOCK.fullmatch(stored)
    module, _, part = (block["name"] if block else stored).rpartition(".")
    if (
        module not in NAMES
        or part not in ("weight", "bias")
        or ("{}" in NAMES[module]) != bool(block)
    ):
        return None
    return f"{NAMES[module].format(block['layer'] if block else '')}.{part}"


def _tensor_faults(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path
) -> Iterator[Fault]:
    expected = family_of(config).tensors(config)
    found = {_name(stored) or stored: shape for stored, shape in shapes.items()}
    kinds = {
        "has no place for": sorted(set(found) - set(expected)),
        "lacks": sorted(set(expected) - set(found)),
        "has another shape of": sorted(
            n for n in set(found) & set(expected) if found[n] != expected[n]
        ),
    }
    for what, names in kinds.items():
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            remedy = f"{what} {', '.join(names[:SHOWN])}{more}; give safetensors of the model"
            yield Fault("gguf", str(path), remedy)


def dequantised(tensor: Any, path: Path) -> np.ndarray:
    """The values of a tensor of a GGUF file.

    Raises:
        InputError: A type of block that cannot be dequantised.
    """
    from gguf import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        remedy = f"{tensor.name} is {tensor.tensor_type.name}, which cannot be dequantised here"
        raise InputError(Fault("gguf", str(path), f"{remedy}; give another type")) from error


def _write_tokenizer(path: Path, out: Path) -> None:
    from transformers import AutoTokenizer  # slow to import

    try:
        with quiet_loading():
            tokenizer = AutoTokenizer.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
            )
            tokenizer.save_pretrained(out)
        fields = gguf_reader(path).fields
        said = fields[PRE].contents() if PRE in fields else None
        bos = None if ADDS_BOS in fields else tokenizer.bos_token
        split_as_said(said, out / "tokenizer.json", bos=bos)
    except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
        remedy = f"its tokenizer cannot be rebuilt ({error}); give safetensors with a tokenizer"
        raise InputError(Fault("gguf", str(path), remedy)) from error
