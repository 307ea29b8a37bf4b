"""What prepared instructions lack is said before anything is tuned, and no later as a KeyError."""

import json
from types import SimpleNamespace

import pytest
from pico import save_pico

from tasks.recipes import validate
from tasks.simoe.model import TRAIN, _of_tasks, _warnings, baselines, model
from tasks.simoe.prepared import prepared_faults
from tasks.simoe.register import register_tuned
from tests.tasks.simoe.test_simoe_faults import VALID, changed
from upcycle_core.errors import InputError
from upcycle_core.simoe.config import SimoeUpcyclingConfig

GATE = {"metric": "rouge_l_unseen", "tolerances": {"exact_match_seen": 1.0}}


def prepared(folder, *, labels=("law", "tax"), asked=("seen", "unseen")):
    (folder / "train").mkdir(parents=True)
    for label in labels:
        (folder / "train" / f"{label}.jsonl").touch()
    for split in ("seen", "unseen"):
        (folder / f"{split}.jsonl").write_text("{}\n" if split in asked else "")
    return folder


@pytest.mark.parametrize("stage", [model, baselines])
@pytest.mark.parametrize(
    ("values", "made", "said"),
    [
        (VALID, {"labels": ["all"]}, "instructions.domains = ['all']: too few labels to train on"),
        (
            changed("registry/gate", GATE),
            {"asked": ["unseen"]},
            "registry.gate = 'exact_match_seen': no question of a task that is seen in training",
        ),
        (
            changed("tuning/least_exact_match", 0.3),
            {"asked": ["unseen"]},
            "tuning.least_exact_match = 0.3: no question of a task that is seen in training",
        ),
    ],
    ids=["labels", "gate", "limit"],
)
def test_what_is_missing_is_said_before_any_row_is_tuned(tmp_path, stage, values, made, said):
    prepared(tmp_path, **made)
    run = SimpleNamespace(
        recipe=validate(values), item="dense", path=lambda name: tmp_path / "train"
    )
    with pytest.raises(InputError) as error:
        stage.function(run)
    assert said in str(error.value)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_the_embedding_of_a_given_seed_grows_no_experts(tmp_path, tied):
    prepared(tmp_path / "instructions")
    seed = save_pico(tmp_path / "seed", tie_word_embeddings=tied)
    values = changed("seed_model", {"model": str(seed)})
    values["baselines"]["free"]["simoe"] = {"masks": "real", "lm_head": True}
    path = {TRAIN: tmp_path / "instructions" / "train", "seed": seed}.get
    run = SimpleNamespace(recipe=validate(values), item="free", path=path, out=None)
    # What comes after it needs the device that is reserved.
    with pytest.raises(InputError if tied else AttributeError) as error:
        baselines.function(run)
    assert not tied or "baselines.free.simoe.lm_head = True: the seed's head is" in str(error.value)


def test_what_the_gate_does_not_ask_for_may_be_missing(tmp_path):
    assert not list(prepared_faults(validate(VALID), prepared(tmp_path, asked=["unseen"])))


def test_a_gate_that_was_changed_after_tuning_is_held_against_what_was_asked(tmp_path):
    prepared(tmp_path / "instructions", asked=["unseen"])
    score = {"exact_match": {"mean": 0.5}, "rouge_l": {"mean": 0.5}}
    metrics = {"rows": {"simoe": {"seen": None, "unseen": score}}}
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "metrics.json").write_text(json.dumps(metrics))
    (tmp_path / "report" / "table.md").write_text("")
    recipe = validate(changed("registry/gate", {"metric": "exact_match_seen"}))
    workspace = SimpleNamespace(path=lambda name: tmp_path / name)
    session = SimpleNamespace(recipe=recipe, workspace=workspace)
    registrar = SimpleNamespace(session=session, offered=lambda: None)
    with pytest.raises(InputError, match=r"registry\.gate = 'exact_match_seen'"):
        register_tuned(registrar, None)


def test_what_a_training_came_to_and_nobody_expects_is_said():
    usual = {"sparsity_unsettled": 0.7, "records": 95, "left_out": 5, "common": None}
    config = SimoeUpcyclingConfig(tau=0.75)
    assert not list(_warnings(usual, config))
    assert not list(_warnings(usual | {"sparsity_unsettled": None}, config))
    (said,) = _warnings(usual | {"sparsity_unsettled": 0.25}, config)
    assert "lambda had closed 25.0 % until the last tenth of the steps, of the 75 %" in said
    (said,) = _warnings(usual | {"left_out": 1905}, config)
    assert said.startswith("1,905 of 2,000 instructions are longer than")


def test_what_prompts_have_in_common_is_said_with_its_share():
    usual = {"sparsity_unsettled": None, "records": 95, "left_out": 5, "common": 0.934}
    (said,) = _warnings(usual, SimoeUpcyclingConfig(standardise=True))
    assert said == "93.4 % of what the router reads is common to all prompts, and is taken away"
    (said,) = _warnings(usual, SimoeUpcyclingConfig())
    assert said.startswith("93.4 % of what the router reads is common to all prompts and tells it")
    assert "simoe.standardise: true" in said
    assert not list(_warnings(usual | {"common": 0.3}, SimoeUpcyclingConfig()))


def test_a_task_of_two_categories_is_said_to_have_one_mixture_where_routing_goes_by_task(tmp_path):
    files = [tmp_path / "law.jsonl", tmp_path / "tax.jsonl"]
    more = json.dumps({"task": "sum", "category": "Law"}) + "\n"
    for file, category in zip(files, ("Law", "Tax"), strict=True):
        file.write_text(json.dumps({"task": "qa", "category": category}) + "\n" + more)
    by_task = SimoeUpcyclingConfig(routing="task")
    (said,) = _of_tasks(by_task, files)
    assert said == "the task qa is in Law and Tax, and has one mixture in all"
    assert not list(_of_tasks(SimoeUpcyclingConfig(), files))
    assert not list(_of_tasks(by_task, files[:1]))


@pytest.mark.parametrize(
    ("routing", "what"),
    [
        ("instance", "no table can say whether the router tells kinds of prompts apart"),
        ("task", "every prompt gets the same mixture of experts; simoe.routing: instance"),
    ],
)
def test_instructions_of_one_task_are_said_before_the_training(tmp_path, routing, what):
    file = tmp_path / "law.jsonl"
    file.write_text(2 * (json.dumps({"task": "qa", "category": "Law"}) + "\n"))
    (said,) = _of_tasks(SimoeUpcyclingConfig(routing=routing), [file])
    assert said.startswith(f"all instructions are of one task, qa: {what}")
    assert said.endswith("name their kinds in the files' field `task`")
