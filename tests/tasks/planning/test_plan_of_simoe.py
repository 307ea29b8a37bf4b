"""What a plan says of SIMoE's training, and of its scores on tasks."""

import json
from contextlib import nullcontext

import pytest
from pico import pico_config
from project import ROOT

from tasks.planning.joined import mixture_row
from tasks.planning.machine import Machine
from tasks.planning.plan import plan
from tasks.planning.subjects import subjects_of
from tasks.recipes import load_recipe, validate
from upcycle_core.baselines.config import Baseline
from upcycle_core.errors import InputError
from upcycle_core.planning.shape import Shape
from upcycle_core.planning.trained import gate_parameters, gated_parameters
from upcycle_core.simoe.config import SimoeUpcyclingConfig


@pytest.mark.parametrize(("masks", "together"), [("real", 3), ("neurons", 4)])
def test_a_simoe_ends_with_an_older_checkpoint_that_is_sparse_enough(masks, together):
    shape = Shape.of_config(pico_config().to_dict(), 4)
    row = Baseline(method="simoe", simoe=SimoeUpcyclingConfig(masks=masks))
    recipe = validate({"name": "x", "domains": {d: {"train": {"files": ["x"]}} for d in "ab"}})
    planned = mixture_row("model", recipe, {"x": row}, {"x": shape}, kind="post_training")
    grown = gated_parameters(shape, row.simoe) + gate_parameters(shape, row.simoe)
    assert planned.each == together * 4 * (shape.whole + 3 * grown)


@pytest.mark.parametrize("gpus", [1, 3])
def test_one_that_a_gpu_cannot_hold_for_tasks_is_divided_among_so_many(tmp_path, gpus):
    asked = {
        "seed_model.model": ROOT / "recipes/large/llama-3-8b",
        "tasks": f"{{sums: {{definition: {ROOT / 'recipes/tasks/gsm8k.yaml'}}}}}",
        "compute.task_evaluation": f"{{gpus: {gpus}}}",
    }
    recipe = load_recipe(
        ROOT / "recipes/simoe.yaml", [f"{key}={value}" for key, value in asked.items()]
    )
    machine = Machine(10**12, 16, 10**13, gpus=8, gpu_memory=24 * 10**9)
    found = plan(recipe, tmp_path, machine, base=500_000_000)
    said = {fault.field: fault.remedy for fault in found.faults()}
    expected = {1: "compute.task_evaluation.gpus = 3", 3: None}
    assert said.get("compute.task_evaluation") == expected[gpus]


def test_workers_that_divide_its_training_are_named(tmp_path):
    asked = {
        "seed_model.model": ROOT / "recipes/large/llama-3-8b",
        "tuning.precision": "bf16",
        "tuning.training": "{steps: 5000, batch_size: 2, sequence_length: 512, "
        "gradient_checkpointing: true, gradient_accumulation: 2}",
        "compute.post_training.gpus": 1,
    }
    machine = Machine(10**12, 64, 10**13, gpus=8, gpu_memory=80 * 10**9)

    def of(**more):
        settings = [f"{key}={value}" for key, value in {**asked, **more}.items()]
        recipe = load_recipe(ROOT / "recipes/simoe.yaml", settings)
        found = plan(recipe, tmp_path, machine, base=500_000_000).faults()
        return {fault.field: fault.remedy for fault in found}

    workers = "compute.post_training.workers = 2 and sharding = full (then"
    assert workers in of()["compute.post_training"]
    divided = {"compute.post_training.workers": 2, "compute.post_training.sharding": "full"}
    assert "compute.post_training" not in of(**divided)


@pytest.mark.parametrize(
    ("host", "gpu", "asked", "remedy"),
    [
        (300, 60, {}, "tuning.precision = bf16 or compute.evaluation.gpus = 0"),
        (60, 60, {}, "tuning.precision = bf16 or compute.evaluation.gpus = 0 and cpus = 64"),
        (60, 60, {"evaluation": "{gpus: 0, cpus: 64}"}, None),
        (60, 60, {"precision": "bf16"}, None),
        (60, 80, {}, None),
        (30, 24, {}, "use a larger machine"),
        (100, 140, {"rows": 512}, "tuning.batch_size = 64"),
        (100, 140, {"rows": 64}, None),
    ],
)
def test_answers_that_no_gpu_holds_are_told_what_makes_them_fit(tmp_path, host, gpu, asked, remedy):
    """Weights alone are 57 GB in fp32, whatever the batch, and mapped on a CPU."""
    changes = {
        "seed_model.model": ROOT / "recipes/large/llama-3-8b",
        "tuning.batch_size": asked.get("rows", 8),
        "tuning.precision": asked.get("precision", "fp32"),
        "tuning.training.sequence_length": 560,
        "compute.evaluation": asked.get("evaluation", "{gpus: 1}"),
    }
    recipe = load_recipe(
        ROOT / "recipes/simoe.yaml", [f"{key}={value}" for key, value in changes.items()]
    )
    machine = Machine(host * 10**9, 64, 10**13, gpus=8, gpu_memory=gpu * 10**9)
    found = plan(recipe, tmp_path, machine, base=500_000_000)
    answers = next(row for row in found.rows if row.stage == "answers")
    said = {fault.field: fault.remedy for fault in answers.memory_faults(machine, found.base)}
    assert said.get("compute.evaluation") == remedy


def test_a_setting_of_answers_is_named_once(tmp_path):
    changes = {
        "seed_model.model": ROOT / "recipes/large/llama-3-8b",
        "tuning.batch_size": 512,
        "tuning.precision": "fp32",
        "tuning.training.sequence_length": 560,
    }
    recipe = load_recipe(
        ROOT / "recipes/simoe.yaml", [f"{key}={value}" for key, value in changes.items()]
    )
    machine = Machine(200 * 10**9, 1, 10**13)
    found = plan(recipe, tmp_path, machine, base=500_000_000)
    answers = next(row for row in found.rows if row.stage == "answers")
    [fault] = answers.memory_faults(machine, found.base)
    settings = [setting.partition(" and ")[0] for setting in fault.remedy.split(" or ")]
    assert settings == ["tuning.batch_size = 256", "tuning.precision = bf16"]


def test_experts_that_a_rival_begins_with_are_planned_as_experts(tmp_path):
    asked = {
        "seed_model.model": ROOT / "recipes/large/llama-3-8b",
        "tuning.training": "{steps: 400, sequence_length: 512}",
        "experts.training": "{steps: 100, batch_size: 2, sequence_length: 512, precision: bf16}",
        "compute.experts": "{gpus: 1}",
    }
    training = "{steps: 100, batch_size: 1, sequence_length: 128}"
    rival = f"{{method: btx, seed_expert: true, top_k: 2, training: {training}}}"

    def planned(**more):
        settings = [f"{key}={value}" for key, value in {**asked, **more}.items()]
        recipe = load_recipe(ROOT / "recipes/simoe.yaml", settings)
        machine = Machine(10**12, 64, 10**14, gpus=8, gpu_memory=80 * 10**9)
        return plan(recipe, tmp_path, machine, base=500_000_000)

    found = planned(**{"baselines.btx": rival})
    rivals, experts = next(row for row in found.rows if row.stage == "baselines").kinds
    assert experts.pieces == experts.items == 5  # domains of the recipe's categories
    whole = 4 * 8_030_261_248
    assert rivals.passing == experts.pieces * whole  # beside which the rival is trained
    assert rivals.each > rivals.kept + whole  # with what it starts from
    assert experts.each == 3 * whole  # a checkpoint of weights and two moments
    [fault] = (f for f in found.faults() if f.field == "compute.experts")
    assert "baselines: experts: 1 x" in str(fault.value)
    assert experts.kept == 0
    own = "{method: simoe, training: {steps: 800, batch_size: 1, sequence_length: 128}}"
    simoe = next(r for r in planned(**{"baselines.own": own}).rows if r.stage == "baselines")
    assert simoe.kinds == [simoe]


@pytest.mark.parametrize("is_tied", [True, False])
def test_experts_of_a_head_that_is_the_embedding_are_refused(tmp_path, llama, is_tied):
    config = json.loads((llama / "config.json").read_text()) | {"tie_word_embeddings": is_tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = [f"seed_model.model={tmp_path}", "simoe.lm_head=true", "tuning.training={steps: 400}"]
    recipe = load_recipe(ROOT / "recipes/simoe.yaml", asked)
    with nullcontext() if not is_tied else pytest.raises(InputError) as refused:
        plan(recipe, tmp_path, Machine(10**11, 1, 10**13), base=500_000_000)
    if is_tied:
        assert [fault.field for fault in refused.value.faults] == ["simoe.lm_head"]


@pytest.mark.parametrize(("tokens", "is_refused"), [(64, False), (65, True)])
def test_answers_that_a_seed_has_no_positions_for_are_refused(tmp_path, llama, tokens, is_refused):
    config = json.loads((llama / "config.json").read_text()) | {"max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = {
        "seed_model.model": tmp_path,
        "tuning.training": "{steps: 400, sequence_length: 64}",
        "tuning.max_new_tokens": tokens,
    }
    recipe = load_recipe(ROOT / "recipes/simoe.yaml", [f"{k}={v}" for k, v in asked.items()])
    with nullcontext() if not is_refused else pytest.raises(InputError) as refused:
        subjects_of(recipe, tmp_path / "models")
    if is_refused:
        (fault,) = refused.value.faults
        assert fault.field == "tuning.max_new_tokens"
        assert "are 129, more than the 128 positions of seed_model.model" in fault.remedy


def test_answers_have_the_positions_of_a_stretched_rope(tmp_path, llama):
    config = json.loads((llama / "config.json").read_text()) | {"max_position_embeddings": 64}
    config |= {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    training = "tuning.training={steps: 400, sequence_length: 64}"
    asked = [f"seed_model.model={tmp_path}", training, "tuning.max_new_tokens="]
    recipe = load_recipe(ROOT / "recipes/simoe.yaml", [*asked[:2], f"{asked[2]}64"])
    subjects_of(recipe, tmp_path / "models")
    recipe = load_recipe(ROOT / "recipes/simoe.yaml", [*asked[:2], f"{asked[2]}65"])
    with pytest.raises(InputError, match="more than the 128 positions"):
        subjects_of(recipe, tmp_path / "models")
