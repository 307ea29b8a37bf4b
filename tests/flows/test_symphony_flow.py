"""Models that share no seed, joined as a user joins them, on texts of a few kilobytes."""

import json
import sys

import pytest
import yaml
from planned import kept
from project import Project
from texts import TRAINING, pico_recipe, save_recipe, write_texts

from infra.settings import read
from infra.tracking.registry import Registry

DOMAINS = ("letters", "numbers")
TRAINED = {"training": {**TRAINING, "steps": 6, "learning_rate": 1e-3}}
PAPER = {
    "alignment": {"neurons": "cosine"},
    "calibration": {"tokens": 800, "sequence_length": 32, "batch_size": 4},
}
ROWS = {
    "paper": {"method": "symphony", "symphony": PAPER},
    "unaligned": {"method": "symphony", "symphony": {**PAPER, "alignment": {"neurons": "none"}}},
    "ridge": {
        "method": "symphony",
        "symphony": {**PAPER, "router": "ridge"},
    },
    "bam": {"method": "bam", "title": "BAM"},
    "dense": {"method": "full-finetune"},
}
STOCK = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info.values()), info
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
assert len(tokenizer) == model.config.vocab_size, (len(tokenizer), model.config.vocab_size)
text = "alpha beta one two"
assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
print(type(model).__name__, model.config.num_local_experts)
"""


class Symphony(Project):
    def symphony(self, *arguments, check=True):
        files = [str(self.recipe), str(self.rows)]
        return self.run(sys.executable, "-m", "flows.symphony", *files, *arguments, check=check)


def recipe_values(texts):
    values = pico_recipe(texts, domains=DOMAINS)
    for part in ("sweep_top_k", "sweep_ridge_lambda", "sweep_window"):
        values["evaluation"][part] = []
    values["domains"]["letters"]["origin"] = {"mixture": {"letters": 3, "numbers": 1}}
    values["domains"]["numbers"]["origin"] = {"initialisation": 5, "vocabulary_size": 300}
    values["outside"] = {"colours": {"files": ["{folder}/colours/heldout.txt"]}}
    values["moe"] = {"top_k": 2}
    values["symphony"] = {
        "segmentation": "letters",
        "alignment": {"residual": "procrustes", "heads": "match"},
        "calibration": PAPER["calibration"],
    }
    values["post_training"] = TRAINED
    values["similarity"] = {"tokens": 800, "sequence_length": 32}
    return values


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("symphony")
    texts = write_texts(folder / "texts")
    project = Symphony(folder, save_recipe(folder / "recipe.yaml", recipe_values(texts)))
    rows = {name: {**TRAINED, **row} for name, row in ROWS.items()}
    project.rows = save_recipe(folder / "rows.yaml", {"baselines": rows})
    project.done = project.symphony()
    project.first_calls = project.calls()
    return project


@pytest.fixture(scope="module")
def metrics(project):
    return json.loads((project.workspace / "report" / "metrics.json").read_text())


def test_the_table_has_every_row_before_and_after(project, metrics):
    rows = metrics["ablation"]
    dense = {"expert_letters", "expert_numbers", "model_averaging"}
    assert set(rows) == dense | {"symphony"} | set(ROWS)
    for name, row in rows.items():
        assert (row["after"] is None) == (name in dense)
        states = [state for state in (row["before"], row["after"]) if state]
        assert all(set(state["perplexity"]) == {*DOMAINS, "colours"} for state in states)
        assert (row["own_expert"] is None) == (name in dense | {"bam", "dense"})
    for text in ("This recipe", "BAM", "colours, trained", "make up"):
        assert text in project.done.stdout


def test_neurons_in_another_order_change_no_row(metrics):
    """A permutation of whole experts' neurons computes the same; so does its training."""
    paper, unaligned = (metrics["ablation"][name] for name in ("paper", "unaligned"))
    for state, tolerance in (("own_expert", 1e-5), ("before", 1e-5), ("after", 1e-2)):
        for domain in DOMAINS:
            one, other = (row[state]["perplexity"][domain] for row in (paper, unaligned))
            assert one == pytest.approx(other, rel=tolerance)


def test_the_dense_anchor_begins_as_it_is(metrics):
    """Over the union's vocabulary it reads what it read: the tokens of the others are no text's."""
    rows = metrics["ablation"]
    for domain in DOMAINS:
        one, other = (rows[n]["before"]["perplexity"][domain] for n in ("dense", "expert_letters"))
        assert other * 0.99 < one < other * 1.2  # the rows of other tokens take a little


def test_the_dense_models_are_normalised_by_themselves(metrics):
    for domain in DOMAINS:
        assert metrics["normalised"][f"expert_{domain}"][domain] == pytest.approx(100.0)
    assert metrics["normalised_average"]["symphony"] == pytest.approx(
        metrics["ablation"]["symphony"]["after"]["normalised_average"]
    )


def test_scores_have_intervals_over_documents(metrics):
    for row in ("symphony", "harmonised", "model_averaging"):
        scores = {**metrics["normalised"][row], "average": metrics["normalised_average"][row]}
        for name, score in scores.items():
            low, high = metrics["interval"][row][name]
            assert low < score < high, (row, name)


def test_each_model_has_its_own_vocabulary_and_the_result_all_of_them(project):
    sizes = [
        json.loads((project.workspace / f"experts/{name}/config.json").read_text())["vocab_size"]
        for name in DOMAINS
    ]
    union = json.loads((project.workspace / "model/config.json").read_text())["vocab_size"]
    assert sizes == [320, 300]
    assert max(sizes) < union < sum(sizes)


def test_the_alignment_is_told_layer_by_layer(project):
    facts = json.loads((project.workspace / "starts/symphony/alignment.json").read_text())
    assert set(facts) == {"numbers"}
    assert [layer["layer"] for layer in facts["numbers"]["layers"]] == [0, 1]
    for layer in facts["numbers"]["layers"]:
        assert layer["neurons"]["after"] > layer["neurons"]["before"]
        assert layer["neurons"]["moved"] > 0
    assert facts["numbers"]["residual"]["after"] > facts["numbers"]["residual"]["before"]


def test_models_on_the_same_text_are_compared_once(project):
    assert project.first_calls["collect_moments"] == 1  # one stranger, one group of layers
    assert project.first_calls["train"] == 2 + 1 + len(ROWS)


def test_experts_are_compared_with_each_other(project):
    found = json.loads((project.workspace / "similarity/similarity.json").read_text())
    stages = {"dense", "symphony.before", "symphony.after", "unaligned.before", "paper.after"}
    assert stages <= set(found)
    assert (project.workspace / "similarity/similarity.png").stat().st_size > 5000


def test_model_loads_with_stock_transformers(project):
    model = str(project.workspace / "model")
    done = project.run(sys.executable, "-c", STOCK, model, cwd=project.home)
    assert "MixtralForCausalLM 2" in done.stdout


def test_what_is_kept_is_what_was_planned(project):
    assert "plan: " in project.done.stdout
    found = kept(project.recipe, project.home, project.rows)
    assert {"experts", "united", "pairs", "starts", "baselines", "model"} <= set(found)
    for stage, (planned, there) in found.items():
        assert planned == pytest.approx(there, rel=0.2), stage


def test_it_is_registered_with_its_recipe(project):
    registry = Registry(read(project.environment()))
    [version] = registry.versions("upcycle-pico")
    assert set(version.aliases) == {"challenger", "champion"}
    assert "Symphony-MoE Mixture-of-Experts of letters, numbers" in version.description


@pytest.mark.faults
def test_dvc_has_every_stage(project):
    stages = yaml.safe_load((project.workspace / "dvc.lock").read_text())["stages"]
    assert {"experts@letters", "tokenizer", "united", "pairs-symphony", "model"} <= set(stages)
    assert {"starts-paper", "baselines-bam", "outside-colours", "similarity"} <= set(stages)
    done = project.run("dvc", "status", cwd=project.workspace)
    changed = [line for line in done.stdout.splitlines() if line and not line.startswith("\t")]
    assert [line for line in changed if line != "sources:"] == [], done.stdout


@pytest.mark.faults
def test_strangers_may_be_scored_on_their_own_text_alone(project, metrics):
    path = project.workspace / "params.yaml"
    values = yaml.safe_load(path.read_text())
    values["evaluation"]["cross_scores"] = "own"
    path.write_text(yaml.safe_dump(values))
    project.run(sys.executable, "-m", "tasks", "report", "--workspace", str(project.workspace))
    found = json.loads((project.workspace / "report" / "metrics.json").read_text())
    assert found["perplexity"]["expert_numbers"].keys() == {"numbers"}
    assert "expert_numbers" not in found["normalised_average"]
    assert set(found["ablation"]) == set(metrics["ablation"]) - {f"expert_{n}" for n in DOMAINS}
    for row, values in found["ablation"].items():
        assert values == metrics["ablation"][row]


@pytest.mark.faults
def test_another_fraction_compares_no_models_again(project):
    """What was counted serves every way of aligning; a stage alone runs as DVC runs it."""
    path = project.workspace / "params.yaml"
    values = yaml.safe_load(path.read_text())
    values["symphony"]["alignment"]["fraction"] = 0.5
    path.write_text(yaml.safe_dump(values))
    before = (project.workspace / "starts/paper/provenance.json").read_text()
    project.calls()
    for stage in ("pairs", "starts"):
        project.run(sys.executable, "-m", "tasks", stage, "--workspace", str(project.workspace))
    assert project.calls() == {"assemble": 1}
    facts = json.loads((project.workspace / "starts/symphony/alignment.json").read_text())
    assert {layer["neurons"]["aligned"] for layer in facts["numbers"]["layers"]} == {24}
    assert (project.workspace / "starts/paper/provenance.json").read_text() == before


def test_bad_input_is_named_before_anything_starts(project):
    changes = {
        "symphony.segmentation": "null",
        "symphony.anchor": "law",
        "moe.top_k": "1",
        "domains.letters.origin.mixture": "{law: 1}",
    }
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    said = project.refused(str(project.rows), *settings, module="flows.symphony")
    for field in changes:
        assert f"{field} = " in said
