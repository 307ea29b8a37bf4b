"""What a recipe says about DUME: statistics, router, assembled model."""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from upcycle_core.config import Counted, config


@config
class StatisticsConfig:
    """The one pass over calibration text that router solving needs."""

    tokens: int | None = field(default=None, metadata={"gt": 0})
    """Calibration tokens a domain; all there are by default."""
    sequence_length: int = field(default=1024, metadata={"ge": 2})
    """Documents are cut into paragraphs of this many tokens."""
    count: Counted = "all"
    """Tokens whose features are counted: all, or of chats the responses. All are forwarded."""
    window: int | None = field(default=None, metadata={"ge": 1})
    """Only the first tokens of each paragraph are forwarded and counted (the paper's Figure 2a)."""
    batch_size: int = field(default=16, metadata={"ge": 1, "le": 1_000_000})
    """Paragraphs a forward pass. Part of the result: sums depend on it in the last bits."""
    shards: int = field(default=2, metadata={"ge": 1})
    """Pieces a domain's calibration text is split into, whatever the number of workers."""
    folds: int | None = field(default=None, metadata={"ge": 1})
    """Parts kept apart for cross-validation of lambda, each H(H+1)/2 fp64 numbers a layer; by
    default four where `router.ridge_lambda` is cross-validated, else one."""
    position_buckets: tuple[int, ...] = ()
    """Token windows whose statistics are kept apart, ascending (2, 16, 128): for Figure 2a."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "fp32"
    """Arithmetic of the forward pass. Sums across batches are fp64 always."""

    @property
    def parts(self) -> int:
        """How many parts are kept apart."""
        return self.folds or 1


@config
class RouterConfig:
    """The ridge regression behind the routers."""

    ridge_lambda: float | Literal["cross-validate"] = 0.01
    """Tikhonov regularisation, added raw to the Gram matrix's diagonal; or chosen over folds."""
    lambda_grid: tuple[float, ...] = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
    """What cross-validation chooses from."""
    solve: Literal["joint", "sequential"] = "joint"
    """All layers from one pass (the paper), or layer by layer with L passes (its ablation)."""
    domain_weights: Mapping[str, float] = field(default_factory=dict)
    """Factor on a domain's statistics; 1 where none is given."""
    rows: Literal["ridge", "means"] = "ridge"
    """`ridge` (the paper), or `means`: an expert's row is the mean of its domain's router inputs,
    as in mergekit's `hidden` gates. No lambda then."""
    normalise: Literal["columns", "none"] = "columns"
    """Each column is divided by its norm (the paper, Eq. 6), or the solution stays as it is: each
    token goes where the regression says, and logits estimate the domains' probabilities."""
    scale: float = field(default=1.0, metadata={"gt": 0})
    """Factor on the solution: the inverse of the softmax's temperature (the paper: 1).
    It decides nothing where one expert answers, and how far the first of several leads."""


@config
class MoEConfig:
    """The assembled model."""

    top_k: int = field(default=1, metadata={"ge": 1})
    """Experts a token passes through."""
    normalise_top_k: bool = True
    """Whether the weights of a token's k experts sum to one, as in the authors' code; else they are
    the softmax over all experts as it is (the paper's equation 4). Of llama, mistral and ernie4_5
    the stock MoE always divides by their sum."""
    max_shard_bytes: int = field(default=5_000_000_000, metadata={"ge": 1000})
    """Size of one safetensors file."""
