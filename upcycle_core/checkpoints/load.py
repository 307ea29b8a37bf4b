"""Load a whole model, strictly: every weight comes from the files, and no weight is left over."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from upcycle_core.checkpoints.divided import AUTO, divide, entrance, gpu_rooms
from upcycle_core.checkpoints.experts import register
from upcycle_core.checkpoints.fused import StockTensors
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault, InputError, raise_faults

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Types of weights by the precisions that recipes name."""
GENERATION = "generation_config.json"
TRANSFORMERS = "transformers.models."
"""Where the classes of stock models live; ours put their experts together themselves."""
_FASTEST: Mapping[tuple[str, str], Literal["eager", "grouped_mm"]] = {
    ("cpu", "fp32"): "eager",
    ("cpu", "bf16"): "eager",
}


def load_causal_lm(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    precision: Literal["fp32", "bf16"] | None = None,
    training: bool = False,
) -> "PreTrainedModel":
    """Load a checkpoint, in evaluation mode.

    Args:
        directory: A Hugging Face checkpoint of safetensors, dense or MoE.
        dtype: Type that the weights get.
        device: Where they go; ``auto`` is all GPUs that this process sees, whole layers on each.
        precision: Arithmetic that the forward pass will use, which decides how experts run; that
            of ``dtype`` by default. Say ``bf16`` where fp32 weights will run under autocast.
        training: Whether it will be trained, which decides how experts run as well.

    Raises:
        InputError: A tensor is missing, unexpected or of another shape, or a head that
            config.json calls tied is not; or the GPUs have no room for it.
    """
    directory = Path(directory)
    options: dict[str, Any] = {}
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    has_experts = hasattr(config, "num_experts_per_tok")
    if has_experts:
        precision = precision or ("bf16" if dtype == torch.bfloat16 else "fp32")
        options["experts_implementation"] = choose_experts_implementation(
            entrance(device), precision, training=training
        )
    model: Any
    info: Mapping
    if has_experts and type(config).__module__.startswith(TRANSFORMERS):
        model, info = _load_stock_moe(directory, config, dtype, options)
    else:
        with quiet_loading():
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # collected in info rather than raised one by one
                output_loading_info=True,
                **options,
            )
        model, info = loaded
    check_loading(model, info, str(directory))
    model.eval()
    return divide(model, gpu_rooms()) if device == AUTO else model.to(device)


def _load_stock_moe(
    directory: Path, config: PreTrainedConfig, dtype: torch.dtype, options: Mapping[str, Any]
) -> "tuple[PreTrainedModel, Mapping]":
    """The model, its experts put together once, and what ``output_loading_info`` said."""
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        empty = kind._from_config(config, dtype=dtype)
    reader = CheckpointReader(directory, field="checkpoint")
    stock = StockTensors(reader, empty)
    if stock.broken:
        remedy = f"experts are missing, or of another shape: {', '.join(stock.broken)}; fetch it "
        remedy += "again"
        raise InputError(Fault("checkpoint", str(directory), remedy))
    weights = {name: stock.tensor(name, dtype) for name in stock.sources}
    weights |= {name: reader.tensor(name) for name in stock.unplaced}
    with quiet_loading():
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    # What it used here: none of that which a stock checkpoint needs. Saving takes the class's own.
    model._weight_conversions = None
    model.name_or_path = model.config.name_or_path = str(directory)
    if (directory / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model, info


def stored_type(directory: Path) -> torch.dtype:
    """The type of a checkpoint's weights, or, of several, one that holds them all."""
    kinds = {info.dtype for info in CheckpointReader(directory, integers=True).tensors.values()}
    return reduce(torch.promote_types, (kind for kind in kinds if kind.is_floating_point))


def choose_experts_implementation(
    device: str | torch.device, precision: Literal["fp32", "bf16"], *, training: bool = False
) -> str:
    """The fastest way to run experts here, as transformers names it.

    Forward on a CPU ``eager`` wins (``benchmarks.moe_forward``): by a few percent in fp32, twofold
    under bf16 autocast, where ``grouped_mm`` casts its input to the type of the weights and
    multiplies in fp32. In training ``grouped_mm`` wins in both, and holds half the memory under
    bf16 (``benchmarks.training_step``). A GPU has a kernel for it, of bf16 alone: there autocast
    has to reach it, see ``experts``.

    Args:
        device: Where the model runs (``cpu``, ``cuda:0``).
        precision: Arithmetic of the forward pass; bf16 is autocast or bf16 weights.
        training: Whether there is a backward pass.
    """
    if training:
        is_cpu = torch.device(device).type == "cpu"
        return "grouped_mm" if is_cpu or precision == "fp32" else register()
    return _FASTEST.get((torch.device(device).type, precision), "grouped_mm")


def check_loading(model: "PreTrainedModel", info: Mapping, place: str) -> None:
    """Raise unless loading used every tensor of the files and filled every one of the model.

    Args:
        model: What was loaded.
        info: What ``output_loading_info`` said.
        place: How the error names the checkpoint.
    """
    faults = []
    for kind in ("missing", "unexpected", "mismatched"):
        if info[f"{kind}_keys"]:
            names = ", ".join(sorted(str(key) for key in info[f"{kind}_keys"]))
            remedy = f"{kind} tensors: {names}; config.json and weights must belong together"
            faults.append(Fault("checkpoint", place, remedy))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and model.config.tie_word_embeddings
    if tied and head.weight is not embedding.weight:
        remedy = "config.json ties lm_head to the embedding, the files hold another lm_head"
        faults.append(Fault("checkpoint", place, remedy))
    raise_faults(faults)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bar and no report of transformers inside: what they would say is raised."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
