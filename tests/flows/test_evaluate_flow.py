"""Models scored on tasks as a user does it, and a champion judged on them."""

import json
import sys
from collections import Counter

import pyarrow.parquet as parquet
import pytest
import yaml
from project import Project
from texts import WORDS, pico_recipe, save_recipe, write_choices, write_texts

from flows.evaluate import main
from infra.settings import read
from infra.tracking.registry import Registry

# Every model on every task: minutes.
pytestmark = pytest.mark.faults

DOMAINS = ("letters", "numbers")
ROWS = {"expert_letters", "expert_numbers", "seed", "model_averaging", "dume"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluate")


def write_definition(folder):
    """Which word follows? Two lines of one domain's words, answered by likelihood."""
    words = WORDS["letters"]
    rows = [
        {"id": i, "prompt": " ".join(words[i : i + 3]), "choices": [words[i + 3], "red"]}
        for i in range(6)
    ]
    return write_choices(folder / "data" / "next.jsonl", rows)


@pytest.fixture(scope="module")
def project(folder):
    texts = write_texts(folder / "texts", domains=DOMAINS, words=120)
    values = pico_recipe(texts, domains=DOMAINS)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    values["domains"]["letters"]["elsewhere"] = {"files": ["{folder}/letters/elsewhere.txt"]}
    values["task_evaluation"] = {"folder": str(folder / "data")}
    values["registry"]["gate"] = {"tolerances": {"task.text": 1000.0}}
    project = Project(folder, save_recipe(folder / "recipe.yaml", values))
    continuation = {"heldout": "continuation", "items": 4}
    tasks = {
        **{domain: {**continuation, "domain": domain} for domain in DOMAINS},
        "next": {"definition": str(write_definition(folder)), "limit": 5},
        "text": {"heldout": "text", "domain": "letters", "items": 2, "metric": "bits_per_byte"},
    }
    project.tasks = save_recipe(folder / "tasks.yaml", {"tasks": tasks})
    project.done = evaluate(project)
    project.first_calls = project.calls()
    return project


def evaluate(project, *arguments, check=True):
    files = (str(project.recipe), str(project.tasks))
    return project.run(sys.executable, "-m", "flows.evaluate", *files, *arguments, check=check)


@pytest.fixture(scope="module")
def registry(project):
    return Registry(read(project.environment()))


def page(project):
    return json.loads((project.workspace / "evaluated" / "metrics.json").read_text())


def test_every_model_is_scored_on_every_task(project):
    assert project.first_calls["evaluate_tasks"] == len(ROWS)
    found = page(project)
    assert found["scores"].keys() == ROWS
    for row in found["scores"].values():
        assert set(row) == {*DOMAINS, "next", "text"}
    assert found["tasks"]["next"]["items"] == 5
    assert found["normalised"]["expert_letters"]["letters"] in (100.0, None)
    items = parquet.read_table(project.workspace / "evaluated" / "items.parquet")
    assert Counter(items["model"].to_pylist()) == dict.fromkeys(ROWS, 4 + 4 + 5 + 2)


def test_the_terminal_shows_the_table_and_where_the_page_is(project):
    assert "Model averaging" in project.done.stdout
    assert str(project.workspace / "evaluated" / "report.html") in project.done.stdout


def test_the_version_links_its_page_and_carries_its_scores(project, registry):
    version = registry.find("upcycle-pico", "champion")
    assert "Page with plots" in version.description
    assert f"/runs/{version.tags['upcycle.tasks']}/" in version.description
    assert version.description.count("# Task evaluation") == 1
    mean = page(project)["scores"]["dume"]["next"]["mean"]
    assert version.metrics["task.next/dume"] == pytest.approx(mean)
    files = (project.home / "mlflow").rglob("evaluated/items.parquet")
    assert len(list(files)) == 1


@pytest.mark.faults
def test_another_run_scores_nothing_again(project):
    before = page(project)
    evaluate(project)
    assert not project.calls()
    assert page(project) == before


@pytest.mark.faults
def test_routing_rows_and_sweeps_are_scored_beside_the_models(project):
    before = page(project)
    asked = "task_evaluation.routing=[oracle, random_routing, dume_ood]"
    sweeps = ("sweep_ridge_lambda=[1.0, 100.0]", "sweep_window=[2]")
    swept = [f"task_evaluation.{sweep}" for sweep in sweeps]
    changes = [part for change in (asked, *swept) for part in ("--set", change)]
    project.calls()
    evaluate(project, *changes, "--set", "task_evaluation.sweep_top_k=[2]")
    assert project.calls()["evaluate_tasks"] == 1 + 2 + 1 + 2 + 1 + 1
    found = page(project)
    assert found["scores"].keys() == {*ROWS, "oracle", "random_routing", "dume_ood"}
    assert found["scores"]["oracle"].keys() == {*DOMAINS, "text"}  # what has a domain
    assert len(found["scores"]["random_routing"]["text"]["values"]) == 2  # one a draw
    assert {row: found["scores"][row] for row in ROWS} == before["scores"]
    assert [point["value"] for point in found["sweeps"]["ridge_lambda"]] == [1.0, 100.0]
    assert found["sweeps"].keys() == {"top_k", "ridge_lambda", "window"}
    evaluate(project, *changes, "--set", "task_evaluation.sweep_top_k=[1, 2]")
    assert project.calls()["evaluate_tasks"] == 1  # the new point
    saved, wider = page(project)["sweeps"]["top_k"]
    means = {task: score["mean"] for task, score in before["scores"]["dume"].items()}
    assert saved["scores"] == means != wider["scores"]


@pytest.mark.faults
def test_a_new_model_is_judged_beside_the_champion_on_the_same_tasks(project, registry):
    project.calls()
    tasks = yaml.safe_load(project.tasks.read_text())["tasks"]
    changes = ["router.ridge_lambda=1000000.0", "registry.gate.margin=-1000"]
    changes += [f"tasks.{name}={json.dumps(task)}" for name, task in tasks.items()]
    project.flow(*(part for change in changes for part in ("--set", change)))
    assert project.calls()["evaluate_tasks"] == 1  # the new model: the champion was it once
    first, second = registry.versions("upcycle-pico")
    assert "champion" in second.aliases
    assert "stays within the tolerance of 1000" in second.tags["upcycle.decision"]
    found = page(project)
    assert found["titles"]["champion"] == "Champion, version 1"
    assert set(found["differences"]["champion"]) == {*DOMAINS, "next", "text"}
    assert first.tags["upcycle.tasks"] != second.tags["upcycle.tasks"]


def refused(project, *changes):
    settings = (part for change in changes for part in ("--set", change))
    done = evaluate(project, *settings, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_missing_data_are_named_before_anything_starts(project, folder):
    message = refused(project, "name=other", f"task_evaluation.folder={folder / 'nowhere'}")
    assert f"tasks.next.definition = '{folder / 'nowhere' / 'next.jsonl'}'" in message
    assert "set task_evaluation.folder" in message
    assert not (project.home / "other").exists()


def test_programs_run_only_where_the_recipe_allows_it(project, folder):
    definition = yaml.safe_load((folder / "data" / "next.yaml").read_text())
    (folder / "programs.yaml").write_text(yaml.safe_dump({**definition, "program": "pass"}))
    change = f"tasks.programs={{definition: {folder / 'programs.yaml'}}}"
    message = refused(project, "name=other", change)
    assert "task_evaluation.code.allow" in message


def test_what_cannot_be_routed_is_refused(capsys):
    demo, tasks = "recipes/demo.yaml", "recipes/tasks.yaml"
    change = "task_evaluation.routing=[oracle, nobody]"
    assert main([demo, tasks, "--set", change]) == 2
    assert "task_evaluation.routing" in capsys.readouterr().err
    changes = ("sweep_top_k=[0, 9]", "sweep_window=[3]", "sweep_ridge_lambda=[-1]")
    settings = [part for c in changes for part in ("--set", f"task_evaluation.{c}")]
    assert main([demo, tasks, *settings]) == 2
    said = capsys.readouterr().err
    assert "task_evaluation.sweep_top_k = 9: more than the 4 experts" in said
    assert "task_evaluation.sweep_top_k = 0: use 1 or more" in said
    assert "task_evaluation.sweep_window = 3" in said
    assert "task_evaluation.sweep_ridge_lambda = -1" in said
    assert main(["recipes/symphony.yaml", "--set", "task_evaluation.sweep_top_k=[2]"]) == 2
    assert "is about DUME's routers, and the method is symphony" in capsys.readouterr().err


def test_a_page_needs_tasks_and_the_merged_model(capsys):
    demo, tasks = "recipes/demo.yaml", "recipes/tasks.yaml"
    assert main([demo]) == 2
    assert "nothing to score on" in capsys.readouterr().err
    assert main([demo, tasks, "--set", "task_evaluation.models=[seed]"]) == 2
    assert "the page is about the merged model" in capsys.readouterr().err
