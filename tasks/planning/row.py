"""A row of a plan: what one stage will need."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infra.cluster.memory import GPU_SHARE
from infra.recipe.resources import Resources
from tasks.planning.machine import Machine
from upcycle_core.errors import Fault
from upcycle_core.planning.rates import Arithmetic, Rates

FP32 = 4


@dataclass(frozen=True)
class Planned:
    """A stage of a plan.

    Args:
        stage: Its name.
        items: How many times it runs.
        pieces: Pieces of all its items.
        rounds: How many lots of them run one after the other.
        kept: Bytes that it publishes, all items together.
        passing: Bytes that it holds beside that while it runs.
        each: Bytes that every item holds beside that while it is at work, until it is published.
        registered: Bytes of it that the registry keeps of a version that is not the newest.
        read: Bytes that its pieces read, those that several read as often.
        written: Bytes that they write; what is kept and what passes by default.
        flops: Floating-point operations of all pieces; None where that is not known.
        precision: What they are computed in.
        memory: Bytes of one piece at its peak, the interpreter left out; 0: next to nothing.
        alone: Bytes of one more piece, which runs by itself on CPUs; 0: there is none.
        alone_flops: What that computes, in fp32.
        alone_remedies: Settings without which there is no such piece, or a smaller one.
        streamed: The same of a piece that goes layer by layer; None where it cannot, or must not.
        on_cpus: Bytes of a piece that computes on CPUs in place of its GPU; None where that is no
            way out.
        states: Bytes of hidden states that lie in every item's files meanwhile.
        resources: What a piece reserves.
        kind: Of its resources, as in ``compute.KIND``.
        remedies: What makes a piece smaller, beside fewer at once.
        lighter: From the bytes that a piece or worker may hold and the machine's GPUs to settings
            with which it does.
        decoded: Bytes of weights that pass through memory, for one token after another.
        own_code: Kind of the model that is registered, where that brings its code.
        linked: Bytes of what is kept that are the files of given models themselves.
        cached: Bytes that it leaves in the cache of models, beside what it publishes.
        made: How many of its items are there, and are not made again.
        rest: What those that are not need, where items are not alike; their share of all by
            default.
        in_parts: Whether DVC's remote holds what it is made from in its place.
        also: Pieces of another kind that the stage runs, not while these run; all that it publishes
            and holds on the disk is said here.
    """

    stage: str
    items: int
    pieces: int
    rounds: int = 1
    kept: int = 0
    passing: int = 0
    each: int = 0
    registered: int = 0
    read: int = 0
    written: int | None = None
    flops: int | None = 0
    precision: Arithmetic = "fp32"
    memory: int = 0
    alone: int = 0
    alone_flops: int = 0
    alone_remedies: Sequence[str] = ()
    streamed: int | None = None
    on_cpus: int | None = None
    states: int = 0
    resources: Resources = field(default_factory=Resources)
    kind: str = "assembly"
    remedies: Sequence[str] = ()
    lighter: Callable[[int, int], Iterable[str]] | None = None
    decoded: int = 0
    linked: int = 0
    cached: int = 0
    made: int = 0
    rest: "Planned | None" = None
    in_parts: bool = False
    own_code: str = ""
    also: "Planned | None" = None

    @property
    def kinds(self) -> "list[Planned]":
        """The row, and the one of its pieces of another kind where there are such."""
        if self.also is None:
            return [self]
        return [self, replace(self.also, made=self.also.items * self.made // self.items)]

    @property
    def is_done(self) -> bool:
        """Whether all of it is there, and nothing of it is made again."""
        return self.made >= self.items

    @property
    def workers(self) -> int:
        """Processes that one piece is: the workers of a training."""
        return getattr(self.resources, "workers", 1)

    @property
    def own(self) -> int:
        """Bytes that stay and were not on the disk before."""
        return self.kept - self.linked + self.cached

    @property
    def pushed(self) -> int:
        """Bytes of it that DVC's remote holds."""
        return 0 if self.in_parts else self.kept

    @property
    def writes(self) -> int:
        """Bytes that its pieces write."""
        passing = self.passing + self.items * self.each
        return self.own + passing if self.written is None else self.written

    def to_come(self) -> "Planned":
        """The row of those of its items that are not there, or are made again."""
        left = self.items - self.made
        if self.rest is not None:
            return replace(self.rest, in_parts=self.in_parts)
        if not self.made:
            return self

        def share(whole: int) -> int:
            return whole * left // self.items

        return replace(
            self,
            items=left,
            made=0,
            pieces=max(self.rounds, share(self.pieces)),
            kept=share(self.kept),
            linked=share(self.linked),
            passing=share(self.passing),
            read=share(self.read),
            written=None if self.written is None else share(self.written),
            flops=None if self.flops is None else share(self.flops),
            also=None if self.also is None else self.kinds[-1].to_come(),
        )

    def holding(self, machine: Machine | None) -> int:
        """Bytes beside what it publishes, at most, while all of it is made.

        Args:
            machine: Where it runs; None for a cluster, where all items may be at work at once.
        """
        most = self.pieces // self.rounds if machine is None else self.at_once(machine)
        return self.passing + self.each * min(self.items, most)

    def seconds(self, machine: Machine, rates: Rates | None) -> float | None:
        """How long it takes, starts of processes left out; None where that is not known.

        Args:
            machine: Where it runs.
            rates: What a second brings there.
        """
        if rates is None or self.flops is None:
            return None
        if self.resources.gpus:
            most = max(1.0, machine.gpus / self.resources.gpus)
            together = min(self.pieces // self.rounds * self.workers, most)
            one = rates.gpu_fp32 if self.precision == "fp32" else rates.gpu_bf16
            speed = one * min(together * self.resources.gpus, max(1, machine.gpus))
        else:
            busy = self.at_once(machine) * self.workers * self.resources.cpus
            speed = rates.products(self.precision, busy, machine.cpus)
        if not speed or not rates.read or not rates.write:
            return None
        if self.decoded and not rates.memory:
            return None
        seconds = self.flops / speed + self.read / rates.read + self.writes / rates.write
        if self.decoded:
            seconds += self.decoded / rates.memory
        if self.alone_flops:
            seconds += self.alone_flops / rates.products("fp32", self.resources.cpus, machine.cpus)
        return seconds

    def at_once(self, machine: Machine) -> int:
        """Pieces that run side by side there; all workers of one are on the one machine."""
        places = machine.cpus // self.resources.cpus
        if self.resources.gpus:
            places = min(places, int(machine.gpus / self.resources.gpus))
        if self.resources.memory is not None:
            places = min(places, machine.memory // self.resources.memory)
        return max(1, min(self.pieces // self.rounds, places // self.workers))

    def on_a_gpu(self, machine: Machine) -> int:
        """Pieces and workers that share one GPU there; Ray fills one before the next."""
        return max(1, min(int(1 / self.resources.gpus), self.at_once(machine) * self.workers))

    def fitted(self, machine: Machine, base: int) -> "Planned":
        """The row with what its pieces will hold: the model, or one layer where that is too much.

        Args:
            machine: Where it runs.
            base: Bytes of an interpreter with its libraries.
        """
        if self.also is not None:
            apart = replace(self, also=None).fitted(machine, base)
            return replace(apart, also=self.also.fitted(machine, base))
        if self.streamed is None:
            return self
        needed, there = self.at_once(machine) * (self.memory + base), machine.memory
        if self.resources.gpus:
            needed = self.memory
            there = int(GPU_SHARE * machine.gpu_memory * min(1.0, self.resources.gpus))
        streams = getattr(self.resources, "streamed", "never")
        if streams == "always" or (streams == "auto" and needed > there):
            return replace(self, memory=self.streamed, each=self.each + self.states)
        return self

    def memory_faults(self, machine: Machine, base: int) -> Iterator[Fault]:
        """What does not fit, with the nearest setting that does.

        Args:
            machine: Where it runs.
            base: Bytes of an interpreter with its libraries.
        """
        if not self.memory:
            return
        if self.alone and self.alone + base > machine.memory:
            said = f"{self.stage}: {gigabytes(self.alone + base)} of memory, there are "
            said += gigabytes(machine.memory)
            remedy = " or ".join(self.alone_remedies) or "use a larger machine"
            yield Fault(f"compute.{self.kind}", said, remedy)
        if self.resources.gpus:
            needed, there = self.memory, int(GPU_SHARE * machine.gpu_memory)
            where = "of GPU memory"
            together = self.on_a_gpu(machine)
            if not machine.gpus:  # which is what is said
                return
        else:
            needed, there, where = self.memory + base, machine.memory, "of memory"
            together = self.at_once(machine) * self.workers
        if together * needed <= there:
            return
        said = f"{self.stage}: {together} x {gigabytes(needed)} {where}, there are "
        said += f"{gigabytes(there)} to plan with" if self.resources.gpus else gigabytes(there)
        fewer = there // needed
        remedies = list(self.remedies)
        remedies += self._lighter_ones(machine, base, there, together)
        remedies += self._layer_by_layer(machine, base)
        is_copied = dividing(self.resources) == 1
        if 0 < fewer < self.workers and is_copied and not self.resources.gpus:
            remedies.append(self._fewer_workers(machine, fewer))
        elif fewer >= self.workers and not self.resources.gpus:
            remedies.append(f"compute.{self.kind}.memory = {needed}")
            remedies.append(f"compute.{self.kind}.cpus = {-(-machine.cpus // fewer)}")
        if self.resources.gpus and fewer:  # fewer share one
            remedies.append(f"compute.{self.kind}.gpus = {1 / fewer:g}")
        elif self.resources.gpus:
            remedies += self._without_gpus(machine, base)
        where = f"compute.{self.kind}"
        yield Fault(where, said, " or ".join(remedies) or "use a larger machine")

    def _lighter_ones(
        self, machine: Machine, base: int, there: int, together: int
    ) -> Iterator[str]:
        """Settings with which all fit that run side by side, or one alone where not even that does.

        Args:
            machine: Where it runs.
            base: Bytes of an interpreter with its libraries.
            there: Bytes that all may hold, of a GPU or of the machine.
            together: Pieces, or workers of them, that share those.
        """
        if self.lighter is None:
            return
        beside = 0 if self.resources.gpus else base
        found = [*self.lighter(there // together - beside, machine.gpus)]
        yield from found
        if self.resources.gpus or there >= self.workers * (self.memory + base):
            return
        for setting in self.lighter(there // self.workers - beside, machine.gpus):
            if setting not in found:
                yield f"{setting} and compute.{self.kind}.cpus = {machine.cpus // self.workers}"

    def _layer_by_layer(self, machine: Machine, base: int) -> Iterator[str]:
        """The setting for layers one by one, where that is switched off, and what that needs where
        it does not fit by itself."""
        if self.streamed is None or getattr(self.resources, "streamed", "") != "never":
            return
        resources: Any = self.resources  # of a pass, the only kind that can be streamed
        row = replace(self, resources=replace(resources, streamed="auto")).fitted(machine, base)
        setting = f"compute.{self.kind}.streamed = auto"
        left = [str(fault.value).partition(": ")[2] for fault in row.memory_faults(machine, base)]
        yield f"{setting} (then {left[0].partition(',')[0]}, still too much)" if left else setting

    def _fewer_workers(self, machine: Machine, most: int) -> str:
        """The setting with which so many processes run side by side, of all trainings together.

        A divisor of the workers shares the batches that they share.
        """
        workers = max(n for n in range(1, most + 1) if self.workers % n == 0)
        resources: Any = self.resources  # of a training, the only kind that has workers
        own = replace(self, resources=replace(resources, workers=workers))
        said = f"compute.{self.kind}.workers = {workers}"
        if own.at_once(machine) * workers <= most:
            return said
        return f"{said} and cpus = {-(-machine.cpus // most)}"

    def _without_gpus(self, machine: Machine, base: int) -> Iterator[str]:
        """The setting with which CPUs do what no GPU holds, where the machine's memory does."""
        if self.on_cpus is None:
            return
        row = replace(self, resources=self.resources.without_gpus())
        fewer = machine.memory // (self.on_cpus + base)
        if row.at_once(machine) <= fewer:
            yield f"compute.{self.kind}.gpus = 0"
        elif fewer:
            yield f"compute.{self.kind}.gpus = 0 and cpus = {-(-machine.cpus // fewer)}"


def dividing(resources: Resources) -> int:
    """How many workers divide what a training holds; 1 where each holds all of it."""
    is_divided = getattr(resources, "sharding", "none") == "full"
    return getattr(resources, "workers", 1) if is_divided else 1


def copied(resources: Resources, trained: int) -> int:
    """Bytes of the second copy of all gradients that workers send, where each holds all of them.

    Args:
        resources: Of a worker.
        trained: Parameters that have gradients.
    """
    is_alone = getattr(resources, "workers", 1) == 1 or dividing(resources) > 1
    return 0 if is_alone else FP32 * trained


def gigabytes(size: int) -> str:
    """A size for people."""
    if size >= 1e9:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size / 1e3:,.0f} kB"


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "< 1 s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
