"""The page of a grid of joined models: its command, its table, its pictures."""

import json

import pytest

from flows.ablation_page import SIMILARITY, write_page
from flows.comparison_page import FOLDER, ROWS
from infra.reading import validate
from upcycle_core.evaluation.ablation import Joined, ablation_metrics

TEXT = {"files": ["{folder}/x.txt"]}
RECIPE = {
    "name": "strangers",
    "folder": "/private/texts",
    "domains": {"code": {"train": TEXT}, "law": {"train": TEXT}},
    "outside": {"poems": TEXT},
    "symphony": {},
}
EXPERTS, OUTSIDE = {"code": 10.0, "law": 20.0}, {"poems": 40.0}


def rows(scale):
    before = {"code": 100.0 * scale, "law": 100.0 * scale, "poems": 90.0}
    found = {"symphony": Joined(title="This recipe", before=before, parameters=(4, 2))}
    return ablation_metrics(EXPERTS, found, outside=OUTSIDE)


@pytest.fixture
def pages(tmp_path):
    workspaces = []
    for seed, scale in enumerate((1.0, 2.0)):
        workspace = tmp_path / f"seed-{seed}"
        (workspace / FOLDER).mkdir(parents=True)
        (workspace / ROWS).write_text(json.dumps(rows(scale)))
        workspaces.append(workspace)
    (workspaces[0] / SIMILARITY).mkdir()
    (workspaces[0] / SIMILARITY / "similarity.md").write_text("# How alike\n\n## Neurons\n")
    (workspaces[0] / SIMILARITY / "similarity.png").write_bytes(b"picture")
    out = tmp_path / "out"
    write_page(
        validate(RECIPE),
        ["recipes/strangers.yaml", "recipes/rows.yaml"],
        ["folder=/private/texts", "name=strangers"],
        seeds=[0, 1],
        workspaces=workspaces,
        out=out,
    )
    return out


def test_the_page_says_how_it_was_made_and_keeps_the_folder_to_itself(pages):
    text = (pages / "strangers.md").read_text()
    command = "recipes/strangers.yaml recipes/rows.yaml --seeds 0 1 --set folder=FOLDER "
    assert command + "--set name=strangers --out docs/results" in text
    assert "/private" not in text


def test_several_seeds_are_a_mean_with_its_deviation(pages):
    text = (pages / "strangers.md").read_text()
    assert "| This recipe | – | 150.0 ± 70.7 |" in text
    found = json.loads((pages / "strangers.json").read_text())
    assert [run["symphony"]["before"]["perplexity"]["law"] for run in found["runs"]] == [100, 200]


def test_the_analysis_stands_in_the_page_with_its_pictures(pages):
    text = (pages / "strangers.md").read_text()
    assert "\n## How alike\n" in text
    assert "\n### Neurons\n" in text
    assert "(strangers-similarity.png)" in text
    assert (pages / "strangers-similarity.png").read_bytes() == b"picture"
    assert (pages / "strangers.png").stat().st_size > 3000
