"""What a recipe says about evaluation."""

import hashlib
from collections.abc import Iterable
from dataclasses import field, replace
from typing import Literal

from upcycle_core.config import Counted, config

FEW = 8
"""Domains up to which every expert is scored on every text, and random routing drawn anew."""
SAMPLED = 3
"""Other domains' texts that an expert is scored on where not on all."""
DRAWN = (0, 1, 2)
Beside = Literal["seed", "model_averaging", "random_routing", "oracle"]
BESIDE: tuple[Beside, ...] = ("seed", "model_averaging", "random_routing", "oracle")


@config
class EvaluationConfig:
    """Perplexity on held-out text, normalised by each domain's own expert."""

    tokens: int | None = field(default=None, metadata={"gt": 0})
    """Held-out tokens a domain; all there are by default."""
    sequence_length: int = field(default=1024, metadata={"ge": 8})
    """Tokens a sequence; its first token is not scored."""
    loss: Counted = "all"
    """Tokens that are scored: all, or of chats the responses."""
    batch_size: int = field(default=16, metadata={"ge": 1, "le": 1_000_000})
    """Sequences a forward pass."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass; losses are summed in fp64."""
    rows: tuple[Beside, ...] = BESIDE
    """What is scored beside the experts and the model. Without `oracle`, what the backbone costs
    and what routers cost is not told apart."""
    cross_scores: Literal["auto", "all", "sample", "own"] = "auto"
    """Whose text a domain's expert is scored on beside its own: `all` others', a `sample` of three,
    chosen by the names alone, or none (`own`); `auto` is `all` up to eight domains."""
    random_routing_seeds: tuple[int, ...] | None = None
    """Seeds of the random routers, whose scores are averaged; by default 0, 1, 2, and beyond eight
    domains 0 alone."""
    sweep_top_k: tuple[int, ...] = ()
    """Values of k to plot (the paper's Figure 2b)."""
    sweep_ridge_lambda: tuple[float, ...] = ()
    """Values of lambda to plot (Figure 2c)."""
    sweep_window: tuple[int, ...] = ()
    """Token windows to plot (Figure 2a); each must be one of `statistics.position_buckets`."""

    @property
    def measuring(self) -> "EvaluationConfig":
        """How a model is measured, without what else is."""
        nothing: tuple = ()
        return replace(
            self,
            rows=BESIDE,
            cross_scores="auto",
            random_routing_seeds=None,
            sweep_top_k=nothing,
            sweep_ridge_lambda=nothing,
            sweep_window=nothing,
        )

    def scored_on(self, domain: str, domains: Iterable[str]) -> tuple[str, ...]:
        """The domains whose text an expert is scored on, in the order of ``domains``.

        A sample is what the names hash to: the same every night, and a domain that joins takes no
        more than one place of each.

        Args:
            domain: The expert's own, always among them.
            domains: All.
        """
        every = tuple(domains)
        if self.cross_scores == "all" or (self.cross_scores == "auto" and len(every) <= FEW):
            return every
        others = sorted((d for d in every if d != domain), key=lambda other: _place(domain, other))
        chosen = {domain, *(others[:SAMPLED] if self.cross_scores != "own" else ())}
        return tuple(d for d in every if d in chosen)

    def drawn_seeds(self, domains: int) -> tuple[int, ...]:
        """Seeds of the random routers of so many domains."""
        if self.random_routing_seeds is not None:
            return self.random_routing_seeds
        return DRAWN if domains <= FEW else DRAWN[:1]


def _place(expert: str, text: str) -> str:
    return hashlib.sha256(f"{expert}\n{text}".encode()).hexdigest()
