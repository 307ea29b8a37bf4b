"""A small model tuned on instructions as a user tunes it, on texts and tasks of a few kilobytes."""

import json
import random
import sys

import pytest
import yaml
from huggingface_hub import ModelCard
from mlflow import MlflowClient
from planned import kept
from project import ROOT, Project
from texts import TRAINING, WORDS, pico_recipe, save_recipe, write_choices, write_texts

from infra.settings import read
from infra.tracking.registry import Registry
from upcycle_core.evaluation.instructions.scores import score_answers

DOMAINS = ("letters", "numbers")
TUNED = {**TRAINING, "steps": 30, "sequence_length": 48, "learning_rate": 3e-3, "weight_decay": 0.0}
SHARED = {**TUNED, "batch_size": 2, "gradient_accumulation": 2}  # two workers may share it
# A few steps must bring masks from open to shut.
SIMOE = {
    "experts": 3,
    "tau": 0.5,
    "mask_learning_rate": 0.3,
    "multiplier_learning_rate": 1.0,
}
ROUTED = {"trainable": ["all"], "balance_coefficient": 0.01, "z_coefficient": 0.001}
ROWS = {
    "dense": {"method": "full-finetune", "title": "Full finetuning"},
    "layers": {"method": "full-finetune", "tuned": "layers"},
    "copies": {"method": "sparse-upcycling", "copies": 3, "top_k": 2, "objective": ROUTED},
    "btx": {"method": "btx", "seed_expert": True, "objective": ROUTED},
    "by-task": {"method": "simoe", "simoe": {**SIMOE, "routing": "task", "sparsity": "union"}},
}
BEGUN = "five"  # each answer, which few steps teach: scores are not all zero
ASKS = {
    "first": lambda words: words[0],
    "last": lambda words: words[-1],
    "copy": lambda words: " ".join(words),
    "second": lambda words: words[1],
}
ELSEWHERE = """
import sys
sys.modules["upcycle_core"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], trust_remote_code=True, output_loading_info=True)
assert not any(info.values()), info
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer("first: one two\\n\\n", return_tensors="pt", return_token_type_ids=False)
print(model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[0])
"""


def write_instructions(file):
    draw = random.Random(0)
    lines = []
    for domain in DOMAINS:
        for ask, answer in ASKS.items():
            for _ in range(40):
                words = draw.sample(WORDS[domain], 3)
                lines.append(
                    {
                        "category": ask,
                        "task": f"{ask}-{domain}",
                        "domain": domain,
                        "prompt": f"{ask}: {' '.join(words)}",
                        "response": f"{BEGUN} {answer(words)}",
                    }
                )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def recipe_values(texts):
    values = pico_recipe(texts, domains=DOMAINS)
    del values["experts"], values["statistics"], values["evaluation"]
    return {
        **values,
        "instructions": {
            "sources": {"asks": {"files": ["{folder}/asks.jsonl"]}},
            "unseen": ["second"],
            "test_per_task": 6,
        },
        "tuning": {"training": SHARED, "max_new_tokens": 6, "batch_size": 8},
        "experts": {"training": {**TUNED, "steps": 6}},
        "simoe": SIMOE,
        "registry": {**values["registry"], "gate": {"metric": "rouge_l_unseen"}},
        "compute": {"cpus": 2},
    }


def tasks_values(folder):
    """The first of two questions is answered right, whatever the words before."""
    choices = [BEGUN, "qqqq"], ["qqqq", BEGUN]
    rows = [{"id": i, "prompt": "first: one two", "choices": c} for i, c in enumerate(choices)]
    definition = write_choices(folder / "asked.jsonl", rows)
    return {
        "tasks": {"asked": {"definition": str(definition)}},
        "task_evaluation": {"folder": str(folder), "models": ["seed", "simoe"]},
    }


class Tuned(Project):
    def simoe(self, *arguments, check=True):
        return self.tuned("flows.simoe", *arguments, check=check)

    def tuned(self, module, *arguments, check=True):
        files = [str(self.recipe), str(self.rows), str(self.tasks)]
        return self.run(sys.executable, "-m", module, *files, *arguments, check=check)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simoe")
    texts = write_texts(folder / "texts", domains=DOMAINS)
    write_instructions(texts / "asks.jsonl")
    project = Tuned(folder, save_recipe(folder / "recipe.yaml", recipe_values(texts)))
    rows = {name: {"training": TUNED, **row} for name, row in ROWS.items()}
    project.rows = save_recipe(folder / "rows.yaml", {"baselines": rows})
    project.tasks = save_recipe(folder / "tasks.yaml", tasks_values(folder / "asked"))
    project.page = folder / "page"
    project.done = project.simoe("--out", str(project.page))
    project.first_calls = project.calls()
    return project


@pytest.fixture(scope="module")
def metrics(project):
    return json.loads((project.workspace / "report" / "metrics.json").read_text())


def test_what_is_kept_is_what_was_planned(project):
    assert "plan: " in project.done.stdout
    found = kept(project.recipe, project.home, project.rows)
    assert set(found) == {"seed", "baselines", "model"}
    for stage, (planned, there) in found.items():
        assert planned == pytest.approx(there, rel=0.2), stage


def test_the_table_has_every_row(project, metrics):
    assert set(metrics["rows"]) == {"seed", *ROWS, "simoe"}
    for row in metrics["rows"].values():
        assert set(row["unseen"]["categories"]) == {"second"}
        assert set(row["seen"]["categories"]) == {"first", "last", "copy"}
    assert "Full finetuning" in project.done.stdout
    dense, copies = metrics["rows"]["dense"], metrics["rows"]["copies"]
    layers = metrics["rows"]["layers"]["trained_parameters"]["mean"]
    assert 0 < layers < dense["trained_parameters"]["mean"]
    assert 1 <= metrics["rows"]["simoe"]["effective_experts"]["mean"] <= 3
    assert metrics["rows"]["dense"]["effective_experts"] is None
    assert copies["total_parameters"]["mean"] > dense["total_parameters"]["mean"]


def test_scores_are_those_of_the_answers_that_lie_beside_them(project, metrics):
    folder = project.workspace / "answers" / "simoe"
    for split in ("seen", "unseen"):
        said = [json.loads(line) for line in (folder / f"{split}.jsonl").open()]
        score = score_answers([row["answer"] for row in said], said)
        assert metrics["rows"]["simoe"][split]["rouge_l"]["mean"] == pytest.approx(score.rouge_l)


def test_masks_are_as_sparse_as_asked(project):
    for row, way in (("model", "mean"), ("baselines/by-task", "union")):  # fmt: skip
        summary = json.loads((project.workspace / row / "training" / "summary.json").read_text())
        assert 0.5 <= summary[f"sparsity_{way}"] <= 0.52, row
        assert 0 < summary["kept_step"] <= TUNED["steps"]


def test_the_model_loads_elsewhere_and_answers(project):
    model = project.workspace / "model"
    assert project.run(sys.executable, "-c", ELSEWHERE, str(model)).stdout.strip() == "1"
    card = (model / "README.md").read_text()
    assert "SIMoE" in card


def test_the_version_is_champion_and_generates(project, metrics, tmp_path):
    registry = Registry(read(project.environment()))
    version = registry.find("upcycle-pico", "champion")
    rouge = metrics["rows"]["simoe"]["unseen"]["rouge_l"]["mean"]
    assert rouge > 0.05
    assert version.metrics["rouge_l_unseen"] == pytest.approx(100 * rouge)
    assert "## Models" in version.description
    assert "## Unseen categories" not in version.description
    text = registry.text(version, "card.md")
    measured = {
        (result.dataset_type, result.metric_type): result.metric_value
        for result in ModelCard(text).data.eval_results
    }
    assert measured["instructions-unseen", "rouge_l"] == pytest.approx(100 * rouge, abs=0.05)
    assert version.tags["upcycle.decision"] in text
    copy = registry.download("models:/upcycle-pico@champion", tmp_path / "model")
    drawn = project.workspace / "report" / "activations.png"
    assert "![activations](activations.png)" in text
    assert (copy / "upcycle" / "activations.png").read_bytes() == drawn.read_bytes()
    done = project.run(
        sys.executable, "-m", "flows.generate", "upcycle-pico@champion", "first: one two\n\n",
        "--tokens", "4",
    )  # fmt: skip
    assert done.stdout.startswith("first: one two")


def check_task_scores(project, expected):
    """Both models have theirs, and the version has its own."""
    found = json.loads((project.workspace / "evaluated" / "metrics.json").read_text())
    assert set(found["scores"]) == {"seed", "simoe"}
    assert found["scores"]["simoe"]["asked"]["mean"] == expected
    version = Registry(read(project.environment())).find("upcycle-pico", "champion")
    assert version.metrics["task.asked/simoe"] == expected


def test_it_is_scored_on_tasks(project):
    assert project.first_calls["evaluate_tasks"] == 2
    check_task_scores(project, 0.5)


@pytest.mark.faults
def test_other_tasks_train_nothing(project):
    project.calls()
    done = project.tuned("flows.evaluate", "--set", "tasks.asked.limit=1")
    calls = project.calls()
    assert (calls["evaluate_tasks"], calls["train"], calls["train_simoe"]) == (2, 0, 0)
    assert "SIMoE" in done.stdout
    check_task_scores(project, 1.0)


@pytest.mark.faults
def test_its_version_is_restored(project, tmp_path):
    again = tmp_path / "again"
    command = [sys.executable, "-m", "flows.restore", "upcycle-pico", "champion"]
    project.run(*command, "--into", str(again))
    for file in ("model.safetensors", "config.json"):
        assert (again / "pico" / "model" / file).read_bytes() == (
            project.workspace / "model" / file
        ).read_bytes()


def test_curves_reach_mlflow(project):
    client = MlflowClient(read(project.environment()).mlflow_tracking_uri)
    experiment = client.get_experiment_by_name("upcycle-pico")
    found = {
        name for run in client.search_runs([experiment.experiment_id]) for name in run.data.metrics
    }
    wanted = {"lambda", "sparsity", "overlap", "loss", "loss/orthogonality"}
    assert wanted <= found


def test_pictures_and_the_page(project):
    report = project.workspace / "report"
    for picture in ("structure_simoe.png", "overlap.png", "activations.png"):
        assert (report / picture).stat().st_size > 5000
        assert (project.page / "pico" / picture).exists()
    page = (project.page / "pico.md").read_text()
    assert "Full finetuning" in page
    assert str(project.home) not in page


@pytest.mark.faults
def test_a_changed_rival_is_tuned_alone(project):
    """Nothing else is made anew, and the champion stays where the model is the same."""
    rows = yaml.safe_load(project.rows.read_text())
    dense = rows["baselines"]["dense"]
    dense["training"] = {**dense["training"], "learning_rate": 1e-3}
    save_recipe(project.rows, rows)
    project.calls()
    project.simoe()
    calls = project.calls()
    assert calls["train"] == 1
    assert calls["train_simoe"] == 0
    assert len(Registry(read(project.environment())).versions("upcycle-pico")) == 1


@pytest.mark.faults
def test_what_is_too_hard_is_not_reported(project):
    done = project.simoe("--set", "tuning.least_exact_match=1.0", check=False)
    assert done.returncode == 2
    assert "tuning.least_exact_match" in done.stderr


@pytest.mark.faults
def test_new_instructions_retrain_it(project):
    asks = project.recipe.parent / "texts" / "asks.jsonl"
    lines = asks.read_text().splitlines()
    asks.write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    project.calls()
    divided = ("workers=2", "sharding=full")
    project.simoe(*(w for own in divided for w in ("--set", f"compute.post_training.{own}")))
    assert project.calls()["train_simoe"] == 2 + 1  # the model by two workers, and a row
    assert len(Registry(read(project.environment())).versions("upcycle-pico")) == 2


def test_bad_input_is_named_before_anything_runs(project):
    asks = ROOT / "recipes" / "simoe.yaml"
    changes = ("--set", "simoe.tau=1.5", "--set", "instructions.train_categories=[smallest]")
    said = project.refused(*changes, recipe=asks, module="flows.simoe")
    assert "simoe.tau" in said
    assert "instructions.train_categories" in said
