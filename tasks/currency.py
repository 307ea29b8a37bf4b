"""Whether anything is left to do for a model: looked at without Ray, within seconds."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.sources import sources
from tasks.stage import Stage
from tasks.stage_run import Session, StageRun
from tasks.workspace import PROVENANCE
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.errors import InputError


@dataclass(frozen=True)
class News:
    """What is not as it was seen last.

    Args:
        any: Whether anything is.
        domains: Whose text, or given expert, is not.
    """

    any: bool
    domains: tuple[str, ...]


def news(session: Session) -> News:
    """Look at everything that the recipe names outside the workspace.

    Raises:
        InputError: With every fault of it.
    """
    seen = session.workspace.path("sources")
    fresh = session.workspace.stage("sources")
    try:
        sources.function(StageRun(session, sources, "", out=fresh, mark="", recorder=None))
        old, new = tree_digest(seen, exclude=(PROVENANCE,)), tree_digest(fresh)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    files = {domain: f"{domain}.json" for domain in session.recipe.domains}
    changed = [domain for domain, file in files.items() if old.get(file) != new.get(file)]
    return News(old != new, tuple(changed))


def outdated(session: Session, stages: Sequence[Stage]) -> list[str]:
    """Labels of what is to be made again; what hangs on it is left out.

    What lies outside the workspace is not looked at.
    """
    found = []
    for stage in stages:
        for item in stage.items(session.recipe):
            try:
                is_current = stage.always or stage.is_current(session, item)
            except InputError:  # of an input that is not there yet
                is_current = False
            if not is_current:
                found.append(stage.label(item))
    return found
