"""A page of results for others to read: what it shows, and what it was made with.

What writes one in this folder is given the command that ends with it, and the workspaces of the
command's runs, one a seed.
"""

import re
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.recipe.schema import Recipe, recipe_yaml
from upcycle_core.evaluation.report.files import write_json, write_markdown_page
from upcycle_core.evaluation.report.parts import Code, Report, Section

ABSOLUTE = re.compile(r"(?<![\w./:}~-])/(?:[^/\s'\",\]]+/)+")
"""The folders of an absolute path; ``models:/NAME``, ``s3://...`` and ``{folder}/...`` are none."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line that ends with a page.

    Args:
        flow: Its module below ``flows``.
        recipe: What it ran.
        files: The recipe's files, as they were named.
        changes: Of ``--set``.
        seeds: Of ``--seeds``; none where it was not given.
        out: Of ``--out``: the page's folder.
    """

    flow: str
    recipe: Recipe
    files: Sequence[Path]
    changes: Sequence[str] = ()
    seeds: Sequence[int] = ()
    out: Path

    @classmethod
    def of(cls, flow: str, recipe: Recipe, chosen: Namespace) -> "Command":
        """The command of parsed arguments."""
        return cls(
            flow=flow,
            recipe=recipe,
            files=[chosen.recipe, *chosen.add],
            changes=chosen.set,
            seeds=getattr(chosen, "seeds", None) or (),
            out=chosen.out,
        )

    def __str__(self) -> str:
        """As others can type it: where folders are the reader's own, it says FOLDER."""
        words = ["python", "-m", f"flows.{self.flow}", *map(str, self.files)]
        words += ["--seeds", *map(str, self.seeds)] if self.seeds else []
        for change in self.changes:
            shown = "folder=FOLDER" if change.startswith("folder=") else _of_any_machine(change)
            words += ["--set", shown]
        return shlex.join([*words, "--out", "FOLDER" if self.out.is_absolute() else str(self.out)])


def write_page(
    command: Command,
    name: str,
    title: str,
    sections: Sequence[Section],
    *,
    keys: Sequence[str],
    numbers: Mapping[str, object] | None = None,
) -> None:
    """Write ``NAME.md`` with its pictures, and ``NAME.json``; at the page's end stands the recipe.

    Args:
        command: What made it.
        name: Of the page.
        title: What it is about.
        sections: What it shows.
        keys: Of the recipe: those that are shown.
        numbers: Everything that was measured; None if ``NAME/metrics.json`` has it.
    """
    file = f"{name}/metrics.json" if numbers is None else f"{name}.json"
    if numbers is not None:
        write_json(command.out / file, numbers)
    ending = [
        Section("", [f"Every number, each seed's and each domain's too, is in [{file}]({file})."]),
        Section("The recipe", [Code(_of_any_machine(recipe_yaml(command.recipe, keys)), "yaml")]),
    ]
    report = Report(title, [*sections, *ending], str(command))
    write_markdown_page(report, command.out / f"{name}.md")


def _of_any_machine(text: str) -> str:
    """``text`` with FOLDER for the folders of absolute paths, which are the reader's own."""
    return ABSOLUTE.sub(r"FOLDER/", text)
