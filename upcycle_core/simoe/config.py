"""What a recipe says about SIMoE (arXiv 2506.12597): sparse interpolated experts."""

from dataclasses import field
from typing import Literal

from upcycle_core.config import config
from upcycle_core.errors import Fault

Masks = Literal["neurons", "parameters", "real"]
Routing = Literal["instance", "token", "task"]


@config
class SimoeUpcyclingConfig:
    """Experts that instruction tuning finds inside every linear layer and norm of a dense model."""

    experts: int = field(default=8, metadata={"ge": 2})
    """M, experts a layer."""
    tau: float = field(default=0.75, metadata={"ge": 0, "lt": 1})
    """Least share of expert parameters whose mask is zero, in [0, 1)."""
    sparsity: Literal["mean", "use", "union"] = "mean"
    """What `tau` holds: the `mean` of the masks' zeros (the paper's way), the same with each expert
    counted by its `use`, the running mean of its coefficients, or the share that no expert uses,
    the complement of the masks' `union`, which is what pruning removes."""
    beta: float = field(default=5e-6, metadata={"ge": 0})
    """Factor of the orthogonality penalty."""
    orthogonality: Literal["full", "offdiagonal"] = "full"
    """Distance of Z Z^T from the identity, or of its entries off the diagonal from zero."""
    masks: Masks = "neurons"
    """A mask entry an input neuron (the paper's), one a parameter (its Table 7), or `real`: free
    numbers an input neuron, without sparsity (its Table 4 c)."""
    layers: Literal["all", "ffn"] = "all"
    """Layers that grow experts: every linear layer and norm, or the FFNs' linear layers (Table
    4 a)."""
    lm_head: bool = False
    """Whether the output head, where it is a layer of its own, grows experts as well."""
    routing: Routing = "instance"
    """What has expert coefficients of its own: each prompt, each token (Table 4 d), or each
    task."""
    router_hidden_size: int | None = field(default=None, metadata={"ge": 1})
    """Width of the router's hidden layer; the model's hidden size by default."""
    standardise: bool = False
    """Whether the router reads states without what training prompts have in common: minus their
    mean, divided by their deviation, a feature at a time (not in the paper)."""
    balance: float = field(default=0.0, metadata={"ge": 0})
    """Factor of log M minus the entropy of a batch's mean coefficients (not in the paper)."""
    initial_spread: float = field(default=0.05, metadata={"ge": 0})
    """Standard deviation of the initial log phi around the mean that gives P(z = 0) = 0.05."""
    closing: float | None = field(default=None, metadata={"gt": 0, "le": 1})
    """Share of the steps over which tau rises from 0 to its value, lambda following it; from the
    first step on it has its value by default (the paper's way)."""
    reopen: bool = False
    """Whether a gate that is zero still hears from the likelihood, by the slope that it has without
    the clamp: it may come back, and lambda closes another for it (not in the paper)."""
    mask_learning_rate: float = field(default=1e-2, metadata={"gt": 0})
    """Adam's learning rate of log phi, on the schedule of the others."""
    router_learning_rate: float | None = field(default=None, metadata={"gt": 0})
    """Adam's learning rate of the router; that of the deltas by default."""
    multiplier_learning_rate: float = field(default=0.03, metadata={"gt": 0})
    """Step of the ascent of lambda, the multiplier of the sparsity constraint. Small, the
    likelihood chooses which gates close; large, they close all together. Short trainings need about
    0.1, `union` up to 0.3."""

    @property
    def is_constrained(self) -> bool:
        """Whether masks are sparse at all."""
        return self.masks != "real"

    def faults(self, name: str) -> list[Fault]:
        """What is wrong with it; ``name`` is the field's."""
        found = []
        if not 0 <= self.tau < 1:
            remedy = "a share, not percent: choose from [0, 1), e.g. 0.75"
            found.append(Fault(f"{name}.tau", self.tau, remedy))
        if self.experts < 2:
            remedy = "one expert leaves nothing to interpolate; use at least 2"
            found.append(Fault(f"{name}.experts", self.experts, remedy))
        for word in ("standardise", "balance", "router_hidden_size"):
            if getattr(self, word) and self.routing == "task":
                remedy = "routing by task reads no state and sees no batch; leave it out"
                found.append(Fault(f"{name}.{word}", getattr(self, word), remedy))
        for word in ("closing", "reopen"):
            if getattr(self, word) and not self.is_constrained:
                remedy = "real masks have no gates that close; leave it out"
                found.append(Fault(f"{name}.{word}", getattr(self, word), remedy))
        if self.reopen and self.closing is None:
            remedy = "say how long gates take to close, as a share of the steps, e.g. 0.4"
            found.append(Fault(f"{name}.closing", None, remedy))
        if self.sparsity == "use" and self.routing == "token":
            remedy = "the use of experts is a mean over prompts; choose routing: instance or task"
            found.append(Fault(f"{name}.sparsity", self.sparsity, remedy))
        if self.masks == "real" and self.tau != type(self)().tau:
            remedy = "real masks are not sparse; leave it out"
            found.append(Fault(f"{name}.tau", self.tau, remedy))
        if self.masks == "real" and self.sparsity != "mean":
            remedy = "real masks are not sparse; leave it out"
            found.append(Fault(f"{name}.sparsity", self.sparsity, remedy))
        return found
