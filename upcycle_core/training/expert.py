"""Training a dense model in part: its FFNs, or a LoRA adapter that is merged afterwards."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset

from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.backbone.write import Plan, write_model
from upcycle_core.checkpoints.load import DTYPES
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.writer import sync_directory, sync_file, write_json
from upcycle_core.errors import Fault, InputError
from upcycle_core.given.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, merge_adapter
from upcycle_core.precision import arithmetic
from upcycle_core.progress import Progress
from upcycle_core.training import workers
from upcycle_core.training.arguments import checked_shape
from upcycle_core.training.config import (
    ExpertMethod,
    ExpertTrainingConfig,
    LoraSettings,
    Sharding,
)
from upcycle_core.training.groups import Trainable
from upcycle_core.training.resume import training_record
from upcycle_core.training.trainer import (
    Subject,
    TrainingResult,
    load_to_train,
    train,
    train_subject,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 5_000_000_000
ADAPTER = "adapter"
"""Folder of the adapter beside the merged weights."""


def train_expert(
    model: Path,
    dataset: Dataset,
    out: Path,
    *,
    config: ExpertTrainingConfig,
    seed: int,
    checkpoints: Path,
    progress: Progress,
    device: str | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    divided: Sharding = "none",
) -> TrainingResult:
    """Train a dense model by ``config.method``, as ``train`` does; only what is trained has
    gradients and moments.

    Args:
        model, dataset, seed, checkpoints, progress, device, fingerprint, divided: As for ``train``.
        out: Directory to write: all weights, in fp32 or, merged with the adapter, in ``model``'s
            type; with ``lora`` also ``adapter/``, as peft reads it.
        config: What to do. With ``lora`` and bf16 arithmetic the frozen weights are bf16 too; what
            is trained is fp32.

    Raises:
        InputError: As ``train``; no layer has the name of a LoRA module.
        FloatingPointError: As ``train``.
    """
    common: dict[str, Any] = {
        "config": config,
        "seed": seed,
        "checkpoints": checkpoints,
        "progress": progress,
        "device": device,
        "divided": divided,
    }
    if config.method == "full":
        return train(model, dataset, out, fingerprint=fingerprint, **common)
    shape = checked_shape(model, dataset, None, config, None, divided=divided)

    def load(device: str) -> Subject:
        lora = config.method == "lora"
        frozen = DTYPES[arithmetic(config.precision, device)]
        network = load_to_train(model, frozen if lora else torch.float32, config, device, divided)
        if lora:
            tuned = add_adapter(network, config.lora or LoraSettings(), seed=seed)
            write = partial(_write_merged, tuned, model, out)
        else:
            freeze_others(network, config.method, None if divided == "full" else frozen)
            write = partial(_write_trained, network, model, out)
        kind = partial(_kind, frozen, with_norms=lora)
        return Subject(network, _trainable(network), write, kind=kind)

    record = training_record(config, seed, None, fingerprint or {})
    return train_subject(load, dataset, shape=shape, record=record, **common)


def add_adapter(network: "PreTrainedModel", settings: LoraSettings, *, seed: int) -> nn.Module:
    """Put a new LoRA adapter into ``network``, which is changed in place and frozen beside it.

    Args:
        network: Freshly loaded.
        settings: Rank, scaling, layers.
        seed: Of A; B is zero. The caller's random state is left as it was.

    Returns:
        peft's model around it.

    Raises:
        InputError: No layer has one of the names.
    """
    from peft import LoraConfig, get_peft_model  # slow to import

    names = {name.rpartition(".")[2] for name, m in network.named_modules() if _is_linear(m)}
    # As peft reads them: self_attn.q_proj as well.
    unknown = sorted(name for name in settings.modules if name.rpartition(".")[2] not in names)
    if unknown:
        remedy = f"no linear layer is called so; choose among {', '.join(sorted(names))}"
        raise InputError(Fault("experts.training.lora.modules", unknown, remedy))
    wanted = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a factor, whole or not
        target_modules=sorted(settings.modules),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(network, wanted)  # A and B in fp32, whatever the network is in


def _kind(frozen: torch.dtype, parameter: nn.Parameter, *, with_norms: bool) -> torch.dtype:
    """The type of a parameter: fp32 if it is trained, or a norm beside layers that are."""
    is_kept = parameter.requires_grad or not (with_norms or parameter.dim() > 1)
    return torch.float32 if is_kept else frozen


def freeze_others(
    network: "PreTrainedModel", method: ExpertMethod, frozen: torch.dtype | None
) -> None:
    """Train the FFNs or all layers, in fp32; the rest needs no gradient, and no more digits than
    arithmetic has.

    Norms stay in fp32: they are small.
    """
    family = family_of(network.config.to_dict())
    for name, parameter in network.named_parameters():
        is_trained = family.is_ffn(name) if method == "ffn" else name not in (EMBEDDING, LM_HEAD)
        parameter.requires_grad_(is_trained)
        if frozen is not None and not is_trained and parameter.dim() > 1:
            parameter.data = parameter.data.to(frozen)


def _write_trained(network: "PreTrainedModel", source: Path, out: Path) -> None:
    """Write what was trained and all else of ``source`` to the bit, in fp32."""
    reader = CheckpointReader(source)
    config = {**reader.config, "dtype": "float32", "torch_dtype": "float32"}
    family = family_of(config)
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}

    def produce(name: str) -> torch.Tensor:
        found = trained.get(name)
        return reader.tensor(name).float() if found is None else workers.whole(found.detach()).cpu()

    plan: Plan = {
        name: (shape, torch.float32, partial(produce, name))
        for name, shape in family.tensors(config).items()
    }
    if workers.rank() == 0:
        write_model(out, plan, config, source=reader, max_shard_bytes=SHARD_BYTES)
    else:
        for name in (name for name in plan if name in trained):  # in worker 0's order
            produce(name)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _trainable(network: nn.Module) -> Trainable:
    sizes = [(p.numel(), p.requires_grad) for p in network.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    return Trainable(trained, sum(size for size, _ in sizes), frozenset())


def _write_merged(tuned: Any, source: Path, out: Path) -> None:
    """Write the adapter, and what it makes of the checkpoint that it was trained on."""
    from peft import get_peft_model_state_dict

    # Else a head with an adapter comes along as it was trained beside: frozen, and rounded.
    state = get_peft_model_state_dict(tuned, save_embedding_layers=False)
    tensors = {n: workers.whole(t.detach()).cpu().contiguous() for n, t in state.items()}
    if workers.rank() != 0:
        return
    folder = out / ADAPTER
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER_WEIGHTS).chmod(0o644)
    sync_file(folder / ADAPTER_WEIGHTS)
    settings = tuned.peft_config["default"].to_dict() | {"base_model_name_or_path": None}
    settings |= {"inference_mode": True, "target_modules": sorted(settings["target_modules"])}
    write_json(folder / ADAPTER_CONFIG, settings)
    sync_directory(folder)
    merge_adapter(Adapter(folder), source, out)
