"""What every stage shares: fingerprint, staging, pieces, publishing.

A stage is what people see. ``@stage`` turns a plain function into one: ``Stage.ensure`` runs it if
its fingerprint is not the one on disk, whoever asks: a Prefect flow, or ``python -m tasks NAME``
for DVC. Nothing else decides what is up to date.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infra.disk import disk_faults
from infra.recipe.schema import Recipe, resolve
from infra.versioning.cache import drop_linked
from infra.versioning.known import Recorded
from tasks.engine.costs import Cost, write_cost
from tasks.engine.params import narrowed, value_at
from tasks.engine.pinned import pinned_faults
from tasks.engine.sources import module_digests, package_versions
from tasks.engine.stage_run import Session, StageRun
from tasks.engine.why import as_recorded_now, differences, in_one_line, upgrades
from tasks.engine.workspace import fingerprint
from upcycle_core.errors import Fault, InputError, raise_faults

Inputs = Callable[[Recipe, str], Iterable[str]]
Params = Sequence[str] | Callable[[Recipe, str], Iterable[str]]
Items = Callable[[Recipe], Iterable[str]]
DAMAGED = "its record is not as it was written"
PLACE = re.compile(r"\{\w+\}")
"""Where an item's name stands in what a stage publishes, and in keys of the recipe."""


@dataclass(frozen=True)
class Stage:
    """A stage: what it reads, what decides its result, and what it publishes.

    Args:
        function: Fills ``StageRun.out``.
        out: What it publishes, below the workspace, the item in braces: ``experts/{domain}``.
        inputs: What it reads, below the workspace.
        params: Dotted keys of the recipe that decide its result, with the same words in braces; or
            what gives them for an item.
        each: What it runs once for: the baselines that are trained, ...; one empty name for a stage
            that runs once, nothing where a recipe has no need of it. By default it runs once a
            domain if ``out`` names ``{domain}``, or else once.
        always: Whether it looks at the world outside the workspace, and so always runs.
        once: Whether what it has made for these settings stays, whatever code and packages become:
            what it was made from may be there no more.
        lasting: Of which items, once a model is built upon, what was made from these inputs with
            these settings stays, whatever code and packages become: those that are trained, which
            an upgrade of ours or of torch would else do again. Of none by default.
        in_parts: Whether the DVC remote holds what it reads in its place: it is put together again
            in about the time that fetching it would take.
    """

    function: Callable[[StageRun], None]
    out: str
    inputs: Inputs
    params: Params
    each: Items | None = None
    always: bool = False
    once: bool = False
    lasting: Callable[[Recipe, str], bool] | None = None
    in_parts: bool = False

    @property
    def name(self) -> str:
        """As in dvc.yaml: a stage is named by what it publishes."""
        return self.out.partition("/")[0]

    @property
    def by_domain(self) -> bool:
        """Whether it publishes something that is one domain's alone."""
        return self.out.endswith(("{domain}", "{parent}"))

    @property
    def by_text(self) -> bool:
        """Whether it makes something of one domain's text, and of nothing that all share."""
        return self.name in ("documents", "experts")

    @property
    def sources(self) -> dict[str, str]:
        """{file: sha256} of the modules that decide its result, relative to the checkout."""
        return module_digests(self.function.__module__)

    def items(self, recipe: Recipe) -> list[str]:
        """The domains, baselines, ... it runs for, or one empty name."""
        if self.each is not None:
            return list(self.each(recipe))
        return list(recipe.domains) if "{domain}" in self.out else [""]

    def keys(self, recipe: Recipe, item: str) -> list[str]:
        """Dotted keys of the recipe that decide the result."""
        keys = self.params(recipe, item) if callable(self.params) else self.params
        deciding = (narrowed(recipe, named(key, item)) for key in keys)
        return list(dict.fromkeys(key for parts in deciding for key in parts))

    def values(self, recipe: Recipe, item: str) -> dict[str, Any]:
        """What the recipe says at those keys."""
        resolved = resolve(recipe)
        return {key: value_at(resolved, key) for key in self.keys(recipe, item)}

    def label(self, item: str) -> str:
        """Its name in DVC: ``experts@law``, ``baselines-btx``, ``task_scores-dume``."""
        # DVC writes @ for the items of one entry; baselines read different things: an entry each.
        mark = "@" if self.out.endswith("{domain}") else "-"
        return f"{self.name}{mark}{item}" if item else self.name

    def artifact(self, item: str) -> str:
        """What it publishes."""
        return named(self.out, item)

    def stays(self, recipe: Recipe, item: str) -> bool:
        """Whether an upgrade alone makes nothing of it anew."""
        is_lasting = self.lasting is not None and self.lasting(recipe, item)
        return is_lasting and recipe.lineage is not None

    def made_from(self, session: Session, item: str) -> dict[str, Any]:
        """What decides the result: digests of inputs, settings, versions, digests of modules.

        Raises:
            InputError: If an input has not been made.
        """
        inputs = sorted(self.inputs(session.recipe, item))
        digests = {name: session.workspace.digest(name) for name in inputs}
        missing = [
            Fault(f"{self.label(item)} needs", name, "has not been made; run its stage first")
            for name, digest in digests.items()
            if digest is None
        ]
        if missing:
            raise InputError(*missing)
        return {
            "stage": self.label(item),
            "inputs": digests,
            "params": self.values(session.recipe, item),
            "packages": package_versions(),
            "sources": self.sources,
        }

    def is_current(self, session: Session, item: str = "") -> bool:
        """Whether what is published is what this recipe, these inputs and this code make.

        Raises:
            InputError: An input has not been made, or a pinned artifact is not there as it was.
        """
        return not self.reasons(session, item)

    def reasons(self, session: Session, item: str = "") -> list[str]:
        """Why it would run now; nothing where what is published is current.

        Raises:
            InputError: An input has not been made, or a pinned artifact is not there as it was.
        """
        if self.always:
            return ["it looks at what lies outside the workspace"]
        artifact = self.artifact(item)
        record = _record(session, self.label(item), artifact)
        if artifact in session.recipe.pinned:
            asked = self.values(session.recipe, item)
            raise_faults(
                pinned_faults(
                    session.recipe, session.workspace, artifact, record=record, asked=asked
                )
            )
            return []
        made_from = self.made_from(session, item)
        if record is None:
            there = session.workspace.path(artifact).exists()
            return ["it is not as it was published" if there else "it has not been made"]
        if self.once and record.get("params") == made_from["params"]:
            return []
        mark = fingerprint(made_from)
        expected = {**made_from, "fingerprint": mark}
        if expected.items() <= record.items():
            return []
        if record.get("fingerprint") == mark:
            return [DAMAGED]
        before = as_recorded_now(record, made_from, session.workspace)
        reasons = differences(before, made_from)
        if self.stays(session.recipe, item):
            newer = upgrades(before, made_from)
            if newer and reasons == newer:
                session.log(f"{self.label(item)}: stays, though {in_one_line(newer)}")
                return []
        if reasons or "packages" in record:
            return reasons or [DAMAGED]
        session.workspace.take_over(artifact, expected)
        session.log(f"{self.label(item)}: taken over; only what is recorded of it is new")
        return []

    def ensure(self, session: Session, item: str = "") -> bool:
        """Run the stage unless it is current; returns whether it ran.

        Raises:
            InputError: An input has not been made, or is damaged.
        """
        label = self.label(item)
        reasons = self.reasons(session, item)
        if not reasons:
            session.log(f"{label}: up to date")
            session.made.add(label)
            return False
        session.log(f"{label} runs: {in_one_line(reasons)}")
        started, made_from = time.monotonic(), self.made_from(session, item)
        raise_faults(_damaged_inputs(session, label, made_from["inputs"]))
        mark = fingerprint(made_from)
        artifact = self.artifact(item)
        out = session.workspace.stage(artifact)
        with (
            disk_faults(label, session.workspace.root),
            session.record(label, made_from) as recorder,
        ):
            try:
                run = StageRun(session, self, item, out=out, mark=mark, recorder=recorder)
                self.function(run)
                run.remembered.keep()
                cost = Cost.together(run.costs)
                write_cost(session.workspace, label, cost)
                if recorder is not None:
                    recorder.log_metrics(asdict(cost))
                session.workspace.publish(out, artifact, {**made_from, "fingerprint": mark})
                if recorder is not None:
                    made = {artifact: session.workspace.digest(artifact)}
                    recorder.log_params({"outputs": made})
                session.whole.add(artifact)
                with session.workspace.linking([artifact]):  # its files may be the pieces' as well
                    shutil.rmtree(run.pieces_directory, ignore_errors=True)
            except BaseException:
                shutil.rmtree(out, ignore_errors=True)
                raise
        session.made.add(label)
        session.log(f"{label}: done in {time.monotonic() - started:.1f} s")
        return True


def stage(
    out: str,
    inputs: Inputs,
    *,
    params: Params = (),
    each: Items | None = None,
    always: bool = False,
    once: bool = False,
    lasting: Callable[[Recipe, str], bool] | None = None,
    in_parts: bool = False,
) -> Callable[[Callable[[StageRun], None]], Stage]:
    """Make a function a stage; see ``Stage``."""
    return lambda function: Stage(
        function, out, inputs, params, each, always, once, lasting, in_parts
    )


def _record(session: Session, label: str, artifact: str) -> dict[str, Any] | None:
    """What made ``artifact``; None if it is absent or damaged, and DVC forgets that damage."""
    workspace = session.workspace
    record = workspace.provenance(artifact)
    if record is None:
        drop_linked(workspace.root, workspace.damaged(artifact))
        Recorded(workspace.root).forget([label])
    else:
        session.whole.add(artifact)
    return record


def _damaged_inputs(session: Session, label: str, inputs: Iterable[str]) -> Iterator[Fault]:
    """What a stage is about to read, no one has looked at in this session, and is damaged."""
    workspace = session.workspace
    for name in inputs:
        artifact = workspace.artifact_of(name)
        if artifact is None or artifact in session.whole:
            continue
        if workspace.provenance(artifact) is None:
            remedy = "is not as it was published; bring it back (dvc pull --force in the "
            remedy += "workspace), or have it made again: flows.dume, or the recipe's own flow"
            yield Fault(f"{label} needs", artifact, remedy)
        else:
            session.whole.add(artifact)


def named(pattern: str, item: str) -> str:
    """``pattern`` with ``item`` for its ``{domain}``, ``{baseline}``, ..."""
    return PLACE.sub(lambda place: item, pattern)


def each(recipe: Recipe, pattern: str) -> Iterator[str]:
    """``pattern`` with every domain's name."""
    return (pattern.format(domain=domain) for domain in recipe.domains)
