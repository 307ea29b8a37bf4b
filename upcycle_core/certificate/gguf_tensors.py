"""Whether a GGUF file holds a MoE's tensors: each by its name, as near as its type can tell.

E experts, I intermediate size, H hidden size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upcycle_core.architectures.dense_of import TARGETS
from upcycle_core.architectures.family import Target
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.given.gguf_file import NAMES, dequantised, gguf_reader, paired_apart

BLOCK = "blk.{layer}."
INTERLEAVED = {"mixtral": ("attn_q", "attn_k")}
"""Architectures whose rotated pairs the converter lays side by side, and where."""
UNUSED = {
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_expert.gate_proj": "ffn_gate_shexp",
    "shared_expert.up_proj": "ffn_up_shexp",
    "shared_expert.down_proj": "ffn_down_shexp",
    "moe_statics.e_score_correction_bias": "exp_probs_b",
}
Q8_BLOCK = 32
HALF = 2.0**-11
"""Relative error of rounding to fp16."""
TINY = 2.0**-24


def misplaced_in_gguf(path: Path, source: CheckpointReader) -> dict[str, str]:
    """Compare every tensor of a stock MoE with what a GGUF file made of it says.

    Args:
        path: The file, of matrices in F32, F16 or Q8_0.
        source: What it was made from.

    Returns:
        Name in the checkpoint, or in the file, to what is wrong with it, sorted.

    Raises:
        InputError: No GGUF file, or a type of block that cannot be read.
    """
    file = {tensor.name: tensor for tensor in gguf_reader(path).tensors}
    names = gguf_names(source)
    wrong = {}
    whole: dict[str, Tensor] = {}
    for name in sorted(source.tensors, key=lambda name: names.get(name, ("", None))[0]):
        stored, expert = names.get(name, ("", None))
        if stored not in file:
            wrong[name] = f"the file has no {stored or 'place for it'}"
            continue
        if stored not in whole:  # an expert's neighbours are in the same one
            whole = {stored: torch.from_numpy(np.array(dequantised(file[stored], path)))}
        values = whole[stored] if expert is None else whole[stored][expert]
        said = _differs(source.tensor(name).float(), values, file[stored], source.config)
        if said:
            where = stored if expert is None else f"{stored}[{expert}]"
            wrong[name] = f"{where} {said}"
    left = sorted(set(file) - {stored for stored, _ in names.values()} - {"rope_freqs.weight"})
    return dict(sorted(wrong.items())) | dict.fromkeys(
        left, "is in the file, not in the checkpoint"
    )


def window_in_gguf(path: Path) -> int | None:
    """Tokens of the sliding window that a GGUF file names; None if it names none.

    Raises:
        InputError: No GGUF file.
    """
    fields = gguf_reader(path).fields
    name = f"{fields['general.architecture'].contents()}.attention.sliding_window"
    return int(fields[name].contents()) if name in fields else None


def gguf_names(source: CheckpointReader) -> dict[str, tuple[str, int | None]]:
    """Each tensor's name in the file, and which of its experts it is where they share one."""
    target = TARGETS[source.config["model_type"]]
    known = {ours: theirs for theirs, ours in NAMES.items()}
    names: dict[str, tuple[str, int | None]] = {}
    for layer in range(source.config["num_hidden_layers"]):
        names |= _of_layer(target, layer, source.config[target.count_fields[0]])
        for ours, theirs in known.items():
            if "{}" in ours:
                for part in ("weight", "bias"):
                    stored = f"{BLOCK.format(layer=layer)}{theirs}.{part}"
                    names[f"{ours.format(layer)}.{part}"] = (stored, None)
    names |= {
        f"{ours}.weight": (f"{known[ours]}.weight", None) for ours in known if "{}" not in ours
    }
    return {name: place for name, place in names.items() if name in source.tensors}


def _of_layer(target: Target, layer: int, experts: int) -> Mapping[str, tuple[str, int | None]]:
    block = BLOCK.format(layer=layer)
    names: dict[str, tuple[str, int | None]] = {
        target.router_name(layer): (f"{block}ffn_gate_inp.weight", None)
    }
    for expert in range(experts):
        parts = zip(target.expert_ffn(layer, expert), ("gate", "up", "down"), strict=True)
        names |= {name: (f"{block}ffn_{part}_exps.weight", expert) for name, part in parts}
    for template in target.zeros:
        stored = next(theirs for ours, theirs in UNUSED.items() if ours in template)
        kind = "bias" if stored == "exp_probs_b" else "weight"
        names[template.format(layer=layer)] = (f"{block}{stored}.{kind}", None)
    return names


def _differs(mine: Tensor, theirs: Tensor, stored: Any, config: Mapping) -> str | None:
    """What is wrong with the file's values; None where they are mine, rounded to its type."""
    own = stored.name.split(".")[-2]
    if own in INTERLEAVED.get(config["model_type"], ()):
        heads = config["num_attention_heads" if own == "attn_q" else "num_key_value_heads"]
        theirs = paired_apart(theirs, heads)
    if theirs.numel() != mine.numel() or theirs.squeeze().shape != mine.squeeze().shape:
        return f"is {list(theirs.shape)}, not {list(mine.shape)}"
    kind = stored.tensor_type.name
    bound = _rounding(mine, kind)
    if bound is None:
        return f"is stored as {kind}, of which no bound is known"
    beyond = ((theirs.reshape(mine.shape) - mine).abs() > bound).float().mean()
    return f"holds other values ({beyond:.0%} of them beyond {kind}'s rounding)" if beyond else None


def _rounding(values: Tensor, kind: str) -> Tensor | None:
    """How far a value may be from its own after rounding; None for another type of block."""
    if kind == "F32":
        return torch.zeros_like(values)
    if kind == "F16":
        return values.abs() * HALF + TINY
    if kind != "Q8_0":
        return None
    blocks = values.reshape(-1, Q8_BLOCK).abs().amax(1, keepdim=True)
    # Half a step of 1/127 of the block's largest value, whose scale is itself rounded to fp16.
    bound = blocks / 127 * 0.5 + blocks * HALF + TINY
    return (bound * (1 + 1e-4)).expand(-1, Q8_BLOCK).reshape(values.shape)
