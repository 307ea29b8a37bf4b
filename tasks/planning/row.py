"""A row of a plan: what one stage will need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from infra.recipe.resources import Resources
from tasks.planning.machine import Machine
from upcycle_core.errors import Fault


@dataclass(frozen=True)
class Planned:
    """A stage of a plan.

    Args:
        stage: Its name.
        items: How many times it runs.
        pieces: Pieces of all its items.
        kept: Bytes that it publishes, all items together.
        passing: Bytes that it holds beside that while it runs.
        registered: Bytes of it that the registry copies.
        memory: Bytes of one piece at its peak, the interpreter left out; 0: next to nothing.
        streamed: The same of a piece that goes layer by layer; None where it cannot, or must not.
        resources: What a piece reserves.
        kind: Of its resources, as in ``compute.KIND``.
        remedies: What makes a piece smaller, beside fewer at once.
        made: How many of its items are there.
    """

    stage: str
    items: int
    pieces: int
    kept: int = 0
    passing: int = 0
    registered: int = 0
    memory: int = 0
    streamed: int | None = None
    resources: Resources = field(default_factory=Resources)
    kind: str = "assembly"
    remedies: Sequence[str] = ()
    made: int = 0

    def at_once(self, machine: Machine) -> int:
        """Pieces that run side by side there."""
        places = machine.cpus // self.resources.cpus
        if self.resources.gpus:
            places = min(places, int(machine.gpus / self.resources.gpus))
        return max(1, min(self.pieces, places))

    def fitted(self, machine: Machine, base: int) -> "Planned":
        """The row with what its pieces will hold: the model, or one layer where that is too much.

        Args:
            machine: Where it runs.
            base: Bytes of an interpreter with its libraries.
        """
        if self.streamed is None:
            return self
        needed, there = self.at_once(machine) * (self.memory + base), machine.memory
        if self.resources.gpus:
            needed, there = self.memory, int(machine.gpu_memory * min(1.0, self.resources.gpus))
        streams = getattr(self.resources, "streamed", "never")
        if streams == "always" or (streams == "auto" and needed > there):
            return replace(self, memory=self.streamed)
        return self

    def memory_faults(self, machine: Machine, base: int) -> Iterator[Fault]:
        """What does not fit, with the nearest setting that does.

        Args:
            machine: Where it runs.
            base: Bytes of an interpreter with its libraries.
        """
        if self.made >= self.items or not self.memory:
            return
        if self.resources.gpus:
            needed, there, where = self.memory, machine.gpu_memory, "of GPU memory"
            together = max(1, int(1 / self.resources.gpus))
            if not machine.gpus:
                asked = f"{self.resources.gpus:g}"
                yield Fault(f"compute.{self.kind}.gpus", asked, "there is no GPU; give 0")
                return
        else:
            needed, there, where = self.memory + base, machine.memory, "of memory"
            together = self.at_once(machine)
        if together * needed <= there:
            return
        said = f"{self.stage}: {together} x {gigabytes(needed)} {where}, there are "
        said += gigabytes(there)
        fewer = there // needed
        remedies = list(self.remedies)
        if self.streamed is not None and getattr(self.resources, "streamed", "") == "never":
            remedies.append(f"compute.{self.kind}.streamed = auto")
        if fewer and not self.resources.gpus:
            remedies.append(f"compute.{self.kind}.cpus = {-(-machine.cpus // fewer)}")
        where = f"compute.{self.kind}"
        yield Fault(where, said, " or ".join(remedies) or "use a larger machine")


def gigabytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"
