"""Weights, gradients and moments of a training divided among its workers: FSDP2.

``fully_shard`` is called here, on every decoder layer and on what stands beside them, because
neither of transformers' own ways will do: accelerate's plugin knows GPUs alone (on gloo it is left
out in silence), and a model that ``from_pretrained(distributed_config=...)`` divides cannot be
resumed, which the Trainer refuses.

V vocabulary, H hidden size, W workers.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from upcycle_core.allocator import return_large_blocks
from upcycle_core.errors import Fault
from upcycle_core.training import vocabulary, workers
from upcycle_core.training.groups import keep_up_matrices
from upcycle_core.training.head import is_sliced

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARDS = "shards"
"""Folder of a checkpoint that workers wrote together."""
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"
"""Of a checkpoint that one worker wrote."""
NUMBERS = "groups.json"
FILE_BYTES = 1 << 26
"""Bytes, of all workers together, after which another file begins."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_WHOLE = StateDictOptions(full_state_dict=True)


def sharding_faults(shape: Any, field: str = "sharding") -> Iterator[Fault]:
    """Why a model of configuration ``shape`` cannot be divided among these workers.

    No weight is read: the model is made of tensors without memory.
    """
    if workers.count() == 1:
        remedy = "one worker has all there is; give it 2 workers or more, or sharding: none"
        yield Fault(field, "full", remedy)
        return
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
    if not _layers(network):
        remedy = f"{type(network).__name__} has no list of decoder layers to divide; use none"
        yield Fault(field, "full", remedy)
    is_stock = type(network).save_pretrained is transformers.PreTrainedModel.save_pretrained
    if not (is_stock or hasattr(network, "write_beside")):
        remedy = f"{type(network).__name__} writes itself whole, with its code; use none"
        yield Fault(field, "full", remedy)


def shard(
    network: "PreTrainedModel",
    kind: Callable[[nn.Parameter], torch.dtype],
    *,
    halves: frozenset[str],
    device: str,
    whole: frozenset[str] = frozenset(),
) -> None:
    """Leave each worker 1 / W of every parameter, see ``workers.divided_dimension``; in place.

    Layer by layer: what a worker holds whole of a model that its file maps is one layer. Each layer
    is gathered when it computes, and freed again. Embedding and head are never gathered within
    ``sliced_head``, see ``vocabulary``; elsewhere they have groups of their own, or one together
    where they are tied: then it stays gathered from the first layer to the last.

    Args:
        network: On the CPU; frozen where it is to be. Its parameters become others of their names.
        kind: The type that each gets.
        halves: Fused experts of which the gate matrices alone are trained.
        device: Where shards go: "cpu" or "cuda".
        whole: Small parameters that each worker has whole; the HF Trainer averages gradients of
            such.
    """
    return_large_blocks()
    mesh = init_device_mesh(device, (workers.count(),))
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else device
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    apart = {p for name, p in network.named_parameters() if name in whole}
    ends: set[nn.Parameter] = set()
    if is_sliced(network) and vocabulary.can_divide(network):
        for module in (embedding, head):
            _convert(module, kind, place)
        ends = vocabulary.divide(network, mesh)
    divide = partial(
        fully_shard, mesh=mesh, ignored_params=ends | apart, shard_placement_fn=_placement
    )
    for module in (*_layers(network), *([] if is_tied or ends else [embedding])):
        _convert(module, kind, place)
        divide(module)
    if head is not None and not (is_tied or ends):
        _convert(head, kind, place)
        # The loss needs it after its own forward pass, see head.sliced_head.
        divide(head, reshard_after_forward=False)
    _convert(network, kind, place)
    divide(network)
    keep_up_matrices(network, halves)


def _placement(parameter: nn.Parameter) -> Shard:
    return Shard(workers.divided_dimension(parameter.shape, workers.count()))


def free(network: nn.Module) -> None:
    """Give back what a forward pass without a backward pass left gathered."""
    for module in network.modules():  # a head may have a group of its own
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathering(network: nn.Module, method: str) -> Iterator[None]:
    """Let ``method`` of a network that is divided gather weights as its forward pass does."""
    if not is_sharded(network):
        yield
        return
    register_fsdp_forward_method(network, method)
    try:
        yield
    finally:
        delattr(network, method)
        free(network)


def gradient_norm(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of all gradients, whether workers hold parts of them or not; all must ask."""
    norms = [
        workers.whole(nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]))
        for part in _alike(parameters)
    ]
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float, norm: torch.Tensor) -> None:
    """Scale gradients of Euclidean norm ``norm`` to ``limit`` where that is less; in place."""
    for part in _alike(parameters):
        nn.utils.clip_grads_with_norm_(part, limit, norm)


def _alike(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that workers hold parts of and those that they have whole: no call takes both."""
    parts: list[list[nn.Parameter]] = [[], []]
    for parameter in parameters:
        parts[isinstance(parameter, DTensor)].append(parameter)
    return [part for part in parts if part]


def is_sharded(network: nn.Module) -> bool:
    """Whether ``network`` is divided among workers."""
    return isinstance(network, FSDPModule)


def save_shards(network: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Write weights and moments into a checkpoint; every worker writes what it holds."""
    tensors, numbers = _parted(_optimizer_state(network, optimizer))
    shards = directory / SHARDS
    # Safetensors: the metadata of torch's own format is a pickle, which may run code when read.
    state = _weights(network) | tensors
    writer = HuggingFaceStorageWriter(
        str(shards), fqn_to_index_mapping=_files(state), save_distributed=True
    )
    checkpoint.save(state, storage_writer=writer)
    if workers.rank() == 0:
        (shards / NUMBERS).write_text(json.dumps(numbers))


def load_weights(network: nn.Module, directory: Path) -> None:
    """Fill ``network`` from a checkpoint, whatever number of workers wrote it.

    Either may be divided or whole; every tensor must find its place.
    """
    if (directory / SHARDS).is_dir():
        _read(_weights(network), directory)
    elif is_sharded(network):
        _divide(directory / WEIGHTS, network)
    else:
        load_model(network, directory / WEIGHTS, strict=True)


def load_moments(network: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Fill ``optimizer`` likewise."""
    if (directory / SHARDS).is_dir():
        tensors, _ = _parted(_optimizer_state(network, optimizer))
        _read(tensors, directory)
        numbers = json.loads((directory / SHARDS / NUMBERS).read_text())
        set_optimizer_state_dict(network, optimizer, tensors | numbers, options=_FLAT)
        return
    # Mapped where it will be divided or is for a GPU, so that nobody's memory holds all of it. On a
    # CPU the optimizer would keep the mapping, and some network disks delete no mapped file.
    is_copied = is_sharded(network) or next(network.parameters()).device.type != "cpu"
    found = torch.load(directory / OPTIMIZER, map_location="cpu", weights_only=True, mmap=is_copied)
    if not is_sharded(network):
        optimizer.load_state_dict(found)
        return
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    own = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    named: dict[str, Any] = {
        "state": {own[number]: state for number, state in found["state"].items()},
        "param_groups": [
            {**group, "params": [own[number] for number in group["params"]]}
            for group in found["param_groups"]
        ],
    }
    set_optimizer_state_dict(network, optimizer, named, options=_WHOLE)


def _read(state: dict[str, Any], directory: Path) -> None:
    reader = HuggingFaceStorageReader(str(directory / SHARDS))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one worker is enough
        checkpoint.load(state, storage_reader=reader, no_dist=workers.count() == 1)


def _parted(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Moments, and what JSON holds: learning rates and the like, parameter by parameter."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def _files(state: dict[str, Any]) -> dict[str, int]:
    """Number of the file of each tensor: a file is made in memory before it is written."""
    number, size, numbers = 1, 0, {}
    for name, tensor in state.items():
        if size > FILE_BYTES:
            number, size = number + 1, 0
        size += tensor.numel() * tensor.element_size()
        numbers[name] = number
    return numbers


def _optimizer_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(network, optimizer, options=_FLAT)


def _weights(network: nn.Module) -> dict[str, Any]:
    """Parameters and buffers that a checkpoint holds; the network's own, tied ones once."""
    first = {name for name, _ in network.named_parameters()}
    again = {name for name, _ in network.named_parameters(remove_duplicate=False)} - first
    state = get_model_state_dict(network)
    return {name: value for name, value in state.items() if name not in again}


@torch.no_grad()
def _divide(file: Path, network: nn.Module) -> None:
    """Fill a divided network from whole tensors, one after the other."""
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    synonyms = {group[0]: group for group in names.values()}
    with safe_open(file, "pt") as tensors:
        there = set(tensors.keys())
        for name, own in _weights(network).items():
            (found,) = there & set(synonyms.get(name, [name]))
            value = tensors.get_tensor(found)
            if isinstance(own, DTensor):
                # Each worker cuts its part out of what it reads; nothing is sent.
                value = distribute_tensor(
                    value.to(own.device), own.device_mesh, own.placements, src_data_rank=None
                )
            own.copy_(value)


def _layers(network: "PreTrainedModel") -> list[nn.Module]:
    """The decoder layers; [] where there is no list as long as the configuration says."""
    count = network.config.get_text_config().num_hidden_layers
    lists = (m for m in network.base_model.modules() if isinstance(m, nn.ModuleList))
    return next((list(found) for found in lists if len(found) == count), [])


@torch.no_grad()
def _convert(module: nn.Module, kind: Callable[[nn.Parameter], torch.dtype], place: Any) -> None:
    """Give what is not divided yet its type and place."""
    for parameter in module.parameters():
        if not hasattr(parameter, "device_mesh"):
            is_number = parameter.is_floating_point()
            dtype = kind(parameter) if is_number else parameter.dtype
            parameter.data = parameter.data.to(place, dtype).contiguous()
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(place))
