"""Sizes and scores of every way to store deltas, as a page for others to read."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from infra.recipe.schema import Recipe, recipe_yaml
from tasks.ders.compression import REPORT, row_title

KEYS = ("domains", "seed_model", "experts", "moe", "compression", "baselines")
PAGE = """\
# {name}: experts as one base and light deltas

Made by

```
python -m flows.ders {files} {options}--out docs/results
```

![Normalised average against size, a line a codec]({name}.png)

{tables}
## How alike experts and base are

Cosine of two FFNs, all of their weights in one vector (the paper's Fig. 1), first and last layer.

{pictures}
Every number is in [{name}.json]({name}.json).

## The recipe

```yaml
{recipe}
```
"""


def write_page(
    recipe: Recipe, files: Sequence[str], changes: Sequence[str], *, workspace: Path, out: Path
) -> None:
    """Write ``NAME-ders.md``, ``.json`` and the pictures.

    Args:
        recipe: What was compressed, and how.
        files: The recipe's files, as named in the command.
        changes: Settings that the command changed.
        workspace: Where it was made.
        out: The folder.
    """
    report, name = workspace / "compression" / REPORT, f"{recipe.name}-ders"
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(report / "sweep.png", out / f"{name}.png")
    metrics = json.loads((report / "metrics.json").read_text())
    (out / f"{name}.json").write_text(
        json.dumps({"recipe": recipe.name, **metrics}, indent=1) + "\n"
    )
    pictures = ""
    for row in recipe.compressed:
        title = row_title(recipe, row)
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        shutil.copyfile(report / f"cosine_{slug}.png", out / f"{name}-cosine-{slug}.png")
        pictures += f"![{title}]({name}-cosine-{slug}.png)\n\n"
    # The folder is the reader's own.
    shown = ["folder=FOLDER" if change.startswith("folder=") else change for change in changes]
    page = PAGE.format(
        name=name,
        files=" ".join(files),
        options="".join(f"--set {change} " for change in shown),
        tables=(report / "table.md").read_text(),
        pictures=pictures,
        recipe=recipe_yaml(recipe, KEYS).rstrip(),
    )
    (out / f"{name}.md").write_text(page)
