"""The grid of ways to join strangers: shown where people look, and written as a page."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from prefect.artifacts import create_table_artifact

from flows.pages.comparison import FOLDER, ROWS, TABLE
from flows.pages.model import key_of, publish_pictures
from flows.running.session import FlowSession
from infra.recipe.schema import SYMPHONY, Recipe, recipe_yaml
from upcycle_core.evaluation.text.ablation import (
    LEGEND,
    ablation_lines,
    draw_ablation,
    markdown_ablation,
)

SIMILARITY = "similarity"
"""In the workspace: how alike experts are, layer by layer."""

PAGE = """\
# {name}: ways of joining models that share no seed

Made by

```
python -m flows.compare {files} {options}--out docs/results
```

{models}

{table}

{legend}{spread}

![Perplexity and score of every row, as joined and trained]({name}.png)

{similarity}
Every number, each seed's and each domain's too, is in [{name}.json]({name}.json).

## The recipe

```yaml
{recipe}
```
"""


def publish(session: FlowSession) -> None:
    """Show the table and the plots in the workspace, Prefect and MLflow."""
    workspace, report = session.workspace, session.workspace.path("report")
    rows = json.loads((report / "metrics.json").read_text())["ablation"]
    workspace.path(FOLDER).mkdir(exist_ok=True)
    workspace.path(ROWS).write_text(json.dumps(rows, indent=1) + "\n")
    seconds = session.timings()["wall"]
    text = f"\n{(report / 'table.txt').read_text()}\nTime in the flow: {seconds:.0f} s\n"
    text += f"Report  {report / 'report.html'}\n"
    workspace.path(TABLE).write_text(text)
    head, *lines = ablation_lines([rows])
    create_table_artifact(
        key=key_of(f"{session.recipe.name}-ablation"),
        table=[dict(zip(head, line, strict=True)) for line in lines],
        description="Ways of joining models that share no seed, as joined and after training.",
    )
    publish_pictures(session.recipe.name, [report / "ablation.png"])
    for state in ("before", "after"):
        known = {name: row[state] for name, row in rows.items() if row[state] is not None}
        session.run.log_metrics(
            {f"normalised_average/{state}/{n}": s["normalised_average"] for n, s in known.items()}
        )
    session.run.log_artifacts(report, "report")


def write_page(
    recipe: Recipe,
    files: Sequence[str],
    changes: Sequence[str],
    *,
    seeds: Sequence[int],
    workspaces: Sequence[Path],
    out: Path,
) -> None:
    """Write ``NAME.md``, ``.json`` and the pictures.

    Args:
        recipe: What was compared.
        files: The recipe's files, as named in the command.
        changes: Settings that the command changed.
        seeds: Its seeds.
        workspaces: Where each seed was made.
        out: The folder.
    """
    runs = [json.loads((workspace / ROWS).read_text()) for workspace in workspaces]
    out.mkdir(parents=True, exist_ok=True)
    name = recipe.name
    draw_ablation(runs[0], out / f"{name}.png", highlight=(SYMPHONY,))
    content = {"recipe": name, "seeds": list(seeds), "runs": runs}
    (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    options = f"--seeds {' '.join(map(str, seeds))} " if len(seeds) > 1 else ""
    # The folder is the reader's own.
    shown = ["folder=FOLDER" if change.startswith("folder=") else change for change in changes]
    options += "".join(f"--set {change} " for change in shown)
    many = len(seeds) > 1
    page = PAGE.format(
        name=name,
        files=" ".join(files),
        options=options,
        models=_models(recipe),
        table=markdown_ablation(runs),
        legend=LEGEND,
        spread=f" Mean ± deviation over {len(seeds)} seeds; the picture is the first's."
        if many
        else "",
        similarity=_similarity(name, workspaces[0] / SIMILARITY, out),
        recipe=recipe_yaml(recipe, KEYS).rstrip(),
    )
    (out / f"{name}.md").write_text(page)


KEYS = ("domains", "outside", "seed_model", "experts", "symphony", "moe", "post_training")


def _models(recipe: Recipe) -> str:
    shape, training = recipe.seed_model.shape, recipe.experts.training
    text = f"{len(recipe.domains)} models of the {shape.family} family, hidden size "
    text += f"{shape.hidden_size}, {shape.layers} layers, each trained from random weights of its "
    text += f"own on {training.tokens:,} tokens of a mixture of its own"
    if recipe.outside:
        text += f"; {', '.join(recipe.outside)} is text that no model, alignment or training sees"
    return text + "."


def _similarity(name: str, folder: Path, out: Path) -> str:
    """The analysis of one run, with its pictures copied beside the page."""
    page = folder / "similarity.md"
    if not page.exists():
        return ""
    text = page.read_text().replace("\n## ", "\n### ").replace("# How alike", "## How alike", 1)
    for picture in sorted(folder.glob("*.png")):
        shutil.copyfile(picture, out / f"{name}-{picture.name}")
        text += f"\n![{picture.stem.replace('_', ' of ')}]({name}-{picture.name})\n"
    return text + "\n"
