"""A version's certificate: what readers made of it, kept with it and shown on its page."""

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from infra.readers.reader import READERS
from infra.tracking.records import Version
from infra.tracking.registry import Registry
from tasks.release.certify import SECONDS, certify
from tasks.release.verdict import TOLERANCES, Row, as_json, as_table

FILE = "certificate.json"
CERTIFICATE_TAG = "upcycle.certificate"
"""Of a version: what became of it in each reader, in a line."""
TITLE = "### Arrival certificate"
ABOUT = (
    "What each reader made of this version with its own loader, in fp32 unless said: tensors "
    "found where they belong, the largest difference of a logarithm of a probability from our own "
    "forward pass and greedy tokens equal to ours, over prompts that each expert wrote; and how "
    "far its answers moved as two experts were exchanged and as routers became zeros, in nats."
)


def certify_version(
    registry: Registry,
    version: Version,
    files: Path,
    *,
    readers: Collection[str] = tuple(READERS),
    forms: Collection[str] = tuple(TOLERANCES),
    seconds: float = SECONDS,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """Ask readers for a version, and keep with it what they made of it.

    Args:
        registry: Where it is registered.
        version: The version.
        files: Its files, all of them, on this machine.
        readers: Who is asked.
        forms: Of those that they take.
        seconds: How long one reader may take for one form.
        say: Hears a line of each.

    Returns:
        A row of each reader and form.
    """
    rows = certify(files, readers=readers, forms=forms, seconds=seconds, say=say)
    registry.attach(version, {FILE: as_json(rows)})
    registry.set_tags(version, {CERTIFICATE_TAG: in_a_line(rows)})
    before = re.split(rf"\n*^{re.escape(TITLE)}$", registry.description(version), flags=re.M)[0]
    registry.describe(version, f"{before.rstrip()}\n\n{TITLE}\n\n{ABOUT}\n\n{as_table(rows)}\n")
    return rows


def in_a_line(rows: Sequence[Row]) -> str:
    """Verdicts, and whose they are: ``arrived: transformers, mlflow; not tried: vllm``."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row.verdict, []).append(row.name)
    order = sorted(groups, key=["failed", "arrived", "not tried"].index)
    return "; ".join(f"{verdict}: {', '.join(groups[verdict])}" for verdict in order)
