"""What a recipe says about Symphony-MoE: how disparate models are brought together."""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from upcycle_core.config import config
from upcycle_core.training.config import MoEObjective, TrainingConfig

Merge = Literal["mean", "slerp", "anchor"]
Measure = Literal["none", "cosine", "correlation", "l2"]


@config
class MergeConfig:
    """How the weights that are not experts become one backbone, by kind of tensor."""

    embeddings: Literal["mean", "naive", "slerp", "anchor"] = "mean"
    """Embeddings and lm_head, token by token. `mean`: rows of shared tokens are averaged, rows that
    one model alone has are kept (the paper). `naive`: a missing row counts as zeros. `slerp`: rows
    that all models have, as one tensor. `anchor`: the anchor's rows, others where it has none."""
    attention: Merge = "slerp"
    """Matrices of q, k, v and o: along the sphere (the paper), by mean, or the anchor's."""
    norms: Merge = "mean"
    """Norm scales and biases, by mean in the paper."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """A model's weight in every mean; equal by default (the paper's 1/N)."""


@config
class AlignmentConfig:
    """How each model is brought into the anchor's coordinates before anything is merged."""

    neurons: Measure = "correlation"
    """Likeness of FFN neurons that the assignment maximises: `cosine` is the paper's Eq. 2 on unit
    columns, `correlation` on standardised ones, `l2` on columns as they are; `none` leaves them."""
    fraction: float = field(default=1.0, metadata={"ge": 0, "le": 1})
    """Share of the neurons that is aligned, the most alike first (0.8 in the paper's Table 3)."""
    residual: Literal["none", "procrustes", "embeddings"] = "none"
    """Rotation of a model's residual stream into the anchor's basis (not in the paper): from
    activations of all layers, or from shared tokens' embeddings alone. Norms are folded first."""
    heads: Literal["none", "match"] = "none"
    """Match KV groups and the query heads inside them, values rotated (not in the paper)."""
    solver: Literal["scipy", "lapjv"] = "scipy"
    """Who solves the assignment. `lapjv`, a package of its own, finds one of the same total."""

    @property
    def uses_activations(self) -> bool:
        """Whether any part of it is learned from calibration text."""
        return self.neurons != "none" or self.residual == "procrustes" or self.heads == "match"


@config
class CalibrationConfig:
    """The pass of the anchor and each other model over the same text."""

    tokens: int = field(default=100_000, metadata={"ge": 1})
    """Tokens a domain, counted by the anchor's tokenizer; the same of every domain."""
    domains: tuple[str, ...] | Literal["anchor"] | None = None
    """Domains whose calibration text is read: all of them by default, or the anchor's alone."""
    sequence_length: int = field(default=1024, metadata={"ge": 8})
    """Longest sequence in one forward pass, in tokens of either model."""
    batch_size: int = field(default=16, metadata={"ge": 1, "le": 1_000_000})
    """Sequences a forward pass. Part of the result: sums depend on it in the last bits."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass."""
    features: Literal["fp32", "bf16"] = "bf16"
    """What features are rounded to before they are multiplied; products are added up in fp32 within
    a batch and in fp64 across batches either way."""
    layers: int = field(default=8, metadata={"ge": 1})
    """Layers whose sums one piece of work holds at a time: I x I fp64 numbers each."""


@config
class SymphonyConfig:
    """Stage 1 of Symphony-MoE: harmonise without training."""

    models: tuple[str, ...] | None = None
    """Domains whose models become experts; all of them by default."""
    anchor: str | None = None
    """Domain whose model the others are aligned to; by default the first of `models`, or the first
    by name."""
    segmentation: str | None = None
    """Domain whose model's tokenizer cuts text in the result. Needed where the rules differ."""
    rope: Literal["same", "anchor"] = "same"
    """Ropes must agree, or all models take the anchor's: where theirs was another, attention is no
    longer what it was trained to be."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """The backbone."""
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    """The coordinates."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """The text that activations are compared on."""
    router: Literal["random", "ridge"] = "random"
    """Random as in the paper, or DUME's ridge regression on the harmonised model."""


@config
class PostTrainingConfig:
    """Stage 2 of Symphony-MoE: the assembled model is trained on the text of all domains."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Steps, batches, optimizer."""
    objective: MoEObjective = field(default_factory=lambda: MoEObjective(balance_coefficient=0.01))
    """What is trained, and with which losses; all of it with the paper's 0.01 by default."""
