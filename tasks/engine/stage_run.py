"""What the function of a stage sees: the recipe at work, its inputs, and Ray for its pieces."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from infra.cluster.compute import run_pieces
from infra.cluster.memory import Room
from infra.cluster.pieces import Done, Piece
from infra.cluster.progress import progress_file
from infra.recipe.schema import Recipe
from tasks.engine.costs import Cost, cost_of
from tasks.engine.remembered import Remembered
from tasks.engine.reporting import PieceWatch, Recorder, Show
from tasks.engine.workspace import Workspace, enclosing, take
from upcycle_core.errors import Fault, InputError

Pieces = Sequence[Piece]


class Declared(Protocol):
    """What a run knows of its stage."""

    @property
    def name(self) -> str:
        """As in dvc.yaml."""

    @property
    def inputs(self) -> Callable[[Recipe, str], Iterable[str]]:
        """What it reads, below the workspace."""

    @property
    def sources(self) -> dict[str, str]:
        """{file: sha256} of the modules that decide its result."""

    def label(self, item: str) -> str:
        """Its name with its item."""

    def artifact(self, item: str) -> str:
        """What it publishes."""

    def items(self, recipe: Recipe) -> list[str]:
        """What it runs for."""


@dataclass
class Session:
    """One recipe at work in one workspace.

    Args:
        recipe: What to make.
        workspace: Where.
        log: Takes a line for people.
        record: Opens the record of a stage's curves; gets the stage's label and what made it.
        show: Takes how far a stage is: its label, percent, and a line about it.
        spent: When pieces ran (start, end; epoch seconds), by stage.
        whole: Artifacts whose files were held against their hashes in this session.
        made: Labels of stages that were found or made up to date in this session.
        stopping: Set when the session ends: stages stop as they look at their pieces.
        began: When it began, on the clock of ``time.monotonic``.
    """

    recipe: Recipe
    workspace: Workspace
    log: Callable[[str], None]
    record: Callable[[str, Mapping[str, Any]], AbstractContextManager[Recorder | None]] = (
        lambda label, made_from: nullcontext(None)
    )
    show: Show = lambda label, share, line: None
    spent: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    made: set[str] = field(default_factory=set)
    stopping: Event = field(default_factory=Event)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.workspace.known.verify = self.recipe.verify

    def check(self) -> None:
        """End the stage that calls, as Ctrl-C ends the main thread.

        Raises:
            KeyboardInterrupt: The session ends.
            InputError: It has worked for longer than the recipe allows.
        """
        if self.stopping.is_set():
            raise KeyboardInterrupt
        self.check_time()

    def check_time(self) -> None:
        """End what calls once the time is over.

        Raises:
            InputError: The session has worked for longer than the recipe allows.
        """
        hours = self.recipe.compute.limit_hours
        if hours is not None and time.monotonic() - self.began > 3600 * hours:
            remedy = "the flow has worked for longer, and ends; what is finished is kept: run the "
            remedy += "same again, or allow it more hours"
            raise InputError(Fault("compute.limit_hours", hours, remedy))


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
        stage: Declared,
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
        self.remembered = Remembered(session.workspace, stage.label(item))
        self._inputs = frozenset(stage.inputs(session.recipe, item))

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
        return self.session.workspace.models

    def path(self, artifact: str) -> Path:
        """Where an input, or a part of one, is published.

        Raises:
            ValueError: The stage does not declare it, so it would decide the result unseen.
        """
        if self._inputs.isdisjoint(enclosing(artifact)):
            raise ValueError(f"{self.stage.label(self.item)} does not declare {artifact}")
        return self.session.workspace.path(artifact)

    def run(self, pieces: Sequence[Piece], kind: str, *, uses_gpu: bool = True) -> dict[str, Done]:
        """Run ``pieces`` on Ray with the resources that ``compute.KIND`` asks for.

        Args:
            pieces: What to run.
            kind: Of the work.
            uses_gpu: Whether they compute where ``device(kind)`` says. Pieces that compute on the
                CPU whatever is asked for are given no GPU: it would be idle, and they would wait
                for each other's.
        """
        self.session.check()
        resources = self.recipe.compute.of(kind)
        if not uses_gpu:
            resources = resources.without_gpus()
        most = len(pieces) * max(1, len(self.stage.items(self.recipe)))  # items run side by side
        pieces = [_among(piece, most) for piece in pieces]
        parts = {p.name: self.remembered.known_parts(p) if p.each else {} for p in pieces}
        asked, pieces = pieces, self._unknown(pieces, parts)
        watch = PieceWatch(
            {piece.name: progress_file(self.pieces_directory, piece.name) for piece in pieces},
            label=self.stage.name,
            item=self.item,
            log=self.session.log,
            recorder=self.recorder,
            show=self.session.show,
        )
        recalled = self.remembered.recall(pieces, self.pieces_directory)
        if recalled:
            label = self.stage.label(self.item)
            known = f"{len(recalled)} of {len(pieces)} pieces"
            self.session.log(f"{label}: {known} are as they were, and are not computed again")

        def look() -> None:
            self.session.check()
            watch()

        label = self.stage.label(self.item)
        done = run_pieces(
            pieces,
            directory=self.session.workspace.pieces_of(label, self.mark),
            resources=resources,
            label=label,
            watch=look,
            log=self.session.log,
        )
        watch(final=True)
        spans = self.session.spent.setdefault(self.stage.name, [])
        spans += [(d.started, d.ended) for name, d in done.items() if name not in recalled]
        self.costs += [
            cost_of(done[piece.name], resources.cpus * piece.workers) for piece in pieces
        ]
        return {piece.name: self._whole(piece, parts[piece.name], done) for piece in asked}

    def _unknown(self, pieces: Sequence[Piece], parts: Mapping[str, Mapping[str, Any]]) -> Pieces:
        """What has to be computed, where ``parts`` of some pieces are known."""
        known = sum(map(len, parts.values()))
        if known:
            every = sum(len(piece.keys) for piece in pieces if piece.each)
            label = self.stage.label(self.item)
            self.session.log(f"{label}: {known} of {every} scores are known")
        left = []
        for piece in pieces:
            keys = [k for k in piece.keys if k not in parts[piece.name]] if piece.each else []
            if keys or not piece.each:
                left.append(piece.only(keys) if piece.each else piece)
        return left

    def _whole(self, piece: Piece, known: Mapping[str, Any], done: Mapping[str, Done]) -> Done:
        """A piece with what was known of it, which is remembered for the next time."""
        if not piece.each:
            return done[piece.name]
        keys = [key for key in piece.keys if key not in known]
        now = time.time()
        computed = done[piece.only(keys).name] if keys else Done(self.out, {}, now, now, 0)
        result = {key: known[key] if key in known else computed.result[key] for key in piece.keys}
        self.remembered.learn(piece, result)
        return replace(computed, result=result)

    def run_one(
        self, function: Callable[..., Any], kind: str, /, *, uses_gpu: bool = True, **arguments: Any
    ) -> Any:
        """Run one piece that fills ``self.out``; returns its result."""
        done = self.done("whole", function, kind, uses_gpu=uses_gpu, **arguments)
        take(done.path, self.out)
        return done.result

    def done(
        self,
        name: str,
        function: Callable[..., Any],
        kind: str,
        /,
        *,
        uses_gpu: bool = True,
        **arguments: Any,
    ) -> Done:
        """Run one piece of several; see ``run``."""
        return self.run([Piece.of(name, function, **arguments)], kind, uses_gpu=uses_gpu)[name]

    def device(self, kind: str) -> str:
        """Where pieces of this kind compute."""
        return self.recipe.compute.of(kind).device


def _among(piece: Piece, count: int) -> Piece:
    """The piece; its room, where it has one, knows how many pieces there are at most."""
    room = piece.arguments.get("room")
    if not isinstance(room, Room):
        return piece
    return replace(piece, arguments={**piece.arguments, "room": replace(room, pieces=count)})
