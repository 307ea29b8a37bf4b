"""The grid of ways to join strangers: shown where people look, and written as a page."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flows.pages.comparison import ROWS, TABLE
from flows.pages.model import log_report, publish_pictures, publish_table
from flows.pages.page import Command, write_page
from flows.running.session import FlowSession
from infra.recipe.schema import Recipe
from tasks.symphony.checks import is_given
from tasks.symphony.variants import SYMPHONY
from upcycle_core.evaluation.report.files import PAGE, TEXT, write_json
from upcycle_core.evaluation.report.parts import Block, Figure, Section
from upcycle_core.evaluation.text.ablation import ablation_figure, ablation_table

SIMILARITY = "similarity"
"""In the workspace: how alike experts are, layer by layer."""
KEYS = ("domains", "outside", "seed_model", "experts", "symphony", "moe", "post_training")


def publish(session: FlowSession) -> None:
    """Show the table and the plots in the workspace, Prefect and MLflow."""
    workspace, report = session.workspace, session.workspace.path("report")
    rows = json.loads((report / "metrics.json").read_text())["ablation"]
    write_json(workspace.path(ROWS), rows)
    seconds = session.timings()["wall"]
    text = f"\n{(report / TEXT).read_text()}\nTime in the flow: {seconds:.0f} s\n"
    workspace.path(TABLE).write_text(f"{text}Report  {report / PAGE}\n")
    publish_table(
        f"{session.recipe.name}-ablation",
        ablation_table([rows]),
        "Ways of joining models that share no seed, as joined and after training.",
    )
    publish_pictures(session.recipe.name, [report / "ablation.png"])
    for state in ("before", "after"):
        known = {name: row[state] for name, row in rows.items() if row[state] is not None}
        session.run.log_metrics(
            {f"normalised_average/{state}/{n}": s["normalised_average"] for n, s in known.items()}
        )
    log_report(session, report, "report")


def write_ablation(command: Command, workspaces: Sequence[Path]) -> None:
    """Write ``NAME.md``, ``.json`` and the pictures."""
    recipe, name = command.recipe, command.recipe.name
    runs = [json.loads((workspace / ROWS).read_text()) for workspace in workspaces]
    picture = ablation_figure(runs[0], name, highlight=(SYMPHONY,))
    write_page(
        command,
        name,
        f"{name}: ways of joining models that share no seed",
        [
            Section("", [_models(recipe), ablation_table(runs), picture]),
            Section("", _similarity(name, workspaces[0] / SIMILARITY)),
        ],
        keys=KEYS,
        numbers={"recipe": name, "seeds": list(command.seeds) or [recipe.seed], "runs": runs},
    )


def _models(recipe: Recipe) -> str:
    """What was joined: given models as they are or trained on, others made here."""
    shape, training = recipe.seed_model.shape, recipe.experts.training
    known = [(name, domain.expert) for name, domain in recipe.domains.items() if is_given(domain)]
    ready = [name for name, expert in known if expert is not None]
    begun = [name for name, expert in known if expert is None]
    tokens = f"on {training.tokens:,} tokens"
    text, given = f"{len(recipe.domains)} models", []
    if len(ready) + len(begun) < len(recipe.domains):
        text += f" of the {shape.family} family, hidden size {shape.hidden_size}, {shape.layers} "
        text += "layers"
        who = "the others" if ready or begun else "each"
        own = "their" if ready or begun else "its"
        given.append(
            f"{who} trained from random weights of {own} own {tokens} of a mixture of {own} own"
        )
    if begun:
        given.insert(0, f"{', '.join(begun)} trained from a given model {tokens}")
    if ready:
        given.insert(0, f"{', '.join(ready)} as given")
    text += f", {'; '.join(given)}"
    if recipe.outside:
        text += f"; {', '.join(recipe.outside)} is text that no model, alignment or training sees"
    return text + "."


def _similarity(name: str, folder: Path) -> list[Block]:
    """The analysis of one run as it lies in its workspace, a level deeper, and its pictures."""
    page = folder / "similarity.md"
    if not page.exists():
        return []
    text = page.read_text().replace("\n## ", "\n### ").replace("# How alike", "## How alike", 1)
    pictures = [
        Figure(
            f"{name}-{picture.stem}",
            picture.stem.replace("_", " of "),
            partial(shutil.copyfile, picture),
        )
        for picture in sorted(folder.glob("*.png"))
    ]
    return [text, *pictures]
