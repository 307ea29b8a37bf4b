"""The pages of a comparison over several seeds."""

import json
from pathlib import Path

import pytest
from texts import TRAINING, pico_recipe, save_recipe

from flows import compare
from flows.pages.comparison import comparison_section, write_comparison
from flows.pages.page import Command
from tasks.recipes import validate
from upcycle_core.evaluation.report.text import markdown

ROW = {"title": "BTX", "trained_parameters": 0, "active_parameters": 10**6}
ROW |= {"total_parameters": 10**6, "tokens": 0, "core_seconds": 60.0, "peak_memory_bytes": 10**9}


def run(btx, dume):
    def row(title, score):
        scores = {"normalised": {"law": score}, "normalised_average": score}
        scores["perplexity"] = {"law": 1000 / score}
        return {**ROW, "title": title, **scores}

    return {
        "dume": row("DUME", dume),
        "oracle": row("Oracle", dume + 1.5),
        "btx": row("BTX", btx),
    }


@pytest.fixture
def values(tmp_path):
    return pico_recipe(tmp_path, domains=("a", "b"))


@pytest.fixture
def out(tmp_path, values):
    values = {**values, "baselines": {"btx": {"method": "btx", "training": TRAINING}}}
    files = [Path("pico.yaml"), Path("rows.yaml")]
    runs = [run(80.0, 90.0), run(84.0, 91.0)]
    command = Command(
        flow="compare",
        recipe=validate(values),
        files=files,
        changes=["folder=/private", "router.lambda_grid=[1, 2]"],
        seeds=[0, 1],
        out=tmp_path / "out",
    )
    write_comparison(command, runs)
    return tmp_path / "out"


def test_page_shows_means_and_deviations_over_seeds(out):
    page = (out / "pico-comparison.md").read_text()
    assert "| BTX | 82.0 ± 2.8 | 82.0 ± 2.8 |" in page
    command = "python -m flows.compare pico.yaml rows.yaml --seeds 0 1 --set folder=FOLDER "
    assert f"{command}--set 'router.lambda_grid=[1, 2]' --out FOLDER\n" in page
    assert "mean ± deviation over 2 seeds" in page


def test_gaps_of_backbone_and_routers_stand_below_the_table(out):
    page = (out / "pico-comparison.md").read_text()
    gaps = "Backbone gap (100 - oracle) 8.0, router gap (oracle - DUME) 1.5."
    assert f"of the largest process.\n\n{gaps}\n\n!" in page


def test_perplexities_stand_in_a_table_of_their_own(out):
    page = (out / "pico-comparison.md").read_text()
    part = page.partition("\n## Perplexity\n")[2].partition("\n## ")[0]
    assert "| Method | law |" in part
    assert f"| BTX | {(1000 / 80 + 1000 / 84) / 2:.2f} |" in part


def test_page_states_dume_against_btx_as_it_comes_out(out):
    page = (out / "pico-comparison.md").read_text()
    assert "reaches 90.5; BTX, trained, 82.0 (+8.5 for DUME)" in page


def test_every_seed_is_kept(out):
    content = json.loads((out / "pico-comparison.json").read_text())
    assert [r["btx"]["normalised_average"] for r in content["runs"]] == [80.0, 84.0]


def page_of_seeds(values, out, seeds=(0, 1)):
    recipe = validate(values)
    return Command(flow="seeds", recipe=recipe, files=[Path("pico.yaml")], seeds=seeds, out=out)


def test_another_page_of_the_recipe_gains_the_rows(values, out, tmp_path):
    values |= {"folder": "/elsewhere", "compute": {"cpus": 2}}
    section = markdown(comparison_section(page_of_seeds(values, out)))
    assert "| BTX | 82.0 ± 2.8 | 82.0 ± 2.8 |" in section
    assert "(pico-comparison.md)" in section
    assert "gap" not in section  # the other page says it itself
    assert comparison_section(page_of_seeds(values, tmp_path)) == []


def test_a_comparison_of_another_recipe_or_other_seeds_is_not_taken_in(values, out, capsys):
    assert comparison_section(page_of_seeds(values, out, seeds=(0, 1, 2))) == []
    assert "pico-comparison.json: of another recipe or other seeds" in capsys.readouterr().out
    values["experts"]["training"]["steps"] += 1
    assert comparison_section(page_of_seeds(values, out)) == []


def test_a_comparison_of_an_earlier_version_is_taken_in_by_its_seeds(values, out, tmp_path):
    content = json.loads((out / "pico-comparison.json").read_text())
    del content["made_of"]
    (tmp_path / "pico-comparison.json").write_text(json.dumps(content))
    assert comparison_section(page_of_seeds(values, tmp_path))
    assert comparison_section(page_of_seeds(values, tmp_path, seeds=(0,))) == []


def test_rows_that_a_method_shows_itself_are_refused_before_any_is_trained(
    tmp_path, monkeypatch, capsys
):
    """There would be no table of theirs to show when all of them have been tuned."""
    values = {
        "name": "tuned",
        "simoe": {"mask_learning_rate": 0.01},
        "seed_model": {"model": "/models/base"},
        "instructions": {"sources": {"families": {"generate": "families"}}},
        "registry": {"gate": {"metric": "exact_match_unseen"}},
        "baselines": {"dense": {"method": "full-finetune"}},
    }
    monkeypatch.setenv("UPCYCLE_HOME", str(tmp_path / "home"))
    recipe = save_recipe(tmp_path / "recipe.yaml", values)
    assert compare.main([str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "method = 'simoe': its rows are made and shown beside its own model; run " in said
    assert "run flows.simoe" in said
