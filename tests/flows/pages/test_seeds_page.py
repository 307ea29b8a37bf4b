"""The page of several seeds: scores, perplexities, and where what is lost is lost."""

import json

import pytest
from texts import pico_recipe, save_recipe, write_texts

from flows import seeds
from flows.pages.page import Command
from flows.pages.seeds import write_seeds
from flows.running import command_line
from flows.running.command_line import with_seed
from tasks.engine.costs import Cost, write_cost
from tasks.engine.workspace import Workspace
from tasks.methods import METHODS
from tasks.recipes import validate
from upcycle_core.evaluation.text.results import Evaluation, metrics

TEXT = {"files": ["x.txt"]}
RECIPE = {"name": "pico", "domains": {"code": {"train": TEXT}, "law": {"train": TEXT}}}
COUNTS = [[3, 1], [2, 2]]


def run(folder, scale, scored_on=None):
    """A workspace whose oracle costs ``scale`` and whose routers cost twice that."""
    perplexities = {
        "expert_code": {"code": 10.0, "law": 40.0},
        "expert_law": {"code": 20.0, "law": 20.0},
        "seed": {"code": 16.0, "law": 32.0},
        "model_averaging": {"code": 12.5, "law": 25.0},
        "dume": {d: 100 * own / (100 - 3 * scale) for d, own in (("code", 10), ("law", 20))},
        "oracle": {d: 100 * own / (100 - scale) for d, own in (("code", 10), ("law", 20))},
    }
    evaluation = Evaluation(
        domains=("code", "law"),
        perplexities=perplexities,
        routing=dict.fromkeys(("code", "law"), COUNTS),
        scored_on=scored_on or {},
    )
    (folder / "report").mkdir(parents=True)
    (folder / "report" / "metrics.json").write_text(json.dumps(metrics(evaluation)))
    (folder / "report" / "routing.png").write_bytes(b"picture")
    # What a run that had nothing left to do leaves.
    (folder / "timings.json").write_text(json.dumps({"wall": 2.0, "stages": {}}))
    recipe = validate(RECIPE)
    for stage in METHODS["dume"].stages():
        for item in stage.items(recipe):
            seconds = {"experts": 300.0, "router": 6.0}.get(stage.name, 0.0)
            write_cost(Workspace(folder), stage.label(item), Cost(seconds, 1))
    return folder


def page(folder, *scales, model="models:/base/1", scored_on=None):
    runs = [run(folder / f"seed-{seed}", scale, scored_on) for seed, scale in enumerate(scales)]
    command = Command(
        flow="seeds",
        recipe=validate({**RECIPE, "seed_model": {"model": model}}),
        files=["recipes/pico.yaml"],
        changes=["folder=/data/texts", f"seed_model.model={model}"],
        seeds=list(range(len(scales))),
        out=folder / "out",
    )
    write_seeds(command, runs)
    return (folder / "out" / "pico.md").read_text()


def test_what_is_lost_is_split_between_backbone_and_routers(tmp_path):
    text = page(tmp_path, 1.0, 3.0)
    assert "2 domains, 2 seeds" in text
    gaps = "Backbone gap (100 - oracle) 2.0, router gap (oracle - DUME) 4.0."
    assert f"the others are not.\n\n{gaps}\n" in text  # below the table
    assert text.count("(100 - oracle)") == 1
    assert "| DUME | 94.0 ± 4.2 | 94.0 ± 4.2 | 94.0 ± 4.2 |" in text


def test_what_a_model_took_is_said_whichever_runs_made_it(tmp_path):
    text = page(tmp_path, 1.0, 3.0)
    words = "took 0.99 % of a model's core time or less; a model took 10, 10 core minutes"
    assert words in text  # two experts and a router: 606 s
    kept = json.loads((tmp_path / "out" / "pico.json").read_text())
    assert kept["core_seconds"] == [606.0, 606.0]
    (tmp_path / "seed-1" / ".costs" / "experts@law.json").unlink()
    command = Command(
        flow="seeds",
        recipe=validate(RECIPE),
        files=["recipes/pico.yaml"],
        seeds=[0, 1],
        out=tmp_path / "again",
    )
    write_seeds(command, [tmp_path / "seed-0", tmp_path / "seed-1"])
    assert "a model took 10, – core minutes" in (tmp_path / "again" / "pico.md").read_text()


def test_what_joining_took_stands_beside_the_scores(tmp_path):
    """Whoever trained the experts."""
    text = page(tmp_path, 1.0, 3.0)
    words = "Joining took, in core seconds, mean of 2 runs: statistics 0.0, routers 6.0."
    assert f"core minutes, evaluation included. {words}\n" in text
    kept = json.loads((tmp_path / "out" / "pico.json").read_text())
    assert kept["core_seconds_joining"] == [{"statistics": 0.0, "routers": 6.0}] * 2


def test_what_given_experts_took_is_unknown(tmp_path):
    page(tmp_path, 1.0)
    given = {name: {**domain, "expert": "/models/x"} for name, domain in RECIPE["domains"].items()}
    command = Command(
        flow="seeds",
        recipe=validate({**RECIPE, "domains": given}),
        files=["recipes/pico.yaml"],
        seeds=[0],
        out=tmp_path / "again",
    )
    write_seeds(command, [tmp_path / "seed-0"])
    assert "core minutes" not in (tmp_path / "again" / "pico.md").read_text()


def test_perplexities_stand_beside_normalised_scores(tmp_path):
    text = page(tmp_path, 1.0)
    below = text.split("## Perplexity")[1]
    assert "| Seed | 16.00 | 32.00 |" in below
    assert f"| Oracle | {1000 / 99:.2f} | {2000 / 99:.2f} |" in below


def test_what_was_not_scored_is_a_dash(tmp_path):
    text = page(tmp_path, 1.0, 3.0, scored_on={"expert_law": ["law"]})
    scores, _, below = text.partition("## Perplexity")
    assert "| law expert | – | 100.0 ± 0.0 | – |" in scores
    assert "| code expert | 100.0 ± 0.0 | 50.0 ± 0.0 | 75.0 ± 0.0 |" in scores
    assert "evaluation.cross_scores" in scores
    assert "| law expert | – | 20.00 |" in below
    assert "evaluation.cross_scores" not in page(tmp_path / "whole", 1.0)


def test_one_seed_has_no_deviation(tmp_path):
    text = page(tmp_path, 1.0)
    assert "2 domains, 1 seed" in text
    assert "±" not in text
    assert "| Seed | 62.5 | 62.5 | 62.5 |" in text
    assert "The routers send 50.0 % of the tokens" in text


@pytest.mark.parametrize("scales", [(1.0,), (1.0, 3.0)])
def test_numbers_are_kept_unrounded(tmp_path, scales):
    page(tmp_path, *scales)
    kept = json.loads((tmp_path / "out" / "pico.json").read_text())
    assert len(kept["runs"]) == len(scales)
    mean = kept["normalised"]["oracle"]["average"]["mean"]
    assert mean == pytest.approx(100 - sum(scales) / len(scales))


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("/private/models/base.gguf", "FOLDER/base.gguf"),
        ("models:/base/1", "models:/base/1"),
        ("organisation/base", "organisation/base"),
    ],
)
def test_paths_of_a_machine_stay_there(tmp_path, model, shown):
    text = page(tmp_path, 1.0, model=model)
    assert f"--set folder=FOLDER --set seed_model.model={shown} " in text
    assert f"\n  model: {shown}\n" in text
    assert "/private" not in text


@pytest.fixture
def recipe(tmp_path):
    values = pico_recipe(write_texts(tmp_path / "texts"))
    values["registry"] |= {"model": "production"}
    return save_recipe(tmp_path / "recipe.yaml", values)


def test_no_seed_becomes_champion_of_the_model_that_the_recipe_names(recipe, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setenv("UPCYCLE_HOME", str(tmp_path))
    monkeypatch.setattr(command_line, "run_command", lambda words, directory: ran.append(words))
    monkeypatch.setattr(seeds, "write_seeds", lambda command, workspaces: None)
    given = ["--set", "registry.model=live", "--seeds", "0", "1", "--out", str(tmp_path / "out")]
    assert seeds.main([str(recipe), *given]) == 0
    names = [[word for word in words if word.startswith("registry.model=")] for words in ran]
    assert [own[-1] for own in names] == [f"registry.model=live-seed-{seed}" for seed in (0, 1)]
    unnamed = with_seed(validate(RECIPE), 1)
    assert (unnamed.seed, unnamed.registered_name) == (1, "upcycle-pico-seed-1")


def test_a_seed_sees_relative_paths_from_where_the_command_is_started(
    recipe, tmp_path, monkeypatch
):
    places = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPCYCLE_HOME", str(tmp_path))
    monkeypatch.setattr(
        command_line, "run_command", lambda words, directory: places.append(directory)
    )
    monkeypatch.setattr(seeds, "write_seeds", lambda command, workspaces: None)
    given = ["--set", "folder=texts", "--seeds", "0", "--out", "out"]
    assert seeds.main([recipe.name, *given]) == 0
    assert places == [tmp_path]


def test_a_page_that_can_lie_nowhere_is_said_before_any_seed_runs(recipe, monkeypatch, capsys):
    monkeypatch.setattr(seeds, "run_apart", lambda *arguments: pytest.fail("it ran"))
    assert seeds.main([str(recipe), "--out", str(recipe)]) == 2
    assert "--out" in capsys.readouterr().err
