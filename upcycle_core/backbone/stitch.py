"""A dense model from two checkpoints: the shared backbone with one expert's FFNs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import LM_HEAD, Family
from upcycle_core.architectures.headers import tensor_faults
from upcycle_core.architectures.resolve import with_vocabulary_of
from upcycle_core.backbone.write import weights_type
from upcycle_core.checkpoints.load import check_loading, quiet_loading
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import raise_faults

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def stitched_reader(
    family: Family, own: CheckpointReader, shared: CheckpointReader
) -> Callable[[str], Tensor]:
    """Tensors of the backbone with an expert's FFNs, by name, in the backbone's type."""
    dtype = weights_type(shared)
    return lambda name: (own if family.is_ffn(name) else shared).tensor(name).to(dtype)


def open_stitched(backbone: Path, expert: Path) -> tuple[CheckpointReader, CheckpointReader]:
    """The readers of a backbone and of an expert that fits it.

    Raises:
        InputError: A tensor is missing, misshapen or has no place in either.
    """
    shared = CheckpointReader(backbone, field="backbone")
    own = CheckpointReader(expert, field="expert")
    family = family_of(shared.config)
    faults = tensor_faults(shared, family, "backbone", ffn=False)
    fitting = with_vocabulary_of(shared.config, own.config)
    raise_faults(faults + tensor_faults(own, family, "expert", config=fitting))
    return shared, own


def load_stitched(
    backbone: Path,
    expert: Path,
    *,
    headless: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> "PreTrainedModel":
    """Load the backbone with the FFNs of one expert, in evaluation mode.

    This is the model that each token of an expert's domain meets in the statistics pass, and the
    MoE computes the same when that expert is forced.

    Args:
        backbone: What ``write_backbone`` wrote.
        expert: A dense checkpoint of the same architecture; its vocabulary may be another.
        headless: Load the base model alone, without lm_head.
        dtype: Type that the weights get.
        device: Where they go.

    Raises:
        InputError: A tensor is missing, misshapen or has no place in either.
    """
    shared, own = open_stitched(backbone, expert)
    family = family_of(shared.config)
    expected, read = family.tensors(shared.config), stitched_reader(family, own, shared)
    weights = {name: read(name) for name in expected if not (headless and name == LM_HEAD)}
    config = AutoConfig.from_pretrained(backbone, local_files_only=True, trust_remote_code=False)
    classes = transformers.MODEL_MAPPING if headless else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    with quiet_loading():
        kind: Any = classes[type(config)]
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    check_loading(model, info, str(expert))
    return model.to(device).eval()
