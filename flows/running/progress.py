"""How far stages are: Prefect artifacts that fill up while pieces run."""

import logging
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from upcycle_core.evaluation.report.numbers import slug

_logger = logging.getLogger(__name__)


class ProgressArtifacts:
    """One bar a stage's domain, baseline, ..., made when it first reports.

    Args:
        name: What the keys of the artifacts begin with.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._shown: dict[str, UUID | None] = {}

    def clear(self) -> None:
        """Take all bars away: a flow that is done has results, which they would stand among."""
        shown, self._shown = [own for own in self._shown.values() if own is not None], {}
        try:
            with get_client(sync_client=True) as client:
                for artifact in shown:
                    client.delete_artifact(artifact)
        except Exception as error:  # as below
            _logger.warning("Prefect still shows bars of what is done: %s", error)

    def __call__(self, label: str, share: float, line: str) -> None:
        """Show that ``label`` is at ``share`` percent, with a line below the bar.

        The work goes on where nothing can be shown: the server may be gone for a while.
        """
        try:
            if label not in self._shown:
                key = slug(f"{self._name}-{label}")
                made = create_progress_artifact(share, key=key, description=line)
                self._shown[label] = cast(UUID, made)
            elif (artifact := self._shown[label]) is not None:
                # Prefect's own update opens a client each time and never closes it.
                with get_client(sync_client=True) as client:
                    client.update_artifact(artifact, ArtifactUpdate(data=share, description=line))
        except Exception as error:  # of any kind: a bar is no reason to end days of work
            self._shown[label] = None
            _logger.warning("Prefect shows no progress of %s any more: %s", label, error)
