"""What a recipe says about the backbone: whose weights make it, and how."""

from dataclasses import field
from typing import Literal

from upcycle_core.config import config

Merge = Literal["average", "counts"]
MergeHead = Literal["average", "counts", "fitted"]


@config
class MergeConfig:
    """How the experts' weights outside their MLPs become one backbone."""

    embeddings: Merge = "average"
    """`average` (the paper), or `counts`: each row weighted by how often a domain's text has the
    token. A tied head is the same matrix."""
    head: MergeHead = "average"
    """The same of a head that is not tied; or `fitted` to the logits of all experts, each after a
    map that its repaired last layer makes. It unties a tied head, which adds V x H parameters."""
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
