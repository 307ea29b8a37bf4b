"""A comparison as a user runs it: every published way of upcycling, on texts of a few kilobytes."""

import json
import re
import sys

import pytest
import yaml
from huggingface_hub import ModelCard
from planned import kept
from project import Project
from texts import TRAINING, pico_recipe, save_recipe, write_texts

from flows import ders
from infra.settings import read
from infra.tracking.registry import Registry
from tasks.recipes import load_recipe
from upcycle_core.planning.compression import compressed_bytes
from upcycle_core.planning.shape import Shape

DOMAINS = ("letters", "numbers")
EXPERT_TOKENS = 2 * 15 * 4 * 32
BUDGET = EXPERT_TOKENS + 8 * 4 * 32
BASELINES = {
    "btx": {
        "method": "btx",
        "seed_expert": True,
        "objective": {"balance_coefficient": 0.01, "z_coefficient": 0.001, "watch_steps": 4},
    },
    "dume-plus": {"method": "dume", "title": "DUME+", "objective": {"trainable": ["router"]}},
    "drop": {"method": "drop-upcycling", "reinitialised": 0.25},
    "bam": {"method": "bam"},
    "light": {"method": "ders", "copies": 3, "ders": {"codec": "low_rank", "rank": 2}},
    "ensemble": {"method": "branch-train-merge"},
    "full": {"method": "full-finetune"},
}
TRAINED = sorted(set(BASELINES) - {"ensemble"})


class Comparison(Project):
    def compare(self, *arguments):
        files = [str(self.recipe), str(self.rows)]
        return self.run(sys.executable, "-m", "flows.compare", *files, *arguments)

    def compress(self, *arguments):
        files = [str(self.recipe), str(self.rows), str(self.ways)]
        return self.run(sys.executable, "-m", "flows.ders", *files, *arguments)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    texts = write_texts(folder / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    values["comparison"] = {"tokens": BUDGET}
    project = Comparison(folder, save_recipe(folder / "recipe.yaml", values))
    rows = {
        name: row
        if name == "ensemble"
        else {**row, "training": {**TRAINING, "learning_rate": 1e-3}}
        for name, row in BASELINES.items()
    }
    project.rows = save_recipe(folder / "rows.yaml", {"baselines": rows})
    project.done = project.compare("--out", str(folder / "page"))
    project.first_calls = project.calls()
    project.page = folder / "page"
    return project


@pytest.fixture(scope="module")
def rows(project):
    return json.loads((project.workspace / "compared" / "rows.json").read_text())


def test_seed_experts_and_statistics_are_made_once_for_all_rows(project):
    calls = project.first_calls
    assert calls["train"] == 3 + len(TRAINED)  # the seed, two experts, the rows
    assert calls["domain_statistics"] == 2 * 2
    assert calls["solve_routers"] == 1


def test_every_row_is_there_with_scores_parameters_tokens_and_cost(rows):
    given = {"seed", "model_averaging", "random_routing", "dume", "oracle"}
    assert set(rows) == given | set(BASELINES)
    for row in rows.values():
        assert set(row["normalised"]) == set(DOMAINS)
        assert row["normalised_average"] > 0
        assert 0 < row["active_parameters"] <= row["total_parameters"]
        assert row["core_seconds"] > 0 or row is rows["seed"]
        assert row["peak_memory_bytes"] > 10**7 or row is rows["seed"]


def test_what_is_kept_is_what_was_planned(project):
    assert "plan: " in project.done.stdout
    found = kept(project.recipe, project.home, project.rows)
    weights = {"seed", "experts", "backbone", "statistics", "model", "baselines"}
    assert set(found) == weights
    for stage, (planned, there) in found.items():
        assert planned == pytest.approx(there, rel=0.2), stage


def test_every_trained_row_saw_the_same_number_of_tokens(rows):
    for name in TRAINED:
        assert rows[name]["tokens"] == BUDGET, name
    assert rows["dume"]["tokens"] == rows["ensemble"]["tokens"] == EXPERT_TOKENS
    assert rows["seed"]["tokens"] == 0


def test_trained_parameters_are_those_of_the_chosen_modules(rows):
    hidden, layers, domains = 32, 2, 2
    router = layers * domains * hidden
    assert rows["dume-plus"]["trained_parameters"] == router
    assert rows["btx"]["trained_parameters"] == rows["btx"]["total_parameters"]
    assert rows["full"]["trained_parameters"] == rows["seed"]["total_parameters"]
    assert rows["dume"]["trained_parameters"] == rows["ensemble"]["trained_parameters"] == 0


def test_finetuned_routers_alone_leave_all_else_as_it_was(project):
    from safetensors.torch import load_file

    before = load_file(project.workspace / "model" / "model.safetensors")
    after = load_file(project.workspace / "baselines" / "dume-plus" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if name.endswith("block_sparse_moe.gate.weight")}


def test_models_say_how_their_experts_were_used(project):
    folder = project.workspace / "baselines" / "btx" / "training"
    assert (folder / "load.png").stat().st_size > 1000
    assert len((folder / "load.csv").read_text().splitlines()) > 1
    summary = json.loads((folder / "summary.json").read_text())
    assert "seconds" not in json.dumps(summary)  # an artifact depends on its inputs alone


def test_terminal_shows_the_table_and_states_dume_against_btx(project):
    for text in ("DUME+", "Oracle", "Core time", "which trains nothing after the experts"):
        assert text in project.done.stdout
    assert re.search(r"^Backbone gap \(100 - oracle\) -?\d", project.done.stdout, re.MULTILINE)


def test_page_holds_the_table_the_plot_and_the_command(project):
    page = (project.page / "pico-comparison.md").read_text()
    assert "python -m flows.compare" in page
    assert "| DUME+ |" in page
    assert (project.page / "pico-comparison.png").stat().st_size > 1000
    assert json.loads((project.page / "pico-comparison.json").read_text())["seeds"] == [0]


@pytest.mark.faults
def test_another_setting_of_one_row_trains_that_row_alone(project):
    project.compare("--set", "baselines.drop.reinitialised=0.75")
    assert project.calls()["train"] == 1


def test_light_experts_share_one_base(rows):
    hidden, width, layers, copies, rank = 32, 48, 2, 3, 2
    deltas = layers * copies * 3 * rank * (hidden + width)
    routers = layers * copies * hidden
    assert rows["light"]["trained_parameters"] == rows["light"]["total_parameters"]
    assert rows["light"]["total_parameters"] == rows["seed"]["total_parameters"] + deltas + routers
    third = deltas // copies
    assert rows["light"]["active_parameters"] == rows["light"]["total_parameters"] - third


@pytest.mark.faults
def test_dvc_finds_what_the_comparison_made_up_to_date(project):
    stages = yaml.safe_load((project.workspace / "dvc.yaml").read_text())["stages"]
    assert {f"baselines-{name}" for name in TRAINED} <= set(stages)
    project.run("dvc", "repro", cwd=project.workspace)
    assert not project.calls()


def test_faults_are_all_named_before_anything_starts(project):
    said = project.refused(
        str(project.rows),
        "--tokens",
        str(EXPERT_TOKENS),
        "--set",
        "baselines.btx.top_k=4",
        "--set",
        "baselines.dume-plus.top_k=1",
        "--set",
        "baselines.full.objective.trainable=[routers]",
        module="flows.compare",
    )
    for text in (
        "baselines.btx.top_k",
        "baselines.dume-plus.top_k",
        "baselines.full.objective.trainable",
        "comparison.tokens",
    ):
        assert text in said
    assert not project.calls()


@pytest.fixture(scope="module")
def compressed(project):
    """The same project, its models' experts stored as one base and deltas."""
    codecs = {
        "whole": {"codec": "sparse", "drop_rate": 0.0},
        "coarse": {"codec": "quantised", "bits": 8},
        "broken": {"codec": "sparse", "drop_rate": 0.99},
    }
    values = {"models": ["dume", "btx"], "minimum_cosine": -1.0, "codecs": codecs}
    project.ways = save_recipe(project.home.parent / "ways.yaml", {"compression": values})
    project.calls()
    project.compressing = project.compress("--out", str(project.page))
    project.compress_calls = project.calls()
    return project


def test_every_way_to_store_deltas_is_measured(compressed):
    calls = compressed.compress_calls
    assert calls["compress"] == 2 * 3 + 1  # the last is the one that is kept
    assert calls["evaluate_checkpoint"] == 2 * (3 + 1)
    assert set(calls) == {"compress", "evaluate_checkpoint"}  # all else was up to date
    report = compressed.workspace / "compression" / "report"
    metrics = json.loads((report / "metrics.json").read_text())
    assert set(metrics["sweeps"]) == {"DUME", "btx"}
    sweep = metrics["sweeps"]["DUME"]
    original, points = sweep["original"], sweep["points"]
    assert set(points) == {"whole", "coarse", "broken"}
    for domain in DOMAINS:
        exact = pytest.approx(original["perplexity"][domain], rel=1e-4)
        assert points["whole"]["perplexity"][domain] == exact
    assert sweep["chosen"] == "coarse"
    assert points["coarse"]["bytes"] < original["bytes"] < points["whole"]["bytes"]
    for picture in ("sweep", "cosine_dume", "cosine_btx"):
        assert (report / f"{picture}.png").stat().st_size > 1000


def test_every_way_takes_the_bytes_that_were_planned(compressed):
    recipe = load_recipe(compressed.recipe, added=[compressed.rows, compressed.ways])
    shape = Shape.of(compressed.workspace / "seed")
    report = json.loads((compressed.workspace / "compression/report/metrics.json").read_text())
    for name, point in report["sweeps"]["DUME"]["points"].items():
        planned = compressed_bytes(shape, recipe.compression.codecs[name], len(DOMAINS))
        assert planned == pytest.approx(point["bytes"], rel=0.2), name


def test_the_page_of_the_compression_has_its_pictures_and_its_command(compressed):
    page = (compressed.page / "pico-ders.md").read_text()
    assert "python -m flows.ders" in page
    assert str(compressed.home.parent / "texts") not in page.split("## The recipe")[0]
    for picture in re.findall(r"\]\((.+?\.png)\)", page):
        assert (compressed.page / picture).stat().st_size > 1000
    assert "pico-ders-cosine-btx.png" in page
    assert json.loads((compressed.page / "pico-ders.json").read_text())["sweeps"]["DUME"]


def test_the_smallest_good_one_is_registered_as_challenger(compressed):
    registry = Registry(read(compressed.environment()))
    version = registry.find("upcycle-pico-ders", "challenger")
    assert version is not None
    assert not registry.versions("upcycle-pico")  # of stock models alone
    assert version.tags["upcycle.compressed"] == "coarse"
    assert "champion" not in version.aliases
    assert version.reference in compressed.compressing.stdout
    text = registry.text(version, "card.md")
    assert {r.dataset_type for r in ModelCard(text).data.eval_results} == set(DOMAINS)
    assert "(DeRS), coarse: " in text
    assert "\n| Original | " in text
    command = f"{version.name}/{version.number}"
    done = compressed.run(
        sys.executable, "-m", "flows.generate", command, "one two", "--tokens", "3"
    )
    assert done.stdout.startswith("one two")


@pytest.mark.faults
def test_dume_flow_finds_all_up_to_date_and_registers_the_model_beside_it(compressed):
    compressed.flow()
    assert not compressed.calls()
    registry = Registry(read(compressed.environment()))
    [small], [whole] = (registry.versions(f"upcycle-pico{end}") for end in ("-ders", ""))
    assert small.tags["upcycle.compressed"] == "coarse"
    assert "upcycle.compressed" not in whole.tags
    assert set(small.aliases) == {"challenger"}
    assert set(whole.aliases) == {"challenger", "champion"}


def test_deltas_without_a_way_to_store_them_are_named_before_anything_starts(compressed, capsys):
    page = str(compressed.recipe)  # a file
    assert ders.main([str(compressed.recipe), "--out", page]) == 2
    said = capsys.readouterr().err
    assert "recipes/compression.yaml" in said
    assert "--out" in said
