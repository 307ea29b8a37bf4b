"""DeRS upcycling (Huang et al., arXiv 2503.01359, section 3.4): a MoE to train, of a dense model.

W_i = W_shared + delta_i (Eq. 2): W_shared is the FFN's own weight, and delta_i begins as zero, so
that every expert begins as the FFN.

N experts, D deltas of a matrix (N, or N + 1 with a universal FFN among them), [O, I] a matrix, n
values of a sparse delta, r rank, H hidden size.
"""

import math
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from upcycle_core.architectures.family import RECOMPUTED
from upcycle_core.architectures.resolve import stock_faults
from upcycle_core.backbone.write import (
    GENERATION_CONFIG,
    Plan,
    weights_type,
    write_generation_config,
    write_tensors,
)
from upcycle_core.checkpoints.place import place_faults
from upcycle_core.checkpoints.tokenizer import copy_tokenizer, tokenizer_files
from upcycle_core.checkpoints.writer import sync_directory, sync_file, write_json
from upcycle_core.corpora.chat_end import name_chat_end
from upcycle_core.ders.codec import drawn_places, stored_codec
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.files import ARCHITECTURE, write_checksums, write_code
from upcycle_core.ders.model.configuration_ders import DersConfig
from upcycle_core.ders.source import DenseSource, dense_config
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.moe.random import keyed_generator, random_routers
from upcycle_core.progress import Progress

_FFN = re.compile(r"layers\.(\d+)\.mlp\.(\w+)\.(weight|bias)")
_PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    GENERATION_CONFIG,
)


def write_ders_upcycling(
    model: Path,
    out: Path,
    *,
    config: DersUpcyclingConfig,
    experts: int,
    top_k: int,
    seed: int,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Write the model that DeRS upcycling trains from.

    Sparse deltas have n = round((1 - p) O I) values, zero at first, at places drawn without
    replacement and fixed from here on (Eq. 6). Low-rank deltas are b a with b zero and a drawn from
    N(0, 1 / r) ("A randomly initialised"): then E[a^T a] = 1, and the first step of gradient
    descent on b moves W_i as a step on W_i itself would, in the mean. LoRA's draw, of variance
    1 / (3 I), would move it 3 I / r times less at the learning rate that the shared base has.
    Routers are N(0, 0.02^2). A universal FFN begins as the FFN too.

    With ``combine: normalised`` the logits are the dense model's; with ``sum`` the output of an FFN
    is scaled by the sum of the k probabilities (plus one, beside a universal FFN).

    A LLaVA's language model is upcycled in place: its ``text_config`` becomes a ``DersConfig``.
    ``LlavaForConditionalGeneration`` loads it once ``upcycle_core.ders.model`` is imported.

    Args:
        model: A dense checkpoint, or a LLaVA of one; all but its FFNs is taken over as it is.
        out: The directory that is written, with the code of the architecture.
        config: Codec, layers, universal FFN, how outputs are combined.
        experts: N.
        top_k: k, experts a token passes through.
        seed: Decides places, draws and routers.
        max_shard_bytes, progress: As for ``write_model``.

    Raises:
        InputError: p outside [0, 1), a rank above the matrices, N < 2, k > N, a model that is not
            supported, whose tensors do not fit it, or a LLaVA with a tied head.
    """
    faults = [*_setting_faults(config, experts, top_k), *place_faults(out, model)]
    source = DenseSource.open(model, faults)
    upcycled = ders_config(source.dense, config, experts=experts, top_k=top_k)
    raise_faults(source.faults())
    plan = _plan(source, upcycled, seed)
    out.mkdir(parents=True, exist_ok=True)
    _copy_files(source, out)
    write_code(out)
    write_tensors(out, plan, max_shard_bytes=max_shard_bytes, what="upcycling", progress=progress)
    write_json(out / "config.json", _config_json(source, upcycled))
    write_checksums(out)


def ders_config(
    dense: Mapping[str, Any], config: DersUpcyclingConfig, *, experts: int, top_k: int
) -> DersConfig:
    """The configuration of a dense model that is upcycled.

    Args:
        dense: The content of its config.json.
        config, experts, top_k: As for ``write_ders_upcycling``.

    Raises:
        InputError: As there, and a configuration that its own class refuses.
    """
    faults = [*_setting_faults(config, experts, top_k), *stock_faults(dense, "model.config")]
    raise_faults(faults)
    shape = dense_config(dense)
    largest = min(shape.hidden_size, shape.intermediate_size)
    if config.rank is not None and config.rank > largest:
        remedy = f"above the matrices, {shape.hidden_size} by {shape.intermediate_size}; "
        raise InputError(Fault("ders.rank", config.rank, f"{remedy}use at most {largest}"))
    how = {"drop_rate": config.drop_rate} if config.codec == "sparse" else {"rank": config.rank}
    return DersConfig(
        dense=shape,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_layers=moe_layers(config.layers, shape.num_hidden_layers),
        universal=config.universal,
        combine=config.combine,
        delta={"codec": config.codec, **how},
    )


def moe_layers(layers: Literal["all", "every-other"], count: int) -> list[int]:
    """Which of ``count`` layers become Mixtures-of-Experts: all, or 0, 2, 4, ..."""
    return list(range(0, count, 1 if layers == "all" else 2))


def _setting_faults(config: DersUpcyclingConfig, experts: int, top_k: int) -> list[Fault]:
    faults = config.faults("ders")
    if experts < 2:
        faults.append(Fault("experts", experts, "must be 2 or more"))
    elif not 1 <= top_k <= experts:
        remedy = f"choose 1 to {experts}, the number of experts"
        faults.append(Fault("top_k", top_k, remedy))
    return faults


def _plan(source: DenseSource, config: DersConfig, seed: int) -> Plan:
    """Every tensor of the upcycled model, in the order of the dense model's names."""
    routers = random_routers(
        len(config.moe_layers), config.hidden_size, config.num_experts, seed=seed
    )
    router_of = dict(zip(config.moe_layers, routers.values(), strict=True))
    plan: Plan = {}
    for name, info in source.reader.tensors.items():
        stem, read = source.stem(name), partial(source.reader.tensor, name)
        if RECOMPUTED.fullmatch(name):
            continue
        if stem is None:
            plan[name] = info.shape, info.dtype, read
            continue
        match = _FFN.fullmatch(stem)
        if match is None or int(match[1]) not in router_of:
            plan[f"{source.prefix}decoder.{stem}"] = info.shape, info.dtype, read
            continue
        layer, matrix, kind = int(match[1]), match[2], match[3]
        mlp = f"{source.prefix}decoder.layers.{layer}.mlp"
        router_HN = router_of[layer]
        shape = tuple(router_HN.T.shape)
        plan[f"{mlp}.gate.weight"] = shape, info.dtype, partial(router_HN.T.to, info.dtype)
        if kind == "weight":
            plan[f"{mlp}.base.{matrix}.weight"] = info.shape, info.dtype, read
        if config.universal == "own":
            plan[f"{mlp}.universal.{matrix}.{kind}"] = info.shape, info.dtype, read
        experts = f"{mlp}.experts.{matrix}"
        if kind == "bias":
            shape = (config.deltas, *info.shape)
            plan[f"{experts}.bias"] = shape, info.dtype, partial(_repeated, read, config.deltas)
        else:
            key = (seed, layer, matrix)
            for part, entry in _deltas(config, info.shape, info.dtype, key).items():
                plan[f"{experts}.{part}"] = entry
    return plan


def _deltas(
    config: DersConfig, shape: tuple[int, ...], dtype: torch.dtype, key: tuple[int, int, str]
) -> Plan:
    """Tensors of the D deltas, all zero, of a matrix of ``shape`` [O, I]."""
    codec, plan = stored_codec(config.delta, *key[1:]), Plan()
    layout = codec.layout(config.deltas, (shape[0], shape[1]), dtype)
    for part, (sizes, kind) in sorted(layout.items()):
        drawn = {
            "indices": partial(_places, sizes, math.prod(shape), key, kind),
            "a": partial(_draws, sizes, key, dtype),
        }
        plan[part] = sizes, kind, drawn.get(part) or partial(torch.zeros, sizes, dtype=kind)
    return plan


def _places(
    shape: tuple[int, ...], size: int, key: tuple[int, int, str], dtype: torch.dtype
) -> torch.Tensor:
    """n of the places 0 .. size - 1 for each of D deltas, ascending: [D, n]."""
    count, kept = shape
    return torch.stack([drawn_places(size, kept, (*key, d)) for d in range(count)]).to(dtype)


def _draws(shape: tuple[int, ...], key: tuple[int, int, str], dtype: torch.dtype) -> torch.Tensor:
    """a [D, r, I] of N(0, 1 / r)."""
    count, rank, inputs = shape
    drawn = [torch.randn(rank, inputs, generator=keyed_generator(*key, d)) for d in range(count)]
    return (torch.stack(drawn) / rank**0.5).to(dtype)


def _repeated(read: Callable[[], torch.Tensor], count: int) -> torch.Tensor:
    return read().repeat(count, 1)


def _config_json(source: DenseSource, config: DersConfig) -> dict[str, Any]:
    """The content of config.json."""
    content = config.to_dict()
    if source.is_llava:
        return {**source.reader.config, "text_config": content}
    dtype = str(weights_type(source.reader)).removeprefix("torch.")
    # Tokenizer loading branches on the version, and the tokenizer is the dense model's own.
    version = source.reader.config.get("transformers_version")
    return content | ARCHITECTURE | {"dtype": dtype, "transformers_version": version}


def _copy_files(source: DenseSource, out: Path) -> None:
    """Tokenizer, generation configuration, and the processor of a LLaVA, what it has of these."""
    if not source.is_llava:
        copy_tokenizer(source.reader.directory, out)
        write_generation_config(source.reader, out)
        name_chat_end(out)
        return
    directory = source.reader.directory
    for name in (*tokenizer_files(directory), *map(Path, _PROCESSOR)):
        if (directory / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(directory / name, out / name)
            sync_file(out / name)
    sync_directory(out)
