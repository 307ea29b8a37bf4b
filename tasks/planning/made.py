"""What of a recipe is made already and stays, as its stages will find it: from records alone.

No artifact is read and nothing is written, so that nobody has to hold the workspace.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.recipe.schema import Recipe
from tasks.data.texts import TEXTS
from tasks.engine.artifacts import FORMS
from tasks.engine.stage import Stage
from tasks.engine.stage_run import Session
from tasks.engine.workspace import Workspace, enclosing, fingerprint
from tasks.living.lineage import life_of, with_parents
from tasks.methods import stages_of
from upcycle_core.errors import InputError

OF_TEXT = {"documents": ".parquet", "corpora": ""}
"""Stages that publish a part for each text of a domain, and what its name ends in."""
MODELS = ("expert", "origin")
"""What the stage ``sources`` looks at of a domain beside its texts."""


@dataclass(frozen=True)
class Aim:
    """What a flow is about to bring up to date.

    Args:
        stages: Of the recipe that it builds: stages, and their items; all by default.
        domains: Whose text is looked at; all by default.
        registers: Stages whose models become versions; all that make one by default.
    """

    stages: Callable[[Recipe], Mapping[Stage, Collection[str]]] | None = None
    domains: Collection[str] | None = None
    registers: Collection[str] | None = None

    def registers_model(self, stage: str) -> bool:
        """Whether what a stage makes becomes a version."""
        return self.registers is None or stage in self.registers

    def items(self, recipe: Recipe) -> dict[Stage, list[str]]:
        """Stages in the order in which data flows, and their items."""
        every = {stage: stage.items(recipe) for stage in stages_of(recipe)}
        if self.stages is None:
            return every
        asked = self.stages(recipe)
        return {
            stage: [item for item in items if item in asked[stage]]
            for stage, items in every.items()
            if stage in asked
        }


EVERYTHING = Aim()


@dataclass(frozen=True)
class Made:
    """What is there.

    Args:
        stays: {stage: items that are there, and would not be made again}
        other: What will be another than it was, below the workspace.
        begun: Bytes that lie in the workspace of what is not finished yet, and is gone on with.
    """

    stays: Mapping[str, Collection[str]]
    other: Collection[str]
    begun: int


class RecordedWorkspace(Workspace):
    """A workspace whose artifacts are taken to be as they were published."""

    def provenance(self, artifact: str) -> dict[str, Any] | None:
        """What made ``artifact``, its files unread; None if it is absent."""
        return self.record(artifact)

    def take_over(self, artifact: str, provenance: Mapping[str, Any]) -> None:
        """Nothing: that is for who holds the workspace."""


def made_before(
    recipe: Recipe, workspace: RecordedWorkspace, changed: Collection[str], aim: Aim = EVERYTHING
) -> Made:
    """What of a recipe is there, and would not be made again.

    What reads something that is another then is made again too. Few things come out of other text
    byte by byte as they were: of documents and tokens the other texts', and copies of given models.

    Args:
        recipe: What is to be made, with its lineage.
        workspace: Its own.
        changed: Of ``changed_outside``.
        aim: What is brought up to date of it.
    """
    session = Session(recipe, workspace, log=lambda text: None)
    other, found, marks = set(changed), {}, list[str]()
    for stage, items in aim.items(recipe).items():
        looked_at = [item for item in items if _is_looked_at(session, stage, item, aim, other)]
        again = [item for item in items if _is_gone(session, stage, item)]
        again += [i for i in looked_at if i not in again and _runs(session, stage, i, other)]
        if not stage.always:  # of it files alone are read, and those that change are known
            marks += [mark for item in again if (mark := _mark(session, stage, item, other))]
            other |= {path for item in again for path in _others(session, stage, item, other)}
        found[stage.name] = [item for item in items if item not in again]
    return Made(found, other, _begun(workspace, marks))


def _is_looked_at(
    session: Session, stage: Stage, item: str, aim: Aim, other: Collection[str]
) -> bool:
    """Whether a flow asks an item that is there whether it is current: of a domain that it leaves
    alone only where a given model takes another form."""
    if not stage.by_text or aim.domains is None or item in aim.domains:
        return True
    return any(path.startswith(f"sources/{FORMS}") for path in _read(session, stage, item, other))


def _is_gone(session: Session, stage: Stage, item: str) -> bool:
    return session.workspace.record(stage.artifact(item)) is None


def _runs(session: Session, stage: Stage, item: str, other: Collection[str]) -> bool:
    """Whether an artifact that is there would be made again, where those of ``other`` are."""
    if stage.always:
        return bool(other)
    if stage.artifact(item) in session.recipe.pinned:  # whether as it was, its flow says
        return False
    return bool(_read(session, stage, item, other)) or not _is_current(session, stage, item)


def _is_current(session: Session, stage: Stage, item: str) -> bool:
    try:
        return stage.is_current(session, item)
    except InputError:  # of an input that is not there
        return False


def _read(session: Session, stage: Stage, item: str, other: Collection[str]) -> set[str]:
    """What of ``other`` a stage reads: what it names lies in it, or the other way round."""
    return {
        path
        for name in stage.inputs(session.recipe, item)
        for path in other
        if path in enclosing(name) or name in enclosing(path)
    }


def _others(session: Session, stage: Stage, item: str, other: Collection[str]) -> set[str]:
    """What of an artifact that is made again is another then."""
    artifact, read = stage.artifact(item), _read(session, stage, item, other)
    parts = {_part(path) for path in read}
    if not parts or not parts <= {*TEXTS, *MODELS} or not _is_current(session, stage, item):
        return {artifact}
    if stage.name in OF_TEXT:  # what is trained on gives the others theirs, where they have none
        texts = {f"{artifact}/{text}{OF_TEXT[stage.name]}" for text in parts & set(TEXTS)}
        return {artifact} if "train" in parts else texts
    # A copy of a given model, which is looked at together with the texts beside it.
    copies = all(name.startswith("sources/") for name in stage.inputs(session.recipe, item))
    return set() if copies and parts <= set(TEXTS) else {artifact}


def _part(path: str) -> str:
    """Which text or model of a domain a path names (``sources/law.json/heldout``); or itself."""
    _, _, part = path.partition("/")[2].partition("/")
    return part.removesuffix(".parquet") or path


def _mark(session: Session, stage: Stage, item: str, other: Collection[str]) -> str | None:
    """What the pieces of a stage that will run are kept under; None where that is not known yet."""
    if _read(session, stage, item, other):
        return None
    try:
        return fingerprint(stage.made_from(session, item))
    except InputError:  # of an input that is not there
        return None


def _begun(workspace: Workspace, marks: Collection[str]) -> int:
    """Bytes of pieces that a stopped flow has left to go on with, and of what is cleared away
    before. What is a link to something published frees nothing."""
    folders = [workspace.staging, *(workspace.pieces / mark for mark in marks)]
    return sum(_sizes(folders))


def _sizes(folders: Collection[Path]) -> Iterator[int]:
    for file in (file for folder in folders for file in folder.rglob("*")):
        try:
            status = file.stat()
        except OSError:  # of a flow that is at work
            continue
        if file.is_file() and status.st_nlink == 1:
            yield status.st_size


def learning(recipe: Recipe, workspace: Workspace, other: Collection[str]) -> Recipe:
    """The recipe with a parent for each expert that learns new text, where a model goes on.

    Flows name them once they have read the text: ``tasks.living.lineage.with_parents``.

    Args:
        recipe: What is to be made, with its lineage.
        workspace: Its own.
        other: What will be another than it was.
    """
    if recipe.lineage is None:
        return recipe
    life = life_of(recipe)
    known = life.modelled(workspace)
    if not known:
        return recipe
    recipe = with_parents(recipe, workspace, led=None)
    assert recipe.lineage is not None
    coming = {
        name: digest
        for name in known
        if (domain := recipe.domains.get(name)) is not None
        and domain.expert is None
        and any(path in enclosing(text) for text in life.texts(recipe, name) for path in other)
        and (digest := workspace.digest(f"experts/{name}")) is not None
    }
    lineage = replace(recipe.lineage, parents={**recipe.parents, **coming})
    return replace(recipe, lineage=lineage)
