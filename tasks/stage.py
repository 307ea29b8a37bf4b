"""What every stage shares: fingerprint, staging, pieces, publishing.

A stage is what people see. ``@stage`` turns a plain function into one: ``Stage.ensure`` runs it if
its fingerprint is not the one on disk, whoever asks: a Prefect flow, or ``python -m tasks NAME``
for DVC. Nothing else decides what is up to date.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from infra.compute import Done, Piece, progress_file, run_pieces
from infra.recipe import Recipe, resolve
from tasks.costs import Cost, cost_of, write_cost
from tasks.reporting import PieceWatch, Recorder
from tasks.workspace import Workspace, disk_faults, fingerprint, take
from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.errors import Fault, InputError

CODE = Path(__file__).resolve().parent.parent
Inputs = Callable[[Recipe, str], Iterable[str]]
Params = Sequence[str] | Callable[[Recipe, str], Iterable[str]]
Per = Literal[
    "domain", "baseline", "model", "variant", "pairing", "outside", "source", "tuned", "recipe"
]


@dataclass
class Session:
    """One recipe at work in one workspace.

    Args:
        recipe: What to make.
        workspace: Where.
        log: Takes a line for people.
        record: Opens the record of a stage's curves; gets the stage's label and what made it.
        spent: When pieces ran (start, end; epoch seconds), by stage.
    """

    recipe: Recipe
    workspace: Workspace
    log: Callable[[str], None]
    record: Callable[[str, Mapping[str, Any]], AbstractContextManager[Recorder | None]] = (
        lambda label, made_from: nullcontext(None)
    )
    spent: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


class StageRun:
    """What the function of a stage sees.

    Args:
        session: The recipe at work.
        stage: The stage.
        item: Its domain, baseline, ...; empty for a stage that runs once.
        out: Empty directory to fill; it is published afterwards.
        mark: Fingerprint of this run.
        recorder: Where curves go.
    """

    def __init__(
        self,
        session: Session,
        stage: "Stage",
        item: str,
        *,
        out: Path,
        mark: str,
        recorder: Recorder | None,
    ) -> None:
        self.session, self.stage, self.item = session, stage, item
        self.recipe = session.recipe
        self.out = out
        self.mark = mark
        self.recorder = recorder
        self.costs: list[Cost] = []

    @property
    def domain(self) -> str:
        """The domain that a stage of one domain runs for."""
        return self.item

    @property
    def pieces_directory(self) -> Path:
        """Where this run's pieces are kept until it is published."""
        return self.session.workspace.pieces / self.mark

    @property
    def models(self) -> Path:
        """Where models from a hub are kept, for all workspaces."""
        return self.session.workspace.root.parent / "models"

    def path(self, artifact: str) -> Path:
        """Where an input is published."""
        return self.session.workspace.path(artifact)

    def run(self, pieces: Sequence[Piece], kind: str) -> dict[str, Done]:
        """Run ``pieces`` on Ray with the resources that ``compute.KIND`` asks for."""
        watch = PieceWatch(
            {piece.name: progress_file(self.pieces_directory, piece.name) for piece in pieces},
            label=self.stage.name,
            item=self.item,
            log=self.session.log,
            recorder=self.recorder,
        )
        done = run_pieces(
            pieces,
            directory=self.pieces_directory,
            resources=getattr(self.recipe.compute, kind),
            label=self.stage.label(self.item),
            watch=watch,
        )
        watch(final=True)
        spans = self.session.spent.setdefault(self.stage.name, [])
        spans += [(piece.started, piece.ended) for piece in done.values()]
        cpus = getattr(self.recipe.compute, kind).cpus
        self.costs += [cost_of(done[piece.name], cpus * piece.workers) for piece in pieces]
        return done

    def run_one(self, function: Callable[..., Any], kind: str, **arguments: Any) -> Any:
        """Run one piece that fills ``self.out``; returns its result."""
        done = self.run([Piece(name="whole", function=function, arguments=arguments)], kind)
        take(done["whole"].path, self.out)
        return done["whole"].result

    def device(self, kind: str) -> str:
        """Where pieces of this kind compute."""
        return "cuda" if getattr(self.recipe.compute, kind).gpus > 0 else "cpu"


@dataclass(frozen=True)
class Stage:
    """A stage: what it reads, what decides its result, and what it publishes.

    Args:
        name: As in dvc.yaml.
        function: Fills ``StageRun.out``.
        out: What it publishes, below the workspace; it names its ``per`` in braces.
        inputs: What it reads, below the workspace.
        params: Dotted keys of the recipe that decide its result, with the same words in braces; or
            what gives them for an item.
        sources: Modules that decide its result, relative to the checkout.
        per: What it runs once for: a domain, a trained baseline, a scored model, ..., the recipe.
        needed: Whether this recipe has it at all.
        always: Whether it looks at the world outside the workspace, and so always runs.
    """

    name: str
    function: Callable[[StageRun], None]
    out: str
    inputs: Inputs
    params: Params
    sources: tuple[str, ...]
    per: Per
    needed: Callable[[Recipe], bool]
    always: bool

    def items(self, recipe: Recipe) -> list[str]:
        """The domains, baselines, ... it runs for, or one empty name."""
        found: dict[Per, Iterable[str]] = {
            "domain": recipe.domains,
            "baseline": (name for name, row in recipe.baselines.items() if row.trains),
            "model": recipe.scored_models,
            "variant": recipe.starts,
            "pairing": dict.fromkeys(recipe.pairings.values()),
            "outside": recipe.outside,
            "source": recipe.compressed,
            "tuned": recipe.tuned,
            "recipe": [""],
        }
        return list(found[self.per]) if self.needed(recipe) else []

    def keys(self, recipe: Recipe, item: str) -> list[str]:
        """Dotted keys of the recipe that decide the result."""
        found = self.params(recipe, item) if callable(self.params) else self.params
        return [named(key, item) for key in found]

    def label(self, item: str) -> str:
        """Its name in DVC: ``experts@law``, ``baselines-btx``, ``task_scores-dume``."""
        # DVC writes @ for the items of one entry; baselines read different things: an entry each.
        mark = "@" if self.per == "domain" else "-"
        return f"{self.name}{mark}{item}" if item else self.name

    def artifact(self, item: str) -> str:
        """What it publishes."""
        return named(self.out, item)

    def made_from(self, session: Session, item: str) -> dict[str, Any]:
        """What decides the result: digests of inputs, recipe values, digests of modules.

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
        values = resolve(session.recipe)
        return {
            "stage": self.label(item),
            "inputs": digests,
            "params": {key: _value_at(values, key) for key in self.keys(session.recipe, item)},
            "sources": {source: sha256_file(CODE / source) for source in self.sources},
        }

    def is_current(self, session: Session, item: str = "") -> bool:
        """Whether what is published is what this recipe, these inputs and this code make."""
        record = session.workspace.provenance(self.artifact(item))
        made_from = self.made_from(session, item)
        return record is not None and record["fingerprint"] == fingerprint(made_from)

    def ensure(self, session: Session, item: str = "") -> bool:
        """Run the stage unless it is current; returns whether it ran."""
        label = self.label(item)
        if not self.always and self.is_current(session, item):
            session.log(f"{label}: up to date")
            return False
        started, made_from = time.monotonic(), self.made_from(session, item)
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
                write_cost(session.workspace, label, Cost.together(run.costs))
                session.workspace.publish(out, artifact, {**made_from, "fingerprint": mark})
                shutil.rmtree(run.pieces_directory, ignore_errors=True)
            except BaseException:
                shutil.rmtree(out, ignore_errors=True)
                raise
        session.log(f"{label}: done in {time.monotonic() - started:.1f} s")
        return True


STAGES: dict[str, Stage] = {}


def stage(
    out: str,
    *,
    inputs: Inputs,
    params: Params = (),
    sources: Sequence[str],
    needed: Callable[[Recipe], bool] = lambda recipe: True,
    always: bool = False,
) -> Callable[[Callable[[StageRun], None]], Stage]:
    """Make a function a stage, named like the function; see ``Stage``.

    A stage whose ``out`` names ``{domain}``, ``{baseline}``, ... runs once for each.
    """

    def register(function: Callable[[StageRun], None]) -> Stage:
        made = Stage(
            name=function.__name__,
            function=function,
            out=out,
            inputs=inputs,
            params=params,
            sources=tuple(sorted(set(sources))),
            per=_per(out),
            needed=needed,
            always=always,
        )
        STAGES[made.name] = made
        return made

    return register


def named(pattern: str, item: str) -> str:
    """``pattern`` with ``item`` for its ``{domain}``, ``{baseline}``, ..."""
    return pattern.format(**dict.fromkeys(get_args(Per), item))


def each(recipe: Recipe, pattern: str) -> Iterator[str]:
    """``pattern`` with every domain's name."""
    return (pattern.format(domain=domain) for domain in recipe.domains)


def _per(out: str) -> Per:
    return next((kind for kind in get_args(Per) if f"{{{kind}}}" in out), "recipe")


def _value_at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values
