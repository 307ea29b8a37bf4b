"""A model whose layers several GPUs hold among them, and compute one after the other."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from upcycle_core.errors import Fault, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AUTO = "auto"
"""The device that is every GPU which this process sees, as in accelerate's device maps."""
SHARE = 0.92
"""Of a GPU's free memory, what weights may take: keys and values, activations and the logits of a
batch lie beside them."""


def entrance(device: str) -> str:
    """The one device that a model is given its input on; of several GPUs the first."""
    return "cuda:0" if device == AUTO else device


def gpu_rooms() -> dict[str, int]:
    """{GPU: bytes that weights may take there}, of all that this process sees."""
    seen = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return {device: int(SHARE * torch.cuda.mem_get_info(device)[0]) for device in seen}


def places(model: "PreTrainedModel", rooms: Mapping[str, int]) -> dict[str, str]:
    """{module: its device}, about as many bytes on each; no decoder layer is divided itself.

    Args:
        model: A whole model.
        rooms: {device: bytes that weights may take there}, in the layers' order.

    Raises:
        InputError: It does not fit.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes, get_balanced_memory

    whole: Any = list(model._no_split_modules or ())
    balanced = get_balanced_memory(model, dict(enumerate(rooms.values())), whole)
    found = infer_auto_device_map(model, balanced, whole)
    if not all(isinstance(place, int) for place in found.values()):
        size = compute_module_sizes(model)[""]
        remedy = f"{len(rooms)} GPUs have room for {sum(rooms.values()) / 1e9:,.1f} GB of weights, "
        remedy += f"whole layers on each, and it has {size / 1e9:,.1f}; reserve more"
        raise InputError(Fault("model", type(model).__name__, remedy))
    names = list(rooms)
    return {module: names[place] for module, place in found.items()}


def divide(model: "PreTrainedModel", rooms: Mapping[str, int]) -> "PreTrainedModel":
    """Put a model's layers on several devices, see ``places``.

    accelerate's hooks take a layer's input to where its weights are; what the model gives is where
    its input was. Of one device all of it is there.

    Returns:
        The model itself; ``hf_device_map`` says what is where.

    Raises:
        InputError: It does not fit.
    """
    from accelerate import dispatch_model

    return dispatch_model(
        model,
        places(model, rooms),
        main_device=torch.device(next(iter(rooms))),  # or the first of a set
        skip_keys=model._skip_keys_device_placement,
        force_hooks=True,
    )
