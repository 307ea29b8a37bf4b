"""A plan: a row a stage, what all of it needs, and what cannot be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from infra.recipe.schema import Recipe
from tasks.engine.stage import Stage
from tasks.engine.workspace import Workspace
from tasks.methods import METHODS
from tasks.planning.dume import dume_rows
from tasks.planning.machine import Machine
from tasks.planning.row import Planned, gigabytes
from tasks.planning.subjects import subjects_of
from upcycle_core.errors import Fault, InputError

HEAD = ("stage", "pieces", "at once", "memory each", "kept", "while it runs", "made")


@dataclass(frozen=True)
class Plan:
    """What a recipe needs on a machine.

    Args:
        rows: A row a stage.
        machine: What there is.
        base: Bytes of memory of a process that computes nothing yet.
        copies: Times that what is published is kept: in the workspace, and in DVC's remote where
            that is a directory.
    """

    rows: Sequence[Planned]
    machine: Machine
    base: int
    copies: int

    @property
    def disk(self) -> int:
        """Bytes on this disk when it is done, workspace, remote and registry together."""
        return sum(self.copies * row.kept + row.registered for row in self.rows)

    @property
    def disk_to_come(self) -> int:
        """Bytes that must be free now: what is not made yet, at the fullest moment."""
        kept = fullest = 0
        for row in self.rows:
            missing = 1 - row.made / row.items
            fullest = max(fullest, kept + int(missing * (row.kept + row.passing)))
            kept += int(missing * row.kept)
        later = sum(
            int((1 - row.made / row.items) * ((self.copies - 1) * row.kept + row.registered))
            for row in self.rows
        )
        return max(fullest, kept + later)

    @property
    def memory(self) -> int:
        """Bytes of memory at the peak, of all pieces that run side by side."""
        return max(
            (self.base + row.memory) * row.at_once(self.machine)
            for row in self.rows
            if not row.resources.gpus
        )

    def faults(self) -> Iterator[Fault]:
        """All that cannot be, at once."""
        for row in self.rows:
            yield from row.memory_faults(self.machine, self.base)
        if self.disk_to_come > self.machine.disk:
            said = f"{gigabytes(self.disk_to_come)} to come, {gigabytes(self.machine.disk)} free"
            remedy = "free some space, set UPCYCLE_HOME to a larger disk, or put DVC's remote "
            remedy += "elsewhere (versions.remote)"
            yield Fault("disk", said, remedy)

    def table(self) -> str:
        """The rows as Markdown."""
        lines = [f"| {' | '.join(HEAD)} |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
        for row in self.rows:
            where = " (GPU)" if row.resources.gpus else ""
            base = 0 if row.resources.gpus else self.base
            cells = (
                row.stage,
                str(row.pieces),
                str(row.at_once(self.machine)),
                gigabytes(base + row.memory) + where,
                gigabytes(row.kept),
                gigabytes(row.passing) if row.passing else "",
                f"{row.made} of {row.items}",
            )
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def summary(self) -> str:
        """The sums in words."""
        there = self.machine
        return (
            f"memory: {gigabytes(self.memory)} at the peak, of {gigabytes(there.memory)}\n"
            f"disk: {gigabytes(self.disk)} when all is made, workspace, remote and registry; "
            f"{gigabytes(self.disk_to_come)} to come, {gigabytes(there.disk)} free"
        )


def plan(recipe: Recipe, home: Path, machine: Machine, *, base: int) -> Plan:
    """What a recipe needs, before anything of it is made.

    Args:
        recipe: Checked.
        home: Where workspaces are.
        machine: Where it is to run.
        base: Bytes of a process that computes nothing yet.

    Raises:
        InputError: No plan can be made for this method; a model's config.json cannot be read.
    """
    if METHODS[recipe.method].name != "dume":
        remedy = "only DUME's recipes can be planned so far"
        raise InputError(Fault("method", recipe.method, remedy))
    workspace = Workspace(home / recipe.name)
    stages = {stage.name: stage for stage in METHODS[recipe.method].stages()}
    rows = [
        replace(row, made=_made(stages[row.stage], recipe, workspace, row.items)).fitted(
            machine, base
        )
        for row in dume_rows(recipe, subjects_of(recipe, home / "models"))
    ]
    return Plan(rows, machine, base, 1 + _is_beside(recipe))


def _is_beside(recipe: Recipe) -> bool:
    """Whether DVC's remote is a directory, taken to be on the same disk."""
    remote = recipe.versions.remote
    return remote is not None and "://" not in remote


def _made(stage: Stage, recipe: Recipe, workspace: Workspace, items: int) -> int:
    """How many of a stage's artifacts are there, whatever made them."""
    there = sum(workspace.record(stage.artifact(item)) is not None for item in stage.items(recipe))
    return min(there, items)
