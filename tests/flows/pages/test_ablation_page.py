"""The page of a grid of joined models: its command, its table, its pictures."""

import json

import pytest

from flows.pages.ablation import SIMILARITY, _models, write_ablation
from flows.pages.comparison import FOLDER, ROWS
from flows.pages.page import Command
from tasks.recipes import validate
from upcycle_core.evaluation.text.ablation import LEGEND, Joined, ablation_metrics

TEXT = {"files": ["{folder}/x.txt"]}
RECIPE = {
    "name": "strangers",
    "folder": "/private/texts",
    "domains": {"code": {"train": TEXT}, "law": {"train": TEXT}},
    "outside": {"poems": TEXT},
    "seed_model": {"shape": {"family": "qwen2", "hidden_size": 64, "layers": 3}},
    "experts": {"training": {"steps": 70, "batch_size": 10, "sequence_length": 100}},
    "symphony": {},
}
FILES = ["recipes/strangers.yaml", "recipes/rows.yaml"]
CHANGES = ["folder=/private/texts", "name=strangers"]
EXPERTS, OUTSIDE = {"code": 10.0, "law": 20.0}, {"poems": 40.0}


def rows(scale):
    before = {"code": 100.0 * scale, "law": 100.0 * scale, "poems": 90.0}
    found = {"symphony": Joined(title="This recipe", before=before, parameters=(4, 2))}
    return ablation_metrics(EXPERTS, found, outside=OUTSIDE)


def write(folder, scales, *, similarity=True):
    """The page of one run a scale, of the first with its analysis."""
    workspaces = [folder / f"seed-{seed}" for seed in range(len(scales))]
    for workspace, scale in zip(workspaces, scales, strict=True):
        (workspace / FOLDER).mkdir(parents=True)
        (workspace / ROWS).write_text(json.dumps(rows(scale)))
    if similarity:
        (workspaces[0] / SIMILARITY).mkdir()
        (workspaces[0] / SIMILARITY / "similarity.md").write_text("# How alike\n\n## Neurons\n")
        (workspaces[0] / SIMILARITY / "similarity.png").write_bytes(b"picture")
    out = folder / "out"
    several = list(range(len(scales))) if len(scales) > 1 else []
    command = Command(
        flow="compare",
        recipe=validate(RECIPE),
        files=FILES,
        changes=CHANGES,
        seeds=several,
        out=out,
    )
    write_ablation(command, workspaces)
    return out


@pytest.fixture
def pages(tmp_path):
    return write(tmp_path, (1.0, 2.0))


def test_the_page_says_how_it_was_made_and_keeps_the_folder_to_itself(pages):
    text = (pages / "strangers.md").read_text()
    command = "recipes/strangers.yaml recipes/rows.yaml --seeds 0 1 --set folder=FOLDER "
    assert command + "--set name=strangers --out FOLDER" in text
    assert "/private" not in text
    recipe = text.split("## The recipe")[1]
    assert "outside:\n  poems:" in recipe
    assert "symphony:" in recipe


def test_the_page_says_what_was_joined(pages):
    text = (pages / "strangers.md").read_text()
    assert "2 models of the qwen2 family, hidden size 64, 3 layers, " in text
    assert "own on 70,000 tokens of a mixture" in text
    assert "; poems is text that no model, alignment or training sees." in text


def test_several_seeds_are_a_mean_with_its_deviation(pages):
    text = (pages / "strangers.md").read_text()
    assert "| This recipe | – | 150.0 ± 70.7 |" in text
    assert f"{LEGEND} Mean ± deviation over 2 seeds; the picture is the first's." in text
    found = json.loads((pages / "strangers.json").read_text())
    assert (found["recipe"], found["seeds"]) == ("strangers", [0, 1])
    assert [run["symphony"]["before"]["perplexity"]["law"] for run in found["runs"]] == [100, 200]


def test_one_seed_has_no_deviation_and_no_analysis_where_none_was_made(tmp_path):
    out = write(tmp_path, (1.0,), similarity=False)
    text = (out / "strangers.md").read_text()
    assert "recipes/rows.yaml --set folder=FOLDER " in text
    assert "| This recipe | – | 100.0 |" in text
    assert f"{LEGEND}\n" in text
    assert "How alike" not in text
    assert {file.name for file in out.iterdir()} == {
        f"strangers.{k}" for k in ("md", "json", "png")
    }


def test_the_analysis_stands_in_the_page_with_its_pictures(pages):
    text = (pages / "strangers.md").read_text()
    assert "\n## How alike\n" in text
    assert "\n### Neurons\n" in text
    assert "![similarity](strangers-similarity.png)" in text
    assert (pages / "strangers-similarity.png").read_bytes() == b"picture"
    assert (pages / "strangers.png").stat().st_size > 3000


def test_the_page_says_which_models_were_given():
    """Of those it knows no shape, and no training but what they got here."""
    given = {"expert": "/models/code", "train": TEXT}
    begun = {"origin": {"model": "/models/law"}, "train": TEXT}
    domains = {"code": given, "law": begun, "poetry": {"train": TEXT}}
    said = _models(validate(RECIPE | {"domains": domains}))
    assert "3 models of the qwen2 family, hidden size 64, 3 layers, code as given; law" in said
    assert "; law trained from a given model on 70,000 tokens; the others trained from " in said
    del domains["poetry"]
    domains["law"] = given | {"expert": "/models/law"}
    said = _models(validate(RECIPE | {"domains": domains, "outside": {}}))
    assert said == "2 models, code, law as given."
