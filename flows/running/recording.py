"""What a flow has published, as DVC records it."""

from collections.abc import Collection, Mapping

from infra.versioning.cache import behind
from infra.versioning.known import Recorded
from infra.versioning.versions import Versions
from tasks.engine.workspace import Workspace


def record_published(
    workspace: Workspace, versions: Versions, published: Mapping[str, str]
) -> None:
    """Record what DVC has not recorded: also what a killed flow published.

    What stays may have read files of the same bytes as then, of which something else is recorded by
    now: it is recorded anew, or DVC would call it changed.

    Args:
        workspace: Where it is.
        versions: DVC's.
        published: {stage and item: artifact}.
    """
    if not published:
        return
    record = Recorded(workspace.root)
    known, kept = record.known(), versions.recorded()
    digests = {label: workspace.record_digest(out) for label, out in published.items()}
    new = [
        label
        for label, digest in digests.items()
        if known.get(label) != digest or label not in kept
    ]
    _commit(new, workspace, versions, published)
    if new:
        record.add(digests)
    late = [label for label in sorted(behind(workspace.root)) if label in published]
    late = [label for label in late if _has_read(workspace, published[label])]
    if late:
        _commit(late, workspace, versions, published)


def _commit(
    labels: Collection[str],
    workspace: Workspace,
    versions: Versions,
    published: Mapping[str, str],
) -> None:
    with workspace.linking(published[label] for label in labels):
        versions.commit([*labels])


def _has_read(workspace: Workspace, artifact: str) -> bool:
    """Whether all that an artifact was made from is there, byte by byte as it was."""
    read = (workspace.record(artifact) or {}).get("inputs", {})
    return all(workspace.digest(path) == digest for path, digest in read.items())
