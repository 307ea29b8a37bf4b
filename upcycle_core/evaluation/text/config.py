"""What a recipe says about evaluation."""

from dataclasses import field, replace
from typing import Literal

from upcycle_core.config import Counted, config


@config
class EvaluationConfig:
    """Perplexity on held-out text, normalised by each domain's own expert."""

    tokens: int | None = field(default=None, metadata={"gt": 0})
    """Held-out tokens a domain; all there are by default."""
    sequence_length: int = field(default=1024, metadata={"ge": 8})
    """Tokens a sequence; its first token is not scored."""
    loss: Counted = "all"
    """Tokens that are scored: all, or of chats the responses."""
    batch_size: int = field(default=16, metadata={"ge": 1})
    """Sequences a forward pass."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass; losses are summed in fp64."""
    random_routing_seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the random routers; their scores are averaged."""
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
            random_routing_seeds=nothing,
            sweep_top_k=nothing,
            sweep_ridge_lambda=nothing,
            sweep_window=nothing,
        )
