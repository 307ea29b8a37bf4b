"""The champion at work: judged in this run, on the same text and the same tasks."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from infra.cluster.compute import run_pieces
from infra.cluster.pieces import Done, Piece
from infra.cluster.progress import progress_file
from infra.tracking.records import Version
from infra.tracking.registry import Registry
from tasks.engine.remembered import Remembered
from tasks.engine.reporting import PieceWatch
from tasks.engine.stage import Session
from tasks.engine.workspace import PROVENANCE, fingerprint
from tasks.release.history import catch_up
from tasks.release.versions import MODEL_TAG
from tasks.scoring.answers import Answered, Answers
from tasks.scoring.evaluation import champion_piece, heldout_file
from tasks.scoring.room import room_of
from tasks.scoring.task_scores import read_scores, task_piece
from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.tasks.items import Item
from upcycle_core.evaluation.tasks.score import TaskScore

CHAMPION = "champion"
"""Its row in tables."""


@dataclass(frozen=True)
class Champion:
    """The registered version that a new model has to beat.

    Args:
        session: The recipe at work.
        registry: Where its files are.
        version: Its version.
        directory: Where its files are when they are needed: read, never written to.
    """

    session: Session
    registry: Registry
    version: Version
    directory: Path

    @property
    def is_own(self) -> bool:
        """Whether it is the workspace's own model, to the byte."""
        return self.session.workspace.has_digest("model", self.version.tags.get(MODEL_TAG))

    def perplexities(self, heldout: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """On this run's held-out text, per token of this run's tokenizer.

        Args:
            heldout: {domain: scored tokens and bytes} of this run's own models.
        """
        recipe, workspace = self.session.recipe, self.session.workspace
        arguments = {
            "model": self.directory,
            "tokenizer": workspace.path("tokenizer"),
            "documents": {d: workspace.path(heldout_file(d)) for d in recipe.domains},
            "corpora": {d: workspace.path(f"corpora/{d}/heldout") for d in recipe.domains},
            "config": recipe.evaluation.measuring,
            "bos": recipe.corpus.bos,
            "device": recipe.compute.evaluation.device,
            "room": room_of(recipe.compute, "evaluation"),
            "reference": heldout,
        }
        piece = Piece(
            name=CHAMPION,
            function=champion_piece,
            arguments=arguments,
            each=("corpora", "documents", "reference"),
        )
        remembered = Remembered(workspace, CHAMPION, models=self._digests)
        found = remembered.known_parts(piece)
        if keys := [key for key in piece.keys if key not in found]:
            found |= self.run(piece.only(keys), f"{workspace.digest('report')}").result
        remembered.learn(piece, found)
        remembered.keep()
        return {domain: found[domain] for domain in recipe.domains}

    def tasks(self) -> tuple[dict[str, TaskScore], list[Item]]:
        """Its scores on this run's tasks, and every item."""
        recipe, workspace = self.session.recipe, self.session.workspace
        task_sets = {name: workspace.path(f"task_sets/{name}") for name in recipe.tasks}
        # What this run's own model was scored with decides what the champion's scores are.
        mark = workspace.digest(f"task_scores/{recipe.method}")

        def ask(some: Piece) -> Answered:
            return read_scores(
                self.run(replace(some, each=()), f"{mark}", kind="task_evaluation").path
            )

        answers = Answers(workspace, CHAMPION, models=self._digests)
        return answers.of(task_piece(recipe, [self.directory], task_sets), ask)

    @property
    def _digests(self) -> dict[Path, str]:
        """Of its files, where it was registered by a workspace."""
        tag = self.version.tags.get(MODEL_TAG)
        return {} if tag is None else {self.directory: tag}

    def run(self, piece: Piece, mark: str, *, kind: str = "evaluation") -> Done:
        """Run a piece on a copy of its files.

        Args:
            piece: What to run.
            mark: Names what decides the result.
            kind: Of the work, as in ``compute.KIND``.
        """
        workspace = self.session.workspace
        # Another registered model, or another registry, has a version of the same number.
        which = fingerprint({"version": self.version.reference, "model": self.version.model_id})
        if not self.directory.exists():
            self._fetch()
        self.session.log(f"evaluating the champion, {self.version.reference}, beside this model")
        directory = workspace.pieces / f"champion-{which}-{mark}"
        watch = PieceWatch(
            {piece.name: progress_file(directory, piece.name)},
            label="register",
            item=CHAMPION,
            log=self.session.log,
            recorder=None,
            show=self.session.show,
        )

        def look() -> None:
            self.session.check()
            watch()

        done = run_pieces(
            [piece],
            directory=directory,
            resources=self.session.recipe.compute.of(kind),
            label="register",
            watch=look,
            log=self.session.log,
        )
        watch(final=True)
        return done[piece.name]

    def _fetch(self) -> None:
        """Take its files, and hold them against the hashes that they were registered with.

        Raises:
            InputError: They are gone, or are not those that were registered, or it is champion no
                more.
        """
        remedy = "; nothing can be judged beside it: make the one before it champion "
        remedy += f"(flows.rollback {self.version.name}) and run the same command again; or take "
        remedy += "the alias away in MLflow (make up), run the same command again, and set the "
        remedy += "alias champion there to the version that it names"
        try:
            self.registry.lend(self.version.reference, self.directory)
        except (InputError, FileNotFoundError) as error:  # or deleted while they are copied
            said = f"its files cannot be had ({error})"
            if self.registry.pointed(self.version.name, CHAMPION) != self.version.number:
                said = "was champion when it was to be judged beside, and is none any more"
                remedy = "; nothing was registered: run the same command again, which looks anew"
            raise InputError(Fault(CHAMPION, self.version.reference, said + remedy)) from error
        if changed := changed_files(self.directory, self.version.tags.get(MODEL_TAG)):
            shutil.rmtree(self.directory)
            said = f"{', '.join(changed)}: not as registered"
            raise InputError(Fault(CHAMPION, self.version.reference, said + remedy))


def changed_files(directory: Path, digest: str | None) -> list[str]:
    """Files of a registered checkpoint that are not those that its record names.

    Args:
        directory: A copy, with the record that lay beside the model when it was published.
        digest: Of the version: that of what the record names; None of a version of others.

    Returns:
        Their names, that of the record where it is damaged itself; none of a version of others.
    """
    if digest is None:
        return []
    try:
        record = (directory / PROVENANCE).read_bytes()
        named = json.loads(record)["files"]
        if digest not in (fingerprint(named), hashlib.sha256(record).hexdigest()):
            return [PROVENANCE]
    except (OSError, ValueError, KeyError, TypeError):
        return [PROVENANCE]
    found = {name: directory / name for name in named}
    return [n for n, file in found.items() if not file.is_file() or sha256_file(file) != named[n]]


@contextmanager
def standing_champion(session: Session, registry: Registry) -> Iterator[Champion | None]:
    """The champion, if there is one; its copy is gone afterwards."""
    name = session.recipe.registered_name
    version = next((v for v in catch_up(registry, name) if "champion" in v.aliases), None)
    directory = session.workspace.staging / "champion"
    shutil.rmtree(directory, ignore_errors=True)
    try:
        yield None if version is None else Champion(session, registry, version, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
