"""What people read: links lead somewhere, commands exist, recipes load, numbers are the code's."""

import json
import math
import re
import shlex
import statistics
from pathlib import Path

import pytest
from transformers import MistralConfig

from benchmarks import closed_form
from flows.running.arguments import ARGUMENTS, load, parser_of
from infra.recipe.reading import load_recipe
from upcycle_core.activations.moments import triangle_size
from upcycle_core.architectures.families import family_of
from upcycle_core.dume.collect import Layout
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.evaluation.text.results import gaps

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
RESULTS = ROOT / "docs" / "results"
README_BYTES = 12_288
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
FOLDERS = "upcycle_core|tasks|flows|infra|tests|benchmarks|recipes|docs"
OWN_PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*")
MODULE = re.compile(r"python -m ((?:flows|tasks|infra|benchmarks)\b[\w.]*)((?:[^`\n\\]|\\\n)*)")
FLAG = re.compile(r"(?<!\S)--[a-z-]+")
TARGET = re.compile(r"(?:^|[`$&] ?|=\S+ )make ([a-z-]+)", re.MULTILINE)
RECIPE = re.compile(r"^```yaml\n(name: .*?)^```$", re.DOTALL | re.MULTILINE)
RECIPES = [
    (document, text) for document in DOCUMENTS for text in RECIPE.findall(document.read_text())
]


HEADED = sorted(ROOT.glob("recipes/**/*.yaml"))
FLOW = re.compile(r"python -m flows\.(\w+)((?: [^`\n]*)?)")
CHANGES = re.compile(r"--set [^\s`]+")
CONTINUED = re.compile(r"\\\n[#\s]*")
MADE = re.compile(r"^`((?:\w+/)+\w+\.\w+)`:$", re.MULTILINE)
"""Files whose text a page gives."""


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def code_of(document: Path) -> list[str]:
    """What a document sets as code: blocks, and words between backticks."""
    return CODE.findall(document.read_text())


def anchors(document: Path) -> set[str]:
    """The names that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document):
    for link in LINK.findall(document.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_is_a_short_door():
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_paths_exist(document):
    """Words in capitals stand for names, ``*`` for any; a page may have one make its own files."""
    made = tuple(MADE.findall(document.read_text()))
    for code in code_of(document):
        for path in OWN_PATH.findall(code):
            if path.startswith(made):
                continue
            pattern = re.sub(r"\b[A-Z]{2,}\b", "*", path.rstrip("./"))
            assert any(ROOT.glob(pattern)), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_exist(document):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for code in code_of(document):
        for target in TARGET.findall(code):
            assert target in targets, f"make {target}"
        for module, arguments in MODULE.findall(code):
            path = ROOT / module.rstrip(".").replace(".", "/")
            files = (path.with_suffix(".py"), path / "__main__.py", path / "commands.py")
            source = "".join(file.read_text() for file in files if file.exists())
            assert source, f"python -m {module}"
            command = module.rstrip(".").removeprefix("flows.")
            options = ""
            if command in ARGUMENTS:
                words = (o for a in parser_of(command)._actions for o in a.option_strings)
                options = " ".join(f'"{word}"' for word in words)
            for flag in FLAG.findall(arguments):
                assert f'"{flag}"' in source + options, f"python -m {module} {flag}"


def commands_of(document: Path) -> list[tuple[str, list[str]]]:
    """A page's flows and their words, or those of a recipe's comments.

    A comment's changes that stand without a command are of the one above, or of the recipe itself.
    """
    if document.suffix == ".md":
        code = CONTINUED.sub(" ", "\n".join(code_of(document)))
        named = [(name, words) for name, words in FLOW.findall(code) if ".yaml" in words]
        return [(name, shlex.split(words, comments=True)) for name, words in named]
    lines = CONTINUED.sub(" ", document.read_text()).splitlines()
    last, found = ("plan", [name_of(document)]), []
    for line in (line.strip(" #") for line in lines if line.lstrip().startswith("#")):
        if command := FLOW.search(line):
            last = (command[1], shlex.split(command[2]))
            found.append(last)
        elif changes := CHANGES.findall(line):
            found.append((last[0], [*last[1], *shlex.split(" ".join(changes))]))
    return found


@pytest.mark.parametrize("document", [*DOCUMENTS, *HEADED], ids=name_of)
def test_commands_are_taken(document):
    """Every key that a command changes exists, and the recipe that comes of it is not refused."""
    made = MADE.findall(document.read_text())
    for command, words in commands_of(document):
        files = {word for word in words if word.endswith(".yaml")}.difference(made)
        if files and "RECIPE" not in words and all(f.startswith("recipes/") for f in files):
            load(parser_of(command).parse_args(words))


@pytest.mark.parametrize(("document", "text"), RECIPES, ids=[name_of(d) for d, _ in RECIPES])
def test_recipes_are_read(document, text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    assert load_recipe(recipe).name == text.split()[1]


def test_readme_shows_a_recipe_of_ready_experts():
    assert ROOT / "README.md" in dict(RECIPES)


def test_every_result_is_listed():
    listed = (RESULTS / "README.md").read_text()
    links = {(RESULTS / link.partition("#")[0]).resolve() for link in LINK.findall(listed)}
    pages = {page.resolve() for page in RESULTS.rglob("*.md")} - {RESULTS / "README.md"}
    assert not {name_of(page) for page in pages - links}


def test_what_three_models_cost_is_what_the_code_makes():
    """Sizes in docs/dume.md, "What it costs", in GB: bf16 weights, fp64 sums of one fold."""
    config = MistralConfig(num_key_value_heads=8, head_dim=128, vocab_size=32768).to_dict()
    family, experts, gigabyte = family_of(config), 3, 1e9
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    inner = config["intermediate_size"]
    dense = sum(map(math.prod, family.tensors(config).values()))
    backbone = sum(map(math.prod, family.tensors(config, ffn=False).values()))
    moe = backbone + experts * (dense - backbone) + layers * hidden * experts
    layout = Layout(hidden, tuple(range(layers)), StatisticsConfig().parts)
    index = 8 * triangle_size(hidden)
    sums = layout.cell_count * layers * index
    headless = dense - config["vocab_size"] * hidden
    made = 2 * (experts * dense + backbone + moe) + experts * sums
    rows = {
        "experts, copied": [2 * experts * dense],
        "backbone |": [2 * backbone],
        "statistics |": [experts * sums],
        "MoE (18.5 billion": [2 * moe],
        "the workspace, sum": [made],
        "DVC remote": [made - 2 * moe],
        "one shard of statistics": [2 * headless + sums + index, 4 * headless + sums + index],
        "adding up the shards": [sums / layers] * 2,
        "evaluating the MoE": [2 * moe, 4 * moe],
        "repairing one expert": [
            32 * inner * (inner + hidden)
            + w * 200_000 * (2 * hidden + inner)
            + 2 * w * dense / layers
            + 64 * inner * hidden
            + 8 * config["vocab_size"] * hidden
            for w in (2, 4)
        ],
    }
    text = (ROOT / "docs" / "dume.md").read_text()
    for start, sizes in rows.items():
        [row] = re.findall(rf"^\| {re.escape(start)}.*$", text, re.MULTILINE)
        printed = re.findall(r"([\d.]+) GB", row)
        assert printed == [f"{size / gigabyte:.1f}" for size in sizes]
    readme = (ROOT / "README.md").read_text()
    one, remote = made / gigabyte, (made - 2 * moe) / gigabyte
    total = f"{one + remote:.0f} GB: workspace {one:.0f}, DVC remote {remote:.0f}"
    assert total in readme
    assert f"Together {one + remote:.0f} GB beside the given models" in text
    assert f"an older version {2 * moe / gigabyte:.0f} more" in readme


def test_the_table_of_simoe_has_the_numbers_of_its_files():
    rows = json.loads((RESULTS / "simoe" / "simoe" / "metrics.json").read_text())["rows"]
    text = (RESULTS / "simoe.md").read_text().partition("## Ablations")[0]
    lines = [line for line in text.splitlines() if line.startswith("|") and "±" in line]
    printed = [
        [cell.strip("* ").split(" of ")[0] for cell in line.split("|")[4:7]] for line in lines
    ]
    order = (
        *("full-finetune", "frozen-embeddings", "lora", "sparse-upcycling", "btx", "simoe"),
        *("as-printed", "raw-states", "no-balance", "stay-closed", "no-zeros"),
    )
    expected = []
    for row in order:
        effective = rows[row]["effective_experts"]
        scores = [rows[row][split]["exact_match"] for split in ("seen", "unseen")]
        said = [f"{100 * own['mean']:.1f} ± {100 * own['deviation']:.1f}" for own in scores]
        expected.append([f"{effective['mean']:.1f}" if effective else "", *said])
    assert printed == expected


def test_the_tables_of_what_simoe_is_made_of_have_the_numbers_of_their_files():
    text = (RESULTS / "simoe.md").read_text().partition("## Ablations")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if re.match(r"\| [^-|]", line)]
    printed = [[cell.strip("* ") for cell in line.split("|")[2:-1]] for line in lines]
    orders = {
        "simoe-ablations": "simoe ffn-only no-orthogonality no-sparsity token-routing",
        "simoe-sweeps": "beta-0 simoe beta-5e-5 beta-5e-4 tau-0 tau-50 tau-90 union",
    }
    expected = []
    for name, order in orders.items():
        rows = json.loads((RESULTS / "simoe" / name / "metrics.json").read_text())["rows"]
        for row in (rows[key] for key in order.split()):
            sizes = [row[f"{kind}_parameters"]["mean"] for kind in ("total", "trained")]
            own = [f"{size / 1e6:.2f} M" for size in sizes]
            own.append(f"{row['effective_experts']['mean']:.1f} of 8")
            for split in ("seen", "unseen"):
                scores = [100 * run[split]["exact_match"] for run in row["runs"]]
                own.append(f"{statistics.mean(scores):.1f}")
                own[-1] += f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
            expected.append(own)
    assert printed == expected


def tuned_real():
    """The rows of SmolLM2's three seeds, in the order of the page, and the page's tables."""
    folders = [RESULTS / "simoe" / f"simoe-real{end}" for end in ("", "-1", "-2")]
    seeds = [json.loads((f / "metrics.json").read_text())["rows"] for f in folders]
    text = (RESULTS / "simoe.md").read_text().partition("## SmolLM2-135M")[2].partition("\n## ")[0]
    lines = [
        line
        for line in text.splitlines()
        if line.startswith(("| Pre", "| Full", "| LoRA", "| **SIM", "| SIM", "| Spa", "| BTX"))
    ]
    printed = [[cell.strip("* ") for cell in line.split("|")[2:-1]] for line in lines]
    order = ("seed", "full-finetune", "lora-equal", "simoe", "sparse-upcycling", "btx")
    rows = [[seed[row] for seed in seeds] for row in order if row in seeds[0]]
    assert len(rows) == len(seeds[0])
    return rows, printed[: len(rows)], printed[len(rows) :]


def test_the_table_of_a_real_model_tuned_has_the_numbers_of_its_files():
    rows, printed, _ = tuned_real()
    expected = []
    for row in rows:
        sizes = [
            statistics.mean(seed[f"{kind}_parameters"]["mean"] for seed in row)
            for kind in ("total", "trained")
        ]
        own = [f"{size / 1e6:.1f} M" if size else "0" for size in sizes]
        used = [seed["effective_experts"] for seed in row]
        own.append(f"{statistics.mean(u['mean'] for u in used):.1f} of 8" if used[0] else "")
        for split in ("seen", "unseen"):
            for metric in ("exact_match", "rouge_l"):
                scores = [100 * seed[split][metric]["mean"] for seed in row]
                own.append(f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}")
        own.append(", ".join(f"{100 * seed['unseen']['exact_match']['mean']:.1f}" for seed in row))
        expected.append(own)
    assert printed == expected


def test_the_lora_that_is_as_large_has_the_numbers_of_its_file():
    found = json.loads((RESULTS / "simoe" / "simoe-real-lora.json").read_text())
    text = " ".join((RESULTS / "simoe.md").read_text().split())
    unseen = [found[f"seed {seed}"]["scores"]["unseen"]["categories"] for seed in range(3)]

    def three(metric, *, real=False):
        own = [
            statistics.mean(100 * s[metric] for n, s in seed.items() if not real or n[0].isupper())
            for seed in unseen
        ]
        return "{:.1f}, {:.1f} and {:.1f}".format(*own)

    whole = f"it has {three('exact_match')} exact match and {three('rouge_l')} ROUGE-L on unseen"
    assert whole in text
    means = [
        statistics.mean(statistics.mean(100 * s[metric] for s in seed.values()) for seed in unseen)
        for metric in ("exact_match", "rouge_l")
    ]
    assert "a mean of {:.1f} and {:.1f} against 26.4 and 29.9".format(*means) in text
    assert f"On the real categories it has {three('rouge_l', real=True)} ROUGE-L" in text
    assert {own["trained_parameters"] for own in found.values()} == {107_458_560}


def test_real_categories_and_families_have_the_means_of_their_files():
    rows, _, printed = tuned_real()

    def means(row, metric, *, is_real):
        """Of each seed, over categories: real ones have names with a capital."""
        for seed in row:
            found = seed["unseen"]["categories"].items()
            own = [100 * s[metric]["mean"] for n, s in found if n[0].isupper() == is_real]
            assert len(own) == (4 if is_real else 12)
            yield statistics.mean(own)

    expected = [
        [
            f"{statistics.mean(means(row, 'exact_match', is_real=True)):.1f}",
            f"{statistics.mean(means(row, 'rouge_l', is_real=True)):.1f}",
            ", ".join(f"{score:.1f}" for score in means(row, "rouge_l", is_real=True)),
            f"{statistics.mean(means(row, 'exact_match', is_real=False)):.1f}",
            f"{statistics.mean(means(row, 'rouge_l', is_real=False)):.1f}",
        ]
        for row in rows
    ]
    assert printed == expected


def test_what_k_costs_is_said_with_the_numbers_of_the_sweep():
    found = json.loads((RESULTS / "five-domains.json").read_text())
    k = {int(k): f"{score:.1f}" for k, score in found["sweeps"]["top_k"]["dume"]}
    text = (RESULTS / "five-domains.md").read_text()
    assert f"At k = 2 it has {k[2]} without finetuning" in text
    [plus] = re.findall(r"^\| DUME\+ .*$", text, re.MULTILINE)
    assert plus.split("|")[7].strip().startswith(k[2])


JOINED = {
    "## The demo": ["demo", "demo-head", "demo-equation-4"],
    "## Five real domains": ["five-domains", "five-domains-head", "five-domains-long"],
    "## SmolLM2-135M": ["smollm2", None, "smollm2-million"],
    "## Other regressions": [None],
    "## A second repair": ["routed"],
}
"""The page's sections, and the file of each of their tables; None where the page alone has it."""


def rows_of(text: str, head: str) -> list[list[list[str]]]:
    """The cells of each table that begins with ``head``, line by line."""
    tables = re.findall(rf"^{re.escape(head)}.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = [table.splitlines() for table in tables]
    return [[[c.strip() for c in line.split("|")[1:-1]] for line in table] for table in lines]


@pytest.mark.parametrize("section", JOINED)
def test_the_tables_of_joining_in_closed_form_have_the_numbers_of_their_files(section):
    text = (RESULTS / "closed-form.md").read_text()
    [part] = re.findall(rf"^{section}.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    for name, rows in zip(JOINED[section], rows_of(part, "| | Oracle "), strict=True):
        found = json.loads((RESULTS / "closed-form" / f"{name}.json").read_text()) if name else {}
        found, seed = found.get("five-domains-long", found), ""
        for label, *cells in rows:
            seed = label[: label.index(": ") + 2] if label.startswith("seed ") else seed
            oracle, dume, _, backbone, router = (float(c) for c in (*cells[:2], "0", *cells[3:5]))
            assert (backbone, router) == pytest.approx((100 - oracle, oracle - dume), abs=0.0101)
            if name:
                row = found[label if label.startswith("seed ") else seed + label]
                figures = {**row, **closed_form.gaps(row)}
                shown = [c for c in closed_form.SHOWN if c != closed_form.PERPLEXITY]
                said = [f"{figures[c]:.2f}" if c in figures else "–" for c in shown]
                assert cells == said[: len(cells)]


@pytest.mark.parametrize(
    "name",
    [
        *("demo-comparison", "demo-joined-comparison"),
        *("five-domains-comparison", "five-domains"),
    ],
)
def test_gaps_and_perplexities_are_those_of_the_page_s_file(name):
    found = json.loads((RESULTS / f"{name}.json").read_text())
    text = (RESULTS / f"{name}.md").read_text()
    scores = found.get("normalised") or {r: own["scores"] for r, own in found["rows"].items()}
    means = {r: own["average"] for r, own in scores.items() if "average" in own}
    [said] = gaps({r: m["mean"] if isinstance(m, dict) else m[0] for r, m in means.items()})
    assert said in text
    runs = [
        run.get("perplexity") or {row: own["perplexity"] for row, own in run.items()}
        for run in found["runs"]
    ]
    [rows] = rows_of(text.partition("\n## Perplexity\n")[2].partition("\n## ")[0], "| Method ")
    assert [cells for _, *cells in rows] == [
        [f"{statistics.mean(run[row][d] for run in runs):.2f}" for d in own]
        for row, own in runs[0].items()
    ]
