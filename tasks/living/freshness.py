"""Whether anything is left to do for a model: looked at without Ray, within seconds."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.engine.artifacts import INSTRUCTIONS
from tasks.engine.stage import Stage
from tasks.engine.stage_run import Session, StageRun
from tasks.engine.why import in_one_line
from tasks.engine.workspace import PROVENANCE, enclosing
from tasks.methods import METHODS
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.errors import InputError

TASKS = "tasks/"
"""Folder of ``sources/``: a file a task."""


@dataclass(frozen=True)
class News:
    """What is not as it was seen last.

    Args:
        any: Whether anything is.
        domains: Whose text, or given expert, is not; and ``instructions`` that are not.
    """

    any: bool
    domains: tuple[str, ...]


def news(session: Session) -> News:
    """Look at everything that the recipe names outside the workspace.

    Raises:
        InputError: With every fault of it.
    """
    stages = METHODS[session.recipe.method].stages()
    sources = next(stage for stage in stages if stage.always)
    seen = session.workspace.path("sources")
    fresh = session.workspace.stage("sources")
    try:
        sources.function(StageRun(session, sources, "", out=fresh, mark="", recorder=None))
        old, new = tree_digest(seen, exclude=(PROVENANCE,)), tree_digest(fresh)
        # Tasks that flows.evaluate has added, and this recipe does not name.
        old = {name: own for name, own in old.items() if not name.startswith(TASKS) or name in new}
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    files = {name: f"{name}.json" for name in (*session.recipe.domains, INSTRUCTIONS)}
    changed = [domain for domain, file in files.items() if old.get(file) != new.get(file)]
    return News(old != new, tuple(changed))


def outdated(session: Session, stages: Mapping[Stage, Sequence[str]]) -> list[str]:
    """Labels of what is to be made again; what hangs on it is left out.

    What lies outside the workspace is not looked at.

    Args:
        session: The recipe at work.
        stages: Those that are looked at, and of which items.
    """
    found = []
    for stage, items in stages.items():
        for item in items:
            try:
                is_current = stage.always or stage.is_current(session, item)
            except InputError:  # of an input that is not there yet
                is_current = False
            if not is_current:
                found.append(stage.label(item))
    return found


def explained(
    session: Session, stages: Sequence[Stage], asked: Stage, items: Sequence[str]
) -> list[str]:
    """A line for each item of a stage, and for what would run before it: why it would run.

    Args:
        session: The recipe at work.
        stages: All of them, in their order.
        asked: The stage.
        items: What it runs for.
    """
    recipe = session.recipe
    makers = {s.artifact(i): (s, i) for s in stages for i in s.items(recipe)}
    lines: dict[str, str] = {}

    def visit(stage: Stage, item: str) -> None:
        label = stage.label(item)
        if label in lines:
            return
        for name in stage.inputs(recipe, item):
            maker = next((makers[n] for n in enclosing(name) if n in makers), None)
            if maker is not None and not maker[0].always:
                visit(*maker)
        try:
            reasons = stage.reasons(session, item)
        except InputError as error:
            reasons = [f"{fault.value} has not been made" for fault in error.faults]
        lines[label] = f"{label} runs: {in_one_line(reasons)}" if reasons else ""

    for item in items:
        visit(asked, item)
    wanted = [asked.label(item) for item in items]
    current = {label: f"{label}: up to date" for label in wanted}
    return [line or current[label] for label, line in lines.items() if line or label in current]
