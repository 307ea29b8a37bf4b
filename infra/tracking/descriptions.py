"""Descriptions as MLflow's pages show them and its databases hold them."""

import re
from collections.abc import Callable

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

ROOM = "\N{NO-BREAK SPACE}" * 3
DESCRIPTION_LENGTH = 5000
"""Letters of a version's description in MLflow's tables, which SQLite alone does not heed."""
CUT = "\n... The rest is in the files of this version's model."
BETWEEN_CELLS = re.compile(r"(?<=\S )\| (?=\S)(?!:?-+:? )")
"""Where a cell begins, but for the first of a line and the rule under the header."""
SHORT_CELL = re.compile(r"(?<=\| )[^|`\[]{1,26}(?= \|)")
"""One that is kept on a line: ``llama.cpp 2026.10.11549``; no code, no link."""
SIGN = re.compile(r"(?<![^\s\N{NO-BREAK SPACE}])-(?=\d)|(?<=\de)-(?=\d)")
"""A minus, of a number or of its exponent."""


def with_room(markdown: str) -> str:
    """Markdown whose tables keep their columns apart and short cells whole: MLflow's pages give
    them no room, and break a number after its sign.

    Done again, it changes nothing.
    """
    lines = markdown.split("\n")
    return "\n".join(_with_room(line) if line.startswith("|") else line for line in lines)


def described(call: Callable[..., ModelVersion], markdown: str) -> ModelVersion:
    """Call MLflow with a description: its beginning, where the database has no room for all."""
    text = with_room(markdown)
    try:
        return call(description=text)
    except MlflowException:
        if len(text) <= DESCRIPTION_LENGTH:
            raise
        return call(description=_cut_to_fit(text))


def _cut_to_fit(markdown: str) -> str:
    """Its first lines, in so many letters as every database that MLflow knows has room for."""
    kept = markdown[: DESCRIPTION_LENGTH - len(CUT)]
    return kept[: kept.rfind("\n") + 1] + CUT


def _with_room(row: str) -> str:
    return BETWEEN_CELLS.sub(f"| {ROOM}", SHORT_CELL.sub(_whole, row))


def _whole(cell: re.Match[str]) -> str:
    return SIGN.sub("\N{NON-BREAKING HYPHEN}", cell[0]).replace(" ", "\N{NO-BREAK SPACE}")
