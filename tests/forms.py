"""The same pico model in other forms: a LoRA adapter by peft, a GGUF file by the gguf package."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from pico import save_pico
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_bpe_tokenizer(directory: Path, texts: list[str], size: int = 320) -> Path:
    """A byte-level BPE, which a GGUF file can hold, with a chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    return directory


def save_adapter(
    directory: Path, base: Path, *, seed: int = 0, dtype=torch.float32, **changes
) -> tuple[Path, torch.nn.Module]:
    """A random LoRA adapter of ``base`` as peft saves it, and peft's model around it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": LINEARS, "init_lora_weights": False}
    torch.manual_seed(seed)
    tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{**settings, **changes}))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if parameter.requires_grad and "lora_" not in name:  # trained whole
                parameter.add_(0.1 * torch.randn_like(parameter))
    tuned.save_pretrained(directory)
    return directory, tuned.eval()


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_merged(directory: Path, tuned: torch.nn.Module, base: Path) -> Path:
    """What peft makes of an adapter, as a checkpoint with the base's tokenizer."""
    tuned.merge_and_unload().save_pretrained(directory)
    for file in base.glob("*token*"):
        shutil.copyfile(file, directory / file.name)
    for file in base.glob("chat_template*"):
        shutil.copyfile(file, directory / file.name)
    return directory


def save_gguf(
    path: Path,
    checkpoint: Path,
    *,
    matrices: str = "F32",
    settings: dict | None = None,
    more: dict[str, np.ndarray] | None = None,
    left_out: tuple[str, ...] = (),
    split: str | None = None,
    adds_bos: bool | None = None,
) -> Path:
    """Write a Llama, Qwen2 or Qwen3 checkpoint as llama.cpp's converter does.

    Args:
        matrices: Type of what has two dimensions.
        settings: Further metadata, and other values of what there is.
        more: Further tensors.
        left_out: Tensors, by the file's names.
        split: How text is cut, by llama.cpp's name; ``gpt-2`` by default.
        adds_bos: Whether the file says that a text begins with a token of its own.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    own = {
        "context_length": config["max_position_embeddings"],
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.dimension_count": config["head_dim"],
    }
    if kind != "llama":
        own["attention.key_length"] = own["attention.value_length"] = config["head_dim"]
        del own["rope.dimension_count"]
    for key, value in own.items():
        if (settings or {}).get(key) is None:
            writer.add_uint32(f"{kind}.{key}", value)
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{kind}.rope.freq_base", config["rope_parameters"]["rope_theta"])
    for key, value in (settings or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"{kind}.{key}", value)
    _add_words(writer, checkpoint)
    if split is not None:
        writer.add_tokenizer_pre(split)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), own["block_count"])
    tensors = load_file(checkpoint / "model.safetensors")
    stored = {names.get_name(n, try_suffixes=(".weight", ".bias")): n for n in tensors}
    quantised = gguf.GGMLQuantizationType[matrices]
    for name, source in stored.items():
        data = tensors[source].float().numpy()
        if kind == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            heads = own["attention.head_count" + ("_kv" if "attn_k" in name else "")]
            data = _permuted(data, heads)
        if name in left_out:
            continue
        if data.ndim == 1 or matrices == "F32":
            writer.add_tensor(name, np.ascontiguousarray(data))
        else:
            writer.add_tensor(name, gguf.quantize(data, quantised), raw_dtype=quantised)
    for name, data in (more or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """As ``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def _add_words(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    core = json.loads((checkpoint / "tokenizer.json").read_text())
    words = sorted(core["model"]["vocab"], key=core["model"]["vocab"].__getitem__)
    special = {token["content"] for token in core["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if w in special else gguf.TokenType.NORMAL for w in words]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in core["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)


def save_bpe_model(directory: Path, texts: list[str], family: str = "llama", **changes) -> Path:
    """A pico checkpoint whose tokenizer and sizes GGUF can hold: I = 64."""
    save_bpe_tokenizer(directory, texts)
    words = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    kept = {file.name: file.read_bytes() for file in directory.glob("*")}
    sizes = {"intermediate_size": 64, "vocab_size": len(words), "pad_token_id": None}
    save_pico(directory, family, **{**sizes, **changes})
    for name, content in kept.items():
        (directory / name).write_bytes(content)
    return directory


def save_rounded(checkpoint: Path, kind: str) -> None:
    """Round a checkpoint as a quantiser does, then to bf16, in place; rows are rounded alone."""
    stored = gguf.GGMLQuantizationType[kind]
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            rounded = gguf.dequantize(gguf.quantize(tensor.numpy(), stored), stored)
            tensors[name] = torch.from_numpy(np.array(rounded))
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(half, checkpoint / "model.safetensors", metadata={"format": "pt"})
    change_json(checkpoint / "config.json", dtype="bfloat16")
