"""A plan: a row a stage, what all of it needs, and what cannot be."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from infra.cluster.capacity import compute_faults
from infra.recipe.resources import ComputeConfig
from infra.recipe.schema import Recipe
from tasks.engine.artifacts import SEED
from tasks.engine.method import Addition
from tasks.methods import COMPARISON, COMPRESSION, TASKS
from tasks.planning.cached import Cached, cached_models, sources_row
from tasks.planning.certified import certificate_rows
from tasks.planning.ders import compared_row, comparison_rows, compression_rows
from tasks.planning.dume import dume_rows
from tasks.planning.machine import Machine, device_of, remote_directory
from tasks.planning.made import EVERYTHING, Aim, RecordedWorkspace, learning, made_before
from tasks.planning.outside import changed_outside
from tasks.planning.parts import Subjects, as_given, experts_row
from tasks.planning.row import Planned, duration, gigabytes
from tasks.planning.scored import task_rows
from tasks.planning.simoe import rivals_row, simoe_rows
from tasks.planning.subjects import CONFIG, subjects_of
from tasks.planning.symphony import symphony_rows, variants_row
from upcycle_core.errors import Fault, InputError
from upcycle_core.planning.rates import Rates
from upcycle_core.planning.shape import Shape

Rows = Callable[[Recipe, Subjects], Iterable[Planned]]
ROWS: Mapping[str, Rows] = MappingProxyType(
    {"dume": dume_rows, "symphony": symphony_rows, "simoe": simoe_rows}
)
"""What each method's stages need."""
ADDED: tuple[tuple[Addition, Rows], ...] = (
    (COMPARISON, comparison_rows),
    (COMPRESSION, compression_rows),
    (TASKS, task_rows),
)
"""What runs on a finished model."""
BASELINES: Mapping[str, Callable[[Recipe, Subjects, Collection[str]], Planned]] = MappingProxyType(
    {"symphony": variants_row, "simoe": rivals_row}
)
"""What some of a method's own baselines need; those of a comparison are a finished model's."""
HEAD = (
    *("stage", "pieces", "at once", "memory each", "read", "written"),
    *("kept", "while it runs", "time (scaled)", "made"),
)
EXPERTS = "experts"
PLACES = ("where", "when all is made")


@dataclass(frozen=True)
class Plan:
    """What a recipe needs on a machine.

    Args:
        rows: A row a stage.
        machine: What there is.
        base: Bytes of memory of a process that computes nothing yet.
        compute: What pieces ask for.
        copies: Times that what is pushed is kept on this disk: in the workspace, and in DVC's
            remote where that is a directory beside it.
        rates: What a second brings there, where that is known.
        begun: Bytes of what is to come that lie on the disk already.
        has_remote: Whether DVC pushes to a remote at all.
        certificates: What asking readers for the versions needs; they take what room there is.
        linkable: Bytes to come that would be given models' own files, were those linked.
    """

    rows: Sequence[Planned]
    machine: Machine
    base: int
    compute: ComputeConfig
    copies: int
    rates: Rates | None = None
    begun: int = 0
    has_remote: bool = True
    certificates: Sequence[Planned] = ()
    linkable: int = 0

    @property
    def coming(self) -> list[Planned]:
        """What is not made yet."""
        return [kind for row in self.rows if not row.is_done for kind in row.to_come().kinds]

    @property
    def disk(self) -> int:
        """Bytes on this disk when it is done, workspace and remote together.

        A registered version's weights are the workspace's, for as long as it is the newest.
        """
        return sum(row.own + (self.copies - 1) * row.pushed for row in self.rows)

    @property
    def disk_to_come(self) -> int:
        """Bytes that must be free now: what is not made yet, at the fullest moment."""
        return self._to_come(self.machine)

    def _to_come(self, machine: Machine | None) -> int:
        kept = fullest = 0
        for row in self.coming:
            kept += row.own
            fullest = max(fullest, kept + row.holding(machine))
        needed = max(fullest, kept + (self.copies - 1) * self.pushed_to_come)
        return max(0, needed - self.begun)

    @property
    def pushed_to_come(self) -> int:
        """Bytes that DVC's remote lacks of what it will hold; 0 where there is none."""
        return sum(row.pushed for row in self.coming) if self.has_remote else 0

    @property
    def memory(self) -> int:
        """Bytes of memory at the peak, of all pieces to come that run side by side."""
        together = (
            (self.base + row.memory) * row.at_once(self.machine) * row.workers
            for row in self.coming
            if not row.resources.gpus
        )
        alone = (self.base + row.alone for row in self.coming if row.alone)
        return max([*together, *alone], default=0)

    @property
    def gpu_memory(self) -> int:
        """Bytes of one GPU's memory at the peak; 0 where none is asked for."""
        on_gpus = (row for row in self.coming if row.resources.gpus)
        held = (row.memory * row.on_a_gpu(self.machine) for row in on_gpus)
        return max(held, default=0)

    def faults(self, *, is_local: bool = True) -> Iterator[Fault]:
        """All that cannot be, at once.

        Args:
            is_local: Whether pieces run on this machine: a cluster's are not known.
        """
        if is_local:
            machine = self.machine
            there = {"CPU": machine.cpus, "GPU": machine.gpus, "memory": machine.memory}
            yield from compute_faults(self.compute, [there], known=there)
            for row in self.coming:
                yield from row.memory_faults(self.machine, self.base)
        yield from self._disk_faults(self.machine if is_local else None)
        elsewhere = self.machine.remote_disk
        if elsewhere is not None and self.pushed_to_come > elsewhere:
            said = f"{gigabytes(self.pushed_to_come)} to come there, {gigabytes(elsewhere)} free"
            yield Fault("versions.remote", said, "free some space on its disk, or name another")

    def _disk_faults(self, machine: Machine | None) -> Iterator[Fault]:
        """That the home's disk has no room, with what each setting leaves to come."""
        to_come = self._to_come(machine)
        if to_come <= self.machine.disk:
            return
        remedy = "free some space or set UPCYCLE_HOME to a larger disk"
        settings = {
            "versions.remote on another disk": replace(self, copies=1),
            "versions.given_weights = link": replace(self, begun=self.begun + self.linkable),
        }
        for setting, lighter in settings.items():
            left = lighter._to_come(machine)
            if left < to_come:
                remedy += f", or {setting} (then {gigabytes(left)})"
        said = f"{gigabytes(to_come)} to come, {gigabytes(self.machine.disk)} free"
        yield Fault("disk", said, remedy)

    @property
    def seconds(self) -> float | None:
        """How long what is not made yet takes; None where that is not known of a stage."""
        found = self._times()
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if len(known) == len(found) else None

    def _times(self) -> list[float | None]:
        asked = (row for row in self.certificates if not row.is_done)
        return [row.seconds(self.machine, self.rates) for row in (*self.coming, *asked)]

    def table(self) -> str:
        """The rows as Markdown."""
        lines = [f"| {' | '.join(HEAD)} |", f"| --- {'| ---: ' * (len(HEAD) - 1)}|"]
        stages = (kind for stage in self.rows for kind in stage.kinds)
        for row in (*stages, *self.certificates):
            where = " (GPU)" if row.resources.gpus else ""
            base = 0 if row.resources.gpus else self.base
            took, holding = row.seconds(self.machine, self.rates), row.holding(self.machine)
            cells = (
                row.stage,
                str(row.pieces),
                str(row.at_once(self.machine)),
                gigabytes(base + row.memory) + where,
                gigabytes(row.read) if row.read else "",
                gigabytes(row.writes) if row.writes else "",
                gigabytes(row.kept + row.cached) if row.kept + row.cached else "",
                gigabytes(holding) if holding else "",
                "-" if took is None else duration(took),
                "done" if row.is_done else f"{row.made} of {row.items}",
            )
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def places(self) -> str:
        """Where bytes are kept, as Markdown."""
        own, linked, cached = (
            sum(getattr(row, of) for row in self.rows) for of in ("own", "linked", "cached")
        )
        remote = gigabytes(sum(row.pushed for row in self.rows))
        if not self.has_remote:
            remote = "none"
        elif self.copies == 1:
            apart = self.machine.remote_disk is not None
            remote = f"{remote} on another disk" if apart else "not on this disk"
        places = {
            "workspace": gigabytes(own - cached),
            **({"hard links to given models": gigabytes(linked)} if linked else {}),
            **({"models, as safetensors beside it": gigabytes(cached)} if cached else {}),
            "DVC's cache": "hard links of the same",
            "DVC's remote": remote,
            "registry, an older version": gigabytes(sum(row.registered for row in self.rows)),
        }
        lines = [f"| {' | '.join(PLACES)} |", "| --- | ---: |"]
        return "\n".join([*lines, *(f"| {name} | {size} |" for name, size in places.items())])

    def summary(self) -> str:
        """The sums in words."""
        there, gpu = self.machine, ""
        kept = "workspace and remote" if self.copies > 1 else "in the workspace"
        if self.gpu_memory:
            gpu = f"; of a GPU {gigabytes(self.gpu_memory)}, of {gigabytes(there.gpu_memory)}"
        return (
            f"memory: {gigabytes(self.memory)} at the peak, of {gigabytes(there.memory)}{gpu}\n"
            f"disk: {gigabytes(self.disk)} when all is made, {kept}; "
            f"{gigabytes(self.disk_to_come)} to come, {gigabytes(there.disk)} free\n"
            f"time: {self._time()}"
        )

    def line(self) -> str:
        """The sums in one line, for the beginning of a flow."""
        made = sum(row.is_done for row in self.rows)
        if not self.coming:
            return f"plan: nothing is to come, all of {made} stages are made"
        return (
            f"plan: {gigabytes(self.memory)} of memory at the peak, "
            f"{gigabytes(self.disk_to_come)} of disk to come, {made} of {len(self.rows)} stages "
            f"made before, time {self._time()}"
        )

    def _time(self) -> str:
        if self.rates is None:
            return "not known without rates (python -m flows.plan RECIPE measures this machine's)"
        if self.seconds is None:
            known = sum(seconds or 0.0 for seconds in self._times())
            return f"{duration(known)} (scaled), and more: not known of every stage"
        return f"{duration(self.seconds)} (scaled from rates; starts of processes left out)"


def plan(
    recipe: Recipe,
    home: Path,
    machine: Machine,
    *,
    base: int,
    rates: Rates | None = None,
    aim: Aim = EVERYTHING,
) -> Plan:
    """What a recipe needs, before anything of it is made.

    Args:
        recipe: Checked; with its lineage, where a model goes on.
        home: Where workspaces are.
        machine: Where it is to run.
        base: Bytes of a process that computes nothing yet.
        rates: What a second brings there, where that is known.
        aim: What is brought up to date of it.

    Raises:
        InputError: No plan can be made for this method; a model's config.json cannot be read.
    """
    if recipe.method not in ROWS:
        remedy = f"only recipes of {', '.join(ROWS)} can be planned so far"
        raise InputError(Fault("method", recipe.method, remedy))
    workspace = RecordedWorkspace(home / recipe.name)
    changed = set(changed_outside(recipe, workspace, aim.domains))
    made = made_before(recipe, workspace, changed, aim)
    learnt = learning(recipe, workspace, made.other)
    if learnt != recipe:  # what continues an expert is another thing to be made
        recipe, made = learnt, made_before(learnt, workspace, changed, aim)
    subjects = subjects_of(recipe, home / "models")
    shape = as_given(recipe, subjects.shape)
    cached = cached_models(recipe, shape, home / "models")
    found = _asked_rows(recipe, subjects) | {"sources": sources_row(cached)}
    ordered, linkable, links = [], 0, recipe.versions.given_weights == "link"
    for stage, asked in aim.items(recipe).items():
        if not asked:
            continue
        every = stage.items(recipe)
        left = [item for item in asked if item not in made.stays[stage.name]]
        row = found.get(stage.name, Planned(stage.name, len(every), len(every)))
        row = replace(row, items=len(every), made=len(every) - len(left), in_parts=stage.in_parts)
        if row.made and left:
            row = replace(row, rest=_rest(recipe, subjects, stage.name, left))
        linked = _linked(row, recipe, home, shape, left, cached)
        row = linked if links else row
        linkable += 0 if links or not left else linked.to_come().linked
        ordered.append(row.fitted(machine, base))
    is_directory = remote_directory(recipe.versions.remote, home) is not None
    copies = 1 + (is_directory and machine.remote_disk is None)
    pushes = recipe.versions.remote is not None
    begun = made.begun + _brought(ordered, cached)
    versions = [row for row in ordered if row.registered and aim.registers_model(row.stage)]
    certificates = [*certificate_rows(recipe, subjects, versions, machine)]
    return Plan(
        *(ordered, machine, base, recipe.compute, copies, rates, begun, pushes, certificates),
        linkable=linkable,
    )


def _asked_rows(recipe: Recipe, subjects: Subjects) -> dict[str, Planned]:
    """{stage: its row} of the method, and of what runs on its model."""
    found = {row.stage: row for row in ROWS[recipe.method](recipe, subjects)}
    for addition, rows in ADDED:
        if addition.asked(recipe):
            found = {row.stage: row for row in rows(recipe, subjects)} | found
    return found


def _brought(rows: Iterable[Planned], cached: Mapping[str, Cached]) -> int:
    """Bytes of models that are in the cache already, of those whose row is to come."""
    if not any(row.cached and not row.is_done for row in rows):
        return 0
    return sum(model.size for model in cached.values() if model.is_there)


def _rest(recipe: Recipe, subjects: Subjects, stage: str, left: Collection[str]) -> Planned | None:
    """What the items that are to come need, of a stage whose items are not alike."""
    if stage == EXPERTS:
        return experts_row(recipe, subjects.shape, left)
    row = compared_row if COMPARISON.asked(recipe) else BASELINES.get(recipe.method)
    return row(recipe, subjects, left) if row and stage == "baselines" else None


def _linked(
    row: Planned,
    recipe: Recipe,
    home: Path,
    shape: Shape,
    left: Collection[str],
    cached: Mapping[str, Cached],
) -> Planned:
    """A row with what it publishes of given models' own files: of those on the disk of the home,
    whose weights get no other type.

    Args:
        row: A stage's.
        recipe: The recipe.
        home: Where workspaces are.
        shape: Of a given model, in the type that it gets.
        left: Items that are to come.
        cached: Those that are read from the cache, which is on the home's disk.
    """
    given = {
        SEED: {"": recipe.seed_model.model},
        EXPERTS: {name: domain.expert for name, domain in recipe.domains.items()},
    }

    def is_shared(model: str) -> bool:
        if model in cached:
            return cached[model].dtype == shape.dtype
        path = Path(model).expanduser()
        return _is_near(path, home) and Shape.of(path).dtype == shape.dtype

    models = given.get(row.stage, {}).items()
    near = [item for item, model in models if model is not None and is_shared(model)]
    row = replace(row, linked=len(near) * shape.stored)
    if row.rest is None:
        return row
    coming = sum(item in left for item in near)
    return replace(row, rest=replace(row.rest, linked=coming * shape.stored))


def _is_near(model: Path, home: Path) -> bool:
    """Whether a model is a checkpoint on the disk where the home is, or is to be."""
    return (model / CONFIG).is_file() and device_of(model) == device_of(home)
