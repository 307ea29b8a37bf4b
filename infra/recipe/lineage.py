"""What a model keeps while its domains come, go and learn."""

from collections.abc import Mapping
from dataclasses import field

from upcycle_core.config import config


@config
class Lineage:
    """What later models of a workspace are built upon as it is. Flows write it; people read it.

    An artifact is named by the sha256 of its ``provenance.json``: of what made it, and its files.
    """

    pinned: Mapping[str, str] = field(default_factory=dict)
    """Artifacts that are not made again, each with its sha256: tokenizer, seed, backbone."""
    backbone: tuple[str, ...] = ()
    """Domains whose experts the pinned backbone averages; some may have left the recipe."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """The expert that a domain's expert is continued from, by its sha256."""
