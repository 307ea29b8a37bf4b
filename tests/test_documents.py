"""What people read: links lead somewhere, and results have their numbers."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
RESULTS = ROOT / "docs" / "results"


def anchors(document: Path) -> set[str]:
    """The names that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for link in LINK.findall(document.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_table_of_simoe_has_the_numbers_of_its_files():
    rows = json.loads((RESULTS / "simoe" / "simoe" / "metrics.json").read_text())["rows"]
    text = (RESULTS / "simoe.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|") and "±" in line]
    printed = [[cell.strip() for cell in line.split("|")[4:6]] for line in lines]
    expected = [
        [
            f"{100 * score['mean']:.1f} ± {100 * score['deviation']:.1f}"
            for score in (rows[row][split]["exact_match"] for split in ("seen", "unseen"))
        ]
        for row in (
            *("full-finetune", "sparse-upcycling", "btx", "simoe"),
            *("ffn-only", "no-orthogonality", "no-sparsity", "token-routing"),
        )
    ]
    assert printed == expected


def test_what_k_costs_is_said_with_the_numbers_of_the_sweep():
    found = json.loads((RESULTS / "five-domains.json").read_text())
    k = {int(k): f"{score:.1f}" for k, score in found["sweeps"]["top_k"]["dume"]}
    text = (RESULTS / "five-domains.md").read_text()
    assert f"At k = 2 it has {k[2]} without finetuning" in text
    [plus] = re.findall(r"^\| DUME\+ .*$", text, re.MULTILINE)
    assert plus.split("|")[7].strip().startswith(k[2])
