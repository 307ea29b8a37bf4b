"""SIMoE upcycling (arXiv 2506.12597): a dense model whose layers may grow experts, to train."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel

from upcycle_core.checkpoints.load import (
    check_loading,
    load_causal_lm,
    quiet_loading,
    stored_type,
)
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.moe.random import keyed_generator
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import (
    SimoeConfig,
    SimoeForCausalLM,
    SimoeForConditionalGeneration,
    gated_modules,
)
from upcycle_core.simoe.model.gates_simoe import draw_log_phi, median
from upcycle_core.simoe.model.layers_simoe import SimoeLinear, put_experts
from upcycle_core.simoe.model.routing_simoe import ROUTER_STD
from upcycle_core.training.config import Sharding


def upcycle_in_memory(
    dense: Path,
    config: SimoeUpcyclingConfig,
    *,
    seed: int,
    device: str = "cpu",
    tasks: Sequence[str] = (),
    divided: Sharding = "none",
) -> SimoeForCausalLM | SimoeForConditionalGeneration:
    """Give every linear layer and norm of a dense model experts whose deltas are zero.

    The logits are the dense model's. Random numbers of a layer depend on ``seed`` and on the
    layer's name alone.

    Args:
        dense: A checkpoint of a causal language model of any family, or of a T5.
        config: Experts, masks, layers, routing.
        seed: Decides log phi and the router.
        device: Where the model goes.
        tasks: Names of the tasks, where routing goes by task.
        divided: With ``full`` what was pre-trained is in the type of its file, and deltas take no
            memory yet: ``training.sharding.shard`` makes them what they are to be.

    Returns:
        The model, fp32, in evaluation mode. Deltas, masks and the router have gradients; all that
        was pre-trained has none.

    Raises:
        InputError: Settings that contradict one another or fit no layer; a checkpoint that its
            configuration does not fit.
    """
    raise_faults(config.faults("simoe"))
    source = _load_dense(Path(dense), divided)
    source.config.name_or_path = ""  # a place of this machine, which config.json would tell
    try:
        settings = simoe_config(source.config, config, tasks=tasks)
        model = _around(source, settings)
    except ValueError as error:
        raise InputError(Fault("simoe", str(dense), str(error))) from error
    for name, module in gated_modules(model).items():
        if divided == "full":
            module.delta = nn.Parameter(torch.zeros(()).expand(module.delta.shape))
        drawn = draw_log_phi(
            tuple(module.log_phi.shape), config.initial_spread, keyed_generator(seed, name)
        )
        _fill(module.log_phi, median(drawn) if module.is_real else drawn)
    for name, parameter in model.router.named_parameters():
        if not name.endswith("bias"):
            drawn = torch.randn(parameter.shape, generator=keyed_generator(seed, "router", name))
            _fill(parameter, ROUTER_STD * drawn)
    model.freeze()
    return model.to(device if divided == "none" else "cpu").eval()


def _around(source: PreTrainedModel, settings: SimoeConfig) -> Any:
    """The model whose dense one is ``source`` itself: there is no other copy of its weights."""
    kind = SimoeForConditionalGeneration if settings.is_encoder_decoder else SimoeForCausalLM
    with torch.device("meta"):
        model: Any = kind(settings)
    put_experts(source, settings, model.mixture, "model.")
    model.model, model.generation_config = source, source.generation_config
    model.router = type(model.router)(settings)
    return model


def narrow_base(model: Any, dtype: torch.dtype) -> None:
    """Hold pre-trained linear layers in the type that they are multiplied in, which rounds them so
    at each step: every number stays what it was.

    The head stays, for the loss reads it as it is; so does an encoder-decoder, where T5 takes what
    goes into some layers to their weights' type.

    Args:
        model: Upcycled; changed in place.
        dtype: Of the training's arithmetic.
    """
    for base in bases_to_narrow(model):
        base.weight.data = base.weight.data.to(dtype)


def bases_to_narrow(model: Any) -> list[Any]:
    """What ``narrow_base`` is about."""
    return [base for _, base in _linear_bases(model)]


def restore_base(model: Any, dense: Path) -> None:
    """Put back what ``narrow_base`` has rounded, in fp32 on the CPU: to be written.

    A checkpoint of a machine that computes in bf16 holds such weights, and fp32 ones that it was
    read into are no wider: whatever bf16 can hold is put back, unless it was given in bf16.

    Args:
        model: Trained; changed in place.
        dense: What it was made from.
    """
    loses = stored_type(Path(dense)) != torch.bfloat16
    bases = [(n, base) for n, base in _linear_bases(model) if _is_narrow(base.weight, loses)]
    if bases:
        state = _load_dense(Path(dense)).state_dict()
        for name, base in bases:
            whole = state[f"{name.removeprefix('model.')}.weight"]
            base.weight = nn.Parameter(whole, requires_grad=False)


def _is_narrow(weight: Tensor, loses: bool) -> bool:
    """Whether a weight is of another type than fp32, or, where rounding ``loses``, was rounded."""
    if weight.dtype != torch.float32:
        return True
    return loses and torch.equal(weight, weight.bfloat16().float())


def _linear_bases(model: Any) -> Iterator[tuple[str, Any]]:
    """The pre-trained linear layers with experts, but the head, by their modules' names; none of an
    encoder-decoder."""
    modules = {} if model.config.is_encoder_decoder else gated_modules(model)
    for name, module in modules.items():
        if isinstance(module, SimoeLinear) and module is not model.get_output_embeddings():
            yield name, module.base


def simoe_config(
    dense: PretrainedConfig | dict[str, Any],
    config: SimoeUpcyclingConfig,
    *,
    tasks: Sequence[str] = (),
) -> SimoeConfig:
    """The configuration of a dense model that is upcycled; errors are those of ``SimoeConfig``."""
    return SimoeConfig(
        dense=dense,
        num_simoe_experts=config.experts,
        layers=config.layers,
        lm_head=config.lm_head,
        masks=config.masks,
        routing=config.routing,
        router_hidden_size=config.router_hidden_size,
        tasks=list(tasks),
        initial_spread=config.initial_spread,
        standardise=config.standardise,
        reopen=config.reopen,
    )


def _fill(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def _load_dense(directory: Path, divided: Sharding = "none") -> PreTrainedModel:
    """The dense model in fp32, or, to be divided, in the type of its file; strictly."""
    CheckpointReader(directory, field="model")  # says what is wrong with the files
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if not config.is_encoder_decoder:
        kind = torch.float32 if divided == "none" else stored_type(directory)
        return load_causal_lm(directory, dtype=kind)
    with quiet_loading():
        loaded: Any = AutoModelForSeq2SeqLM.from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, info = loaded
    check_loading(model, info, str(directory))
    return model.eval()
