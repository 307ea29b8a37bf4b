"""What a recipe says about the backbone: whose weights make it, and how."""

from dataclasses import field
from typing import Literal

from upcycle_core.config import config

Merge = Literal["average", "counts"]


@config
class MergeConfig:
    """How the experts' weights outside their MLPs become one backbone."""

    embeddings: Merge = "average"
    """`average` (the paper), or `counts`: each row weighted by how often a domain's text has the
    token. A tied head is the same matrix."""
    head: Merge = "average"
    """The same of a head that is not tied."""
    attention: Literal["average", "regmean", "distilled"] = "average"
    """Of queries, keys, values and output projections: `average` (the paper), `regmean`: what comes
    nearest to the experts' outputs on their own inputs, or `distilled`: on the merged model's."""


@config
class BackboneConfig:
    """Whose non-MLP weights are merged, and how."""

    experts: tuple[str, ...] | None = None
    """Domains whose experts are averaged; all of them by default. Kept when domains come or go."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """Average by default; what else there is, by kind of weight."""
