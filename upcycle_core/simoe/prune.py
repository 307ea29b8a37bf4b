"""Pruning after training: input neurons that no expert uses are cut out of the deltas.

M experts, I inputs, O outputs, n inputs that are left.
"""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.checkpoints.place import new_directory, place_faults
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.checkpoints.writer import sync_file
from upcycle_core.corpora.chat_end import name_chat_end
from upcycle_core.errors import raise_faults
from upcycle_core.simoe.model import (
    SimoeForCausalLM,
    SimoeForConditionalGeneration,
    gated_modules,
)
from upcycle_core.simoe.model.layers_simoe import SimoeLinear, SimoeNorm

MAX_SHARD_BYTES = 5_000_000_000
Model = SimoeForCausalLM | SimoeForConditionalGeneration


@torch.no_grad()
def prune(model: Model) -> Model:
    """A model that computes the same with what its experts use.

    An input neuron stays if any expert's mask is not zero there; with a gate a parameter, if any
    gate of its column is not.

    Args:
        model: As it was trained; it stays as it is. One that is pruned is returned.

    Returns:
        The pruned model, in evaluation mode, on the same device; it shares no memory with
        ``model``. Masks are numbers now, no longer trained.
    """
    return _pruned(model, [], delta_of)


def _pruned(
    model: Model, shared: Iterable[Tensor], delta: Callable[[SimoeLinear | SimoeNorm], Tensor]
) -> Model:
    """The same, which shares some tensors with ``model``; ``delta`` is ``delta_of``, or asked
    elsewhere for a module's."""
    if model.config.kept is not None:
        return model
    modules = gated_modules(model)
    replaced = [tensor for module in modules.values() for tensor in (module.delta, module.log_phi)]
    kept = {id(tensor): tensor for tensor in (*replaced, *shared)}
    pruned = copy.deepcopy(model, kept)  # but for those
    pruned.config.kept = {}
    for name, module in modules.items():
        masks = module.masks().float()
        index = used_inputs(masks)
        pruned.config.kept[name] = len(index)
        base = pruned.get_submodule(name).base
        small = type(module)(base, pruned.config, pruned.mixture, len(index))
        small.delta = nn.Parameter(delta(module).index_select(-1, index).clone())
        small.index = index.to(torch.int32)
        small.mask = masks.index_select(-1, index)
        pruned.set_submodule(name, small)
    pruned.freeze()
    return pruned.eval()


def used_inputs(masks: Tensor) -> Tensor:
    """Inputs [n] int64, ascending, that any expert uses; masks [M, I] or [M, O, I]."""
    return (masks != 0).flatten(0, -2).any(dim=0).nonzero()[:, 0]


def delta_of(module: SimoeLinear | SimoeNorm) -> Tensor:
    """theta_delta, [O, I] also where the pre-trained layer is transposed; [I] of a norm."""
    return module.delta.T if getattr(module, "is_transposed", False) else module.delta


def save_pruned(
    model: Model,
    source: Path,
    out: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    delta: Callable[[SimoeLinear | SimoeNorm], Tensor] = delta_of,
) -> None:
    """Write a model that loads with ``AutoModelForCausalLM`` (or ``AutoModelForSeq2SeqLM``).

    ``out`` appears when complete: weights in the model's type, configuration, the code of the
    architecture, tokenizer, checksums.

    Args:
        model: Is pruned if it is not yet.
        source: The dense checkpoint, for its tokenizer.
        out: The directory that is written; not there, or empty.
        max_shard_bytes: Size of one safetensors file.
        delta: What says a module's delta, asked once for each in the model's order.

    Raises:
        InputError: ``out`` holds something or lies in ``source``, or ``source`` has no tokenizer.
    """
    source, out = Path(source), Path(out)
    raise_faults(place_faults(out, source))
    with new_directory(out) as folder:
        copy_tokenizer(source, folder)
        with quiet_loading(), torch.no_grad():
            pruned = _pruned(model, model.parameters(), delta)  # nothing is copied but deltas
            pruned.save_pretrained(folder, max_shard_size=max_shard_bytes)
        name_chat_end(folder)
        for path in folder.iterdir():
            if path.is_file():  # a folder of templates is copied to the disk
                sync_file(path)
