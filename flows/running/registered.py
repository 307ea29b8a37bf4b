"""A registered model, for commands that ask it: found, read in place and loaded."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.settings import Settings
from infra.tracking import copies
from infra.tracking.records import Version
from infra.tracking.registry import Registry
from tasks.release.versions import COMPRESSED_TAG
from upcycle_core.baselines.config import FROM_EXPERTS
from upcycle_core.corpora.config import Bos
from upcycle_core.errors import Fault, InputError, raise_faults


@dataclass(frozen=True)
class Registered:
    """A version of a registered model.

    Args:
        version: As the registry has it.
        directory: Its checkpoint: where it lies on this machine, or else a copy.
        recipe: What made it; empty of a version of others.
    """

    version: Version
    directory: Path
    recipe: Mapping[str, Any]

    @property
    def bos(self) -> Bos:
        """What stood before the texts that the model was made and judged on."""
        return self.recipe.get("corpus", {}).get("bos", "auto")

    @property
    def experts(self) -> list[str]:
        """The domains whose experts it has, in their order; none where they are no domain's."""
        chosen = (self.recipe.get("symphony") or {}).get("models")
        domains = [d for d in self.recipe.get("domains", {}) if chosen is None or d in chosen]
        if COMPRESSED_TAG not in self.version.tags:
            return domains
        row = self.recipe.get("baselines", {}).get(self.recipe["compression"]["models"][0])
        # Copies of one FFN may be as many as domains, and are of none.
        of_domains = row is None or row["method"] in FROM_EXPERTS or row.get("start") == "experts"
        return domains if of_domains else []


def registered(reference: str, settings: Settings) -> Registered:
    """Find a version and its files, of one version also where an alias moves meanwhile.

    Args:
        reference: ``NAME@ALIAS`` or ``NAME/VERSION``, as it was typed.
        settings: Name the registry.

    Raises:
        InputError: There is no such version, or its files cannot be read.
    """
    registry = Registry(settings)
    version = registry.referenced(reference)
    directory = copies.in_place(version, registry)
    if directory is None:
        directory = copies.checkpoint(version, registry, settings)
    recipe = yaml.safe_load(registry.text(version, "recipe.yaml") or "{}")
    return Registered(version, directory, recipe)


def room(model: Any, prompt: str, ids: Sequence[int]) -> int | None:
    """Tokens that the model's context leaves for an answer; None where it says of none.

    Args:
        model: Loaded.
        prompt: What is asked.
        ids: Its tokens.

    Raises:
        InputError: The prompt is empty, or leaves no room.
    """
    if not ids:
        raise InputError(Fault("prompt", prompt, "is empty; write something"))
    size = context(model)
    if size is not None and len(ids) >= size:
        remedy = f"is {len(ids)} tokens long, the model's context {size}; shorten it, so that "
        remedy += "there is room for an answer"
        raise InputError(Fault("prompt", prompt, remedy))
    return None if size is None else size - len(ids)


def context(model: Any) -> int | None:
    """Positions that a model was made for."""
    own = getattr(model.config, "max_position_embeddings", None)
    dense = getattr(model.config, "dense", None)
    return own or getattr(dense, "max_position_embeddings", None)


def load(directory: Path, chosen: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its tokenizer, as the command's arguments say.

    Raises:
        InputError: The files do not belong together, the model is an encoder and a decoder, or the
            device is not there.
    """
    import torch

    from tasks.scoring.architectures import register_architectures
    from upcycle_core.checkpoints.load import load_causal_lm
    from upcycle_core.checkpoints.tokenizer import load_tokenizer
    from upcycle_core.precision import device_faults, weights_type

    if json.loads((directory / "config.json").read_text()).get("is_encoder_decoder"):
        remedy = "is an encoder and a decoder; name a model that continues text"
        raise InputError(Fault("model", chosen.model, remedy))
    register_architectures()
    tokenizer = load_tokenizer(directory)
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    raise_faults(device_faults(device))
    dtype = weights_type(chosen.precision, device)
    return load_causal_lm(directory, dtype=dtype, device=device), tokenizer
