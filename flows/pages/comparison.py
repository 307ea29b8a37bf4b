"""The page of a comparison: means and deviations over seeds, a plot, the command."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.recipe.schema import Recipe, recipe_yaml
from upcycle_core.evaluation.text.comparison import across_seeds, markdown_comparison
from upcycle_core.evaluation.text.comparison_plot import draw_comparison

FOLDER = "compared"
"""In the workspace: the comparison with what its rows cost on this machine."""
ROWS, TABLE = f"{FOLDER}/rows.json", f"{FOLDER}/table.txt"

PAGE = """\
# {name}: ways of upcycling on equal terms

Made by

```
python -m flows.compare {files}{tokens}{seeds} --out docs/results{folder}
```

Perplexity on held-out text in percent of each domain's own dense expert{spread}; higher is better.
{budget}Tokens count the experts that a row begins with; core time is time times cores, theirs
included; trained, active and all are parameters; peak memory is that of the largest process.

{table}

![Score against compute]({name}-comparison.png)

{statement}

Every number, each seed's too, is in [{name}-comparison.json]({name}-comparison.json).

## The rows

```yaml
{recipe}
```
"""


def write_page(
    recipe: Recipe,
    files: Sequence[Path],
    seeds: Sequence[int],
    runs: Sequence[Mapping[str, Mapping[str, Any]]],
    out: Path,
) -> None:
    """Write ``NAME-comparison.md``, ``.json`` and ``.png``.

    Args:
        recipe: What was compared.
        files: The recipe's files, as named in the command.
        seeds: Its seeds.
        runs: What each seed's run left in ``comparison.json``.
        out: The folder.
    """
    rows = across_seeds(runs)
    out.mkdir(parents=True, exist_ok=True)
    name = f"{recipe.name}-comparison"
    draw_comparison(rows, out / f"{name}.png", highlight="dume")
    content = {"recipe": recipe.name, "seeds": list(seeds), "rows": rows, "runs": list(runs)}
    (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    budget = recipe.comparison.tokens
    page = PAGE.format(
        name=recipe.name,
        files=" ".join(str(path) for path in files),
        tokens=f" --tokens {budget}" if budget else "",
        seeds=f" --seeds {' '.join(map(str, seeds))}" if len(seeds) > 1 else "",
        folder=" --set folder=FOLDER" if recipe.folder else "",
        spread=f", mean ± deviation over {len(seeds)} seeds" if len(seeds) > 1 else "",
        budget=f"Every trained row sees {budget:,} tokens after the seed.\n" if budget else "",
        table=markdown_comparison(rows, seeds=len(seeds)),
        statement="\n".join(f"- {line}" for line in statement(rows, recipe).splitlines()),
        recipe=recipe_yaml(recipe, ("comparison", "baselines")).rstrip(),
    )
    (out / f"{name}.md").write_text(page)


def comparison_section(name: str, out: Path) -> str:
    """The comparison's table for another page of the same recipe; empty if there is none."""
    path = out / f"{name}-comparison.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    table = markdown_comparison(found["rows"], seeds=len(found["seeds"]))
    return f"## Against training\n\n{table}\n\nMore in [{path.stem}.md]({path.stem}.md).\n\n"


def statement(rows: Mapping[str, Mapping[str, Any]], recipe: Recipe) -> str:
    """DUME without training against BTX with it, as it comes out."""
    dume = rows["dume"]["scores"]["average"][0]
    lines = []
    for name, row in recipe.baselines.items():
        if row.method == "btx":
            other = rows[name]["scores"]["average"][0]
            lines.append(
                f"DUME, which trains nothing after the experts, reaches {dume:.1f}; "
                f"{rows[name]['title']}, trained, {other:.1f} ({dume - other:+.1f} for DUME)."
            )
    return "\n".join(lines)
