"""The dense model that is upcycled, alone or as the language model of a LLaVA."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from upcycle_core.architectures.families import FAMILIES
from upcycle_core.architectures.family import LM_HEAD
from upcycle_core.architectures.headers import surplus_fault
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.ders.files import tensor_faults, type_faults
from upcycle_core.errors import Fault, InputError, raise_faults

DENSE = (*FAMILIES, "phi", "stablelm")
"""Dense families whose FFNs become experts. The dense model stays as it is in the result, so no
stock MoE has to be able to express it."""
LLAVA = "llava"
_TEXT = ("model.", "language_model.model.", "model.language_model.")
"""What names of the language model's tensors begin with: alone, in a LLaVA as transformers saves
it, and in one as it is in memory."""


def dense_config(dense: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration object of a config.json's content."""
    return CONFIG_MAPPING[dense["model_type"]].from_dict(copy.deepcopy(dict(dense)))


@dataclass(frozen=True)
class DenseSource:
    """The dense model, alone or in a LLaVA.

    Args:
        reader: The checkpoint.
        dense: The content of the dense model's config.json.
        prefix: What names of its tensors begin with.
    """

    reader: CheckpointReader
    dense: Mapping[str, Any]
    prefix: str

    @classmethod
    def open(cls, model: Path, faults: list[Fault]) -> "DenseSource":
        """Read configuration and headers; ``faults`` were found before and are raised as well."""
        try:
            reader = CheckpointReader(model, field="model")
        except InputError as error:
            raise InputError(*faults, *error.faults) from error
        inside = reader.config.get("model_type") == LLAVA
        dense = reader.config.get("text_config") or {} if inside else reader.config
        field = "model.config.text_config" if inside else "model.config"
        if dense.get("model_type") not in DENSE:
            known = f"choose a model of {', '.join(DENSE)}, or a {LLAVA} of one"
            remedy = f"is not supported; {known}"
            faults.append(Fault(f"{field}.model_type", dense.get("model_type"), remedy))
        tied = (reader.config, dense)
        if inside and any(config.get("tie_word_embeddings") for config in tied):
            remedy = "a LLaVA's head cannot be tied to an upcycled model's embedding; untie it"
            faults.append(Fault("model.config.tie_word_embeddings", True, remedy))
        raise_faults(faults)
        found = [text for text in _TEXT if f"{text}embed_tokens.weight" in reader.tensors]
        return cls(reader, dense, found[-1] if found else _TEXT[inside])

    @property
    def is_llava(self) -> bool:
        """Whether there is more than the language model."""
        return self.prefix != _TEXT[0]

    def stem(self, name: str) -> str | None:
        """``name`` without the prefix; None outside the decoder."""
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None

    def faults(self) -> Iterator[Fault]:
        """Tensors of the language model that are missing, misshapen or without use."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(dense_config(self.dense))
        head = "language_model." if self.prefix == _TEXT[1] else ""
        shapes = {}
        for name, tensor in model.state_dict().items():
            decoder = name.startswith("model.")
            own = self.prefix + name.removeprefix("model.") if decoder else head + name
            shapes[own] = tuple(tensor.shape)
        if self.dense.get("tie_word_embeddings", model.config.tie_word_embeddings):
            alone = {name for name in shapes if name.endswith("lm_head.weight")}
            shapes = {n: s for n, s in shapes.items() if n in self.reader.tensors or n not in alone}
        outside = {n for n in self.reader.tensors if self.is_llava and self.stem(n) is None}
        yield from tensor_faults(self.reader, shapes, spare=outside)
        yield from type_faults(self.reader)
        if self.dense.get("tie_word_embeddings") and LM_HEAD in self.reader.tensors:
            yield from surplus_fault(self.reader, LM_HEAD, self.reader.field)
