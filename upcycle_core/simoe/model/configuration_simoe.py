"""Configuration of SIMoE (arXiv 2506.12597): sparse interpolated experts in a dense model.

And which files belong to a directory of such a model.

This file needs torch and transformers alone: it is copied beside the weights, so that
``from_pretrained(..., trust_remote_code=True)`` works without the package it comes from.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

# As those of DeRS: a file that is copied beside the weights imports none of this package.
CHECKSUMS = "checksums.json"
"""{file: sha256} of the weights and of config.json, beside them."""
_CHOICES = {
    "layers": ("all", "ffn"),
    "masks": ("neurons", "parameters", "real"),
    "routing": ("instance", "token", "task"),
}


class SimoeConfig(PretrainedConfig):
    """A dense model's configuration, and which of its layers hold experts.

    Attributes that this configuration does not have itself (``hidden_size``, ``layer_types``, ...)
    are read from ``dense``.

    Args:
        dense: Configuration of the dense model, as a dict with its ``model_type``.
        num_simoe_experts: M, experts a layer.
        layers: Which layers hold experts: ``all`` linear layers and norms, or the linear layers of
            the FFNs.
        lm_head: Whether the output head does as well, if it is not tied to the embedding.
        masks: A gate an input neuron (``neurons``), a gate a parameter (``parameters``), or free
            numbers instead of gates (``real``).
        routing: What has coefficients of its own: each ``instance`` (prompt), ``token``,
            or ``task``.
        router_hidden_size: Width of the router's hidden layer; the hidden size by default.
        tasks: Names of the tasks, where each has its own coefficients.
        initial_spread: Standard deviation of the initial log phi.
        standardise: Whether the router takes mean and deviation of the training prompts from a
            state.
        reopen: Whether gates that are zero have a gradient.
        kept: Of a pruned model, the number of input neurons left in each module's delta.

    Raises:
        ValueError: A choice that there is not, fewer than two experts, tasks missing.
    """

    model_type = "simoe"
    sub_configs = {"dense": AutoConfig}
    keys_to_ignore_at_inference = ["past_key_values", "coefficients"]

    def __init__(
        self,
        dense: dict | PretrainedConfig | None = None,
        num_simoe_experts: int = 8,
        layers: str = "all",
        lm_head: bool = False,
        masks: str = "neurons",
        routing: str = "instance",
        router_hidden_size: int | None = None,
        tasks: list[str] | None = None,
        initial_spread: float = 0.05,
        standardise: bool = False,
        reopen: bool = False,
        kept: dict[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        if dense is None:
            dense = {"model_type": "llama"}
        if isinstance(dense, dict):
            dense = AutoConfig.for_model(**dense)
        kwargs["is_encoder_decoder"] = dense.is_encoder_decoder
        super().__init__(**kwargs)
        self.dense = dense
        self.num_simoe_experts = num_simoe_experts
        self.layers = layers
        self.lm_head = lm_head
        self.masks = masks
        self.routing = routing
        self.router_hidden_size = router_hidden_size
        self.tasks = list(tasks or [])
        self.initial_spread = initial_spread
        self.standardise, self.reopen = standardise, reopen
        self.kept = None if kept is None else dict(kept)
        self._check()
        # What was set before there was a dense configuration reaches it now.
        if self._attn_implementation is not None:
            self._attn_implementation = self._attn_implementation

    def __getattr__(self, name: str) -> Any:
        """What the dense model's configuration says; called where this one has no such field."""
        if name.startswith("_") or "dense" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.__dict__["dense"], name)

    def _check(self) -> None:
        faults = [
            f"{field} = {getattr(self, field)!r}: choose {', '.join(known)}"
            for field, known in _CHOICES.items()
            if getattr(self, field) not in known
        ]
        if self.num_simoe_experts < 2:
            remedy = "one expert leaves nothing to interpolate; use at least 2"
            faults.append(f"num_simoe_experts = {self.num_simoe_experts!r}: {remedy}")
        if self.routing == "task" and not self.tasks:
            faults.append("tasks = []: routing by task needs their names")
        if self.routing == "token" and self.dense.is_encoder_decoder:
            remedy = "an encoder-decoder model is routed by instance or by task; choose one of them"
            faults.append(f"routing = 'token': {remedy}")
        if faults:
            raise ValueError("\n".join(faults))


def write_checksums(folder: Path) -> None:
    """Record the sha256 of every weight file of ``folder`` and of its config.json."""
    files = [*sorted(folder.glob("*.safetensors*")), folder / "config.json"]
    sums = {file.name: _sha256(file) for file in files}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def verify_checksums(folder: Path) -> None:
    """Refuse a directory whose files are not the recorded ones; where none are, do nothing.

    Raises:
        ValueError: All files that are missing or altered.
    """
    record = folder / CHECKSUMS
    if not record.is_file():
        return
    faults = []
    try:
        recorded = dict(json.loads(record.read_text()))
    except (ValueError, TypeError) as error:
        remedy = "write or download the model again"
        raise ValueError(f"{record}: is no list of checksums ({error}); {remedy}") from error
    for name, expected in recorded.items():
        if not (folder / name).is_file():
            faults.append(f"{folder / name}: is missing")
        elif _sha256(folder / name) != expected:
            faults.append(f"{folder / name}: was altered, its sha256 is not the recorded one")
    if faults:
        remedy = f"write or download the model again (its files are recorded in {record})"
        raise ValueError("\n".join([*faults, remedy]))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
