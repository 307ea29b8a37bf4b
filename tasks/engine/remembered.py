"""Results of pieces that outlive a stage's fingerprint: of those that left no files.

A stage that is run again, because one of many things that it measures is new, asks that one alone:
a piece, or a key of one that computes each apart, as a model's scores on many texts. What any stage
of the workspace has computed is known to all. They lie in ``.results/`` beside the artifacts, and
are no more than a memory: without them the pieces run again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from infra.cluster.memory import Room
from infra.cluster.pieces import Piece, read_record, write_record
from infra.durable import is_whole, read_json, sealed
from tasks.engine.sources import module_digests, package_versions
from tasks.engine.workspace import Workspace, fingerprint

FOLDER = ".results"


class Remembered:
    """What is remembered of one stage's pieces.

    Args:
        workspace: The stage's.
        label: The stage's, with its item.
        models: Digests of models that lie outside the workspace's artifacts, by their place: as
            artifacts they had the same.
    """

    def __init__(
        self, workspace: Workspace, label: str, *, models: Mapping[Path, str] | None = None
    ) -> None:
        self._models = models or {}
        self._workspace = workspace
        self._path = workspace.root / FOLDER / f"{label}.json"
        self._marks: dict[str, tuple[str, Path]] = {}
        self._parts: dict[str, Any] = {}

    def recall(self, pieces: Sequence[Piece], directory: Path) -> list[str]:
        """Let pieces count as finished whose results are known; returns their names."""
        known = self._known()
        recalled = []
        for piece in pieces:
            mark = None if piece.each else self.mark(piece)
            if mark is None:
                continue
            self._marks[mark] = (piece.name, directory)
            if mark in known and read_record(directory, piece.name) is None:
                directory.mkdir(parents=True, exist_ok=True)
                write_record(directory, piece.name, known[mark])
                recalled.append(piece.name)
        return recalled

    def known_parts(self, piece: Piece) -> dict[str, Any]:
        """{key: its result} of a piece with ``each``, as far as it is known."""
        known = self._known()
        marks = {key: self.mark(piece.only([key])) for key in piece.keys}
        return {key: known[mark]["result"] for key, mark in marks.items() if mark and mark in known}

    def learn(self, piece: Piece, result: Mapping[str, Any]) -> None:
        """Remember the whole result of a piece with ``each``, key by key."""
        for key in piece.keys:
            if mark := self.mark(piece.only([key])):
                self._parts[mark] = sealed({"result": result[key]})

    def keep(self) -> None:
        """Remember this run's results in the place of the last one's."""
        records = self._parts | {
            mark: record
            for mark, (name, directory) in self._marks.items()
            if (record := read_record(directory, name)) is not None and not record["left_files"]
        }
        if records:
            self._path.parent.mkdir(exist_ok=True)
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(records, sort_keys=True))
            partial.replace(self._path)

    def mark(self, piece: Piece) -> str | None:
        """What decides its result; None if that cannot be said."""
        try:
            arguments = json.dumps(piece.arguments, default=self._plain)
        except ValueError:
            return None
        return fingerprint(
            {
                "each": piece.each,
                "function": f"{piece.function.__module__}.{piece.function.__qualname__}",
                "arguments": arguments,
                "sources": module_digests(piece.function.__module__),
                "packages": package_versions(),
            }
        )

    def _known(self) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for file in sorted(self._path.parent.glob("*.json")):
            remembered = read_json(file)
            records = remembered.items() if isinstance(remembered, dict) else ()
            known |= {mark: record for mark, record in records if is_whole(record)}
        return known

    def _plain(self, value: object) -> Any:
        """An argument that JSON does not hold: an artifact, by its digest, or a config.

        How much memory there is decides no result.

        Raises:
            ValueError: It is something else.
        """
        if isinstance(value, Path):
            return self._digest(value)
        if isinstance(value, Room):
            return None
        if is_dataclass(value) and not isinstance(value, type):
            return [type(value).__name__, asdict(value)]
        if isinstance(value, Mapping):
            return dict(value)
        raise ValueError(f"{type(value)} has no digest")

    def _digest(self, path: Path) -> list[str | None]:
        """Of a path in a published artifact, or of a model."""
        if path in self._models:
            return ["artifact", self._models[path]]
        if not path.is_relative_to(self._workspace.root):
            raise ValueError(f"{path} is no artifact")
        name = path.relative_to(self._workspace.root).as_posix()
        if name.startswith(".") or self._workspace.artifact_of(name) is None:
            raise ValueError(f"{path} is in no published artifact")
        return ["artifact", self._workspace.digest(name)]
