"""What is wrong with instruction tuning in a recipe, found without any file."""

import contextlib
import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
from pico import save_pico
from transformers import AutoConfig, AutoTokenizer

from tasks.data.instructions import instructions
from tasks.engine.stage import Session, StageRun
from tasks.engine.workspace import Workspace
from tasks.recipes import validate
from tasks.simoe.report import check_reached
from tasks.simoe.rows import SIMOE, tuned
from tasks.simoe.sources import outside_faults, sources
from upcycle_core.errors import InputError

TRAINING = {"steps": 20, "warmup_steps": 2, "sequence_length": 64}
VALID = {
    "name": "tuned",
    "domains": {"text": {"train": {"files": ["text.txt"]}}},
    "seed_model": {"shape": {"max_positions": 128}, "training": {**TRAINING}},
    "experts": {"training": TRAINING},
    "instructions": {"sources": {"families": {"generate": "families"}}},
    "tuning": {"training": TRAINING, "max_new_tokens": 8},
    "simoe": {"experts": 4, "mask_learning_rate": 0.5},
    "baselines": {
        "dense": {"method": "full-finetune", "training": TRAINING},
        "copies": {"method": "sparse-upcycling", "copies": 4, "training": TRAINING},
        "btx": {"method": "btx", "training": TRAINING},
        "free": {"method": "simoe", "simoe": {"masks": "real"}, "training": TRAINING},
    },
    "evaluation": {"sequence_length": 64},
    "registry": {"gate": {"metric": "rouge_l_unseen"}},
}


def changed(path, value):
    values = copy.deepcopy(VALID)
    *parents, last = path.split("/")
    place = values
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return values


def fields_of(values):
    with pytest.raises(InputError) as error:
        validate(values)
    return {fault.field for fault in error.value.faults}


def test_a_sound_recipe_has_its_rows():
    recipe = validate(VALID)
    assert recipe.method == SIMOE
    assert tuned(recipe) == ("seed", "dense", "copies", "btx", "free", SIMOE)
    assert recipe.has_seed
    assert recipe.trains_seed


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("moe/top_k", 2, "moe.top_k"),
        ("simoe/tau", 1.0, "simoe.tau"),
        ("simoe/tau", -0.1, "simoe.tau"),
        ("simoe/mask_learning_rate", 0.01, "simoe.mask_learning_rate"),
        ("baselines/free/simoe", {}, "baselines.free.simoe.mask_learning_rate"),
        ("simoe/experts", 1, "simoe.experts"),
        ("baselines/free/simoe", {"experts": 1}, "baselines.free.simoe.experts"),
        (
            "baselines/free/simoe",
            {"masks": "real", "sparsity": "union"},
            "baselines.free.simoe.sparsity",
        ),
        ("simoe", {"sparsity": "use", "routing": "token"}, "simoe.sparsity"),
        ("simoe", {"routing": "task", "router_hidden_size": 8}, "simoe.router_hidden_size"),
        ("simoe", {"masks": "real", "tau": 0.9}, "simoe.tau"),
        ("simoe/lm_head", True, "simoe.lm_head"),
        ("baselines/free/simoe/lm_head", True, "baselines.free.simoe.lm_head"),
        ("baselines/free/top_k", 4, "baselines.free.top_k"),
        ("simoe/reopen", True, "simoe.closing"),
        (
            "baselines/free",
            {
                "method": "simoe",
                "training": {**TRAINING, "batch_size": 1},
                "simoe": {"masks": "real", "balance": 0.1},
            },
            "baselines.free.simoe.balance",
        ),
        ("simoe/closing", 1.5, "simoe.closing"),
        *(
            ("baselines/free/simoe", {**given, word: value}, f"baselines.free.simoe.{word}")
            for given, word, value in (
                ({"masks": "real"}, "closing", 0.4),
                ({"masks": "real"}, "reopen", True),
                ({"routing": "task"}, "standardise", True),
                ({"routing": "task"}, "balance", 0.1),
            )
        ),
        ("instructions/sources", {}, "instructions.sources"),
        ("instructions/train_categories", ["smallest"], "instructions.train_categories"),
        ("baselines/copies/copies", None, "baselines.copies.copies"),
        (
            "baselines/copies",
            {"method": "drop-upcycling", "start": "experts", "training": TRAINING},
            "baselines.copies.start",
        ),
        ("baselines/dense/method", "branch-train-merge", "baselines.dense.method"),
        ("baselines/dense/simoe", {}, "baselines.dense.simoe"),
        ("baselines/simoe", {"method": "full-finetune", "training": TRAINING}, "baselines.simoe"),
        (
            "baselines/btx/objective",
            {"domain_weights": {"text": 2.0}},
            "baselines.btx.objective.domain_weights",
        ),
        ("tuning/training/warmup_steps", 20, "tuning.training.warmup_steps"),
        ("tuning/max_new_tokens", 100, "tuning.max_new_tokens"),
        ("tuning/training/evaluation_steps", 200, "tuning.training.evaluation_steps"),
        ("registry/gate/metric", "normalised_average", "registry.gate.metric"),
        ("domains", {}, "seed_model.model"),
        ("comparison/tokens", 10**6, "comparison.tokens"),
        ("evaluation/sweep_top_k", [1], "evaluation.sweep_top_k"),
        ("evaluation/sweep_ridge_lambda", [0.1], "evaluation.sweep_ridge_lambda"),
        ("backbone/experts", ["text"], "backbone.experts"),
        ("symphony", {}, "symphony"),
        (
            "compute/post_training",
            {"workers": 2},
            "tuning.training.gradient_accumulation",
        ),
        (
            "compute/baselines",
            {"workers": 2},
            "baselines.free.training.gradient_accumulation",
        ),
    ],
)
def test_what_does_not_fit_is_named(path, value, field):
    assert field in fields_of(changed(path, value))


def test_masks_that_workers_cannot_divide_are_named_with_their_rows():
    divided = {"workers": 2, "sharding": "full"}
    values = changed("compute/baselines", divided)
    values["compute"]["post_training"] = divided
    shared = {**TRAINING, "gradient_accumulation": 2}
    values["tuning"]["training"] = shared
    for name, row in values["baselines"].items():
        values["baselines"][name] = {**row, "training": shared}
    validate(values)
    own = {"masks": "parameters", "mask_learning_rate": 0.5}
    values["baselines"]["free"]["simoe"] = own
    values["simoe"] = {**values["simoe"], "masks": "parameters"}
    with pytest.raises(InputError) as error:
        validate(values)
    found = {f.field: f.value for f in error.value.faults}
    assert found == {"simoe.masks": "parameters", "baselines.free.simoe.masks": "parameters"}


def test_all_rows_and_the_model_share_their_batches_among_workers():
    values = changed("compute/baselines", {"workers": 2})
    shared = {**TRAINING, "gradient_accumulation": 2}
    values["compute"]["post_training"] = {"workers": 2}
    values["tuning"]["training"] = shared
    for name, row in values["baselines"].items():
        values["baselines"][name] = {**row, "training": shared}
    compute = validate(values).compute
    assert (compute.baselines.workers, compute.post_training.workers) == (2, 2)


def test_without_a_method_instructions_say_nothing():
    values = changed("simoe", None)
    values["domains"]["more"] = values["domains"]["text"]
    values["registry"] = {}
    assert {"instructions", "tuning", "baselines.free.method"} <= fields_of(values)


def test_a_given_model_needs_no_text():
    values = changed("seed_model", {"model": "somewhere/model"})
    values["domains"] = {}
    assert validate(values).trains_seed is False


@pytest.mark.parametrize(
    ("rows", "is_reached"),
    [
        ({"dense": 0.9, "part": 0.1}, True),
        ({"dense": 0.1, "part": 0.9}, False),
        ({"dense": None, "part": 0.1}, True),
    ],
)
def test_what_is_too_hard_is_what_training_all_weights_does_not_reach(rows, is_reached):
    """A row that tunes a part of the weights may be as weak as it is."""
    values = changed("tuning/least_exact_match", 0.5)
    values["baselines"]["part"] = {
        "method": "full-finetune",
        "tuned": "layers",
        "training": TRAINING,
    }
    recipe = validate(values)
    found = {
        row: {"scores": {} if score is None else {"seen": {"exact_match": score}}}
        for row, score in rows.items()
    }
    with contextlib.nullcontext() if is_reached else pytest.raises(InputError, match="too hard"):
        check_reached(recipe, found)


@pytest.mark.parametrize(
    ("rows", "checks"),
    [({"dense": {}}, True), ({"part": {"tuned": "layers"}}, False), ({}, False)],
)
def test_a_limit_that_no_row_is_held_to_is_said_before_anything_is_tuned(tmp_path, rows, checks):
    values = changed("tuning/least_exact_match", 0.5)
    values["seed_model"] = {"model": str(save_pico(tmp_path / "seed"))}
    row = {"method": "full-finetune", "training": TRAINING}
    values |= {"domains": {}, "baselines": {name: row | own for name, own in rows.items()}}
    said: list[str] = []
    out = tmp_path / "out"
    out.mkdir()
    session = Session(validate(values), Workspace(tmp_path / "home" / "tuned"), log=said.append)
    sources.function(StageRun(session, sources, "", out=out, mark="", recorder=None))
    found = [line for line in said if "tuning.least_exact_match = 0.5 checks nothing" in line]
    assert len(found) == (0 if checks else 1)


def test_a_given_seed_has_room_for_prompt_and_answer(tmp_path):
    values = changed("seed_model", {"model": str(save_pico(tmp_path / "seed"))})
    values |= {"domains": {}, "baselines": {}}
    room = AutoConfig.from_pretrained(tmp_path / "seed").max_position_embeddings
    values["tuning"] = {"training": {**TRAINING, "sequence_length": room - 8}, "max_new_tokens": 8}
    assert outside_faults(validate(values), tmp_path / "cache") == []
    values["tuning"]["max_new_tokens"] = 9
    (fault,) = outside_faults(validate(values), tmp_path / "cache")
    assert fault.field == "tuning.max_new_tokens"
    assert f"more than the {room} positions of" in fault.remedy


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_a_given_seed_does_not_have_is_said_before_any_rival_is_trained(tmp_path, tied):
    seed = save_pico(tmp_path / "seed", tie_word_embeddings=tied)
    values = changed("seed_model", {"model": str(seed)}) | {"domains": {}}
    free = values["baselines"]["free"]
    values |= {"simoe": {**values["simoe"], "lm_head": True}}
    values["baselines"] = {"free": {**free, "simoe": {"masks": "real", "lm_head": True}}}
    found = [fault.field for fault in outside_faults(validate(values), tmp_path / "cache")]
    assert found == (["simoe.lm_head", "baselines.free.simoe.lm_head"] if tied else [])


def test_instructions_that_a_given_seed_s_template_refuses_are_found_before_any_training(tmp_path):
    seed = save_pico(tmp_path / "seed")
    tokenizer = AutoTokenizer.from_pretrained(seed)
    tokenizer.chat_template = "{{ raise_exception('only tools') }}"
    tokenizer.save_pretrained(seed)
    values = changed("seed_model", {"model": str(seed)}) | {"domains": {}, "baselines": {}}
    faults = outside_faults(validate(values), tmp_path / "cache")
    assert {fault.field for fault in faults} == {"instructions.sources.families"}
    assert "only tools" in str(faults[0])


@pytest.mark.parametrize("model", [None, "somewhere/model"])
def test_what_is_judged_by_is_drawn_with_the_seed_s_tokenizer_at_hand(model):
    """Its template may refuse what is not among the samples."""
    recipe = validate(changed("seed_model/model", model) if model else VALID)
    given = {}
    paths = SimpleNamespace(recipe=recipe, path=Path, run_one=lambda *_, **own: given.update(own))
    assert "seed" in instructions.inputs(recipe, "")
    instructions.function(paths)
    assert (given["tokenizer"], given["bos"]) == (Path("seed"), "auto")


def test_domains_of_records_matter_where_a_row_trains_an_expert_of_each(tmp_path):
    """Found before anything is trained."""
    file = tmp_path / "a.jsonl"
    row = '{"prompt": "q %d", "response": "a", "category": "%s", "domain": "Computer Science"}\n'
    file.write_text("".join(row % (i, "cu"[i % 2]) for i in range(40)))
    values = changed("seed_model", {"model": str(save_pico(tmp_path / "seed"))})
    own = {"sources": {"own": {"files": [str(file)]}}, "unseen": ["u"]}
    values |= {"domains": {}, "instructions": own}
    (fault,) = outside_faults(validate(values), tmp_path / "cache")
    assert fault.field == "instructions.domains"
    del values["baselines"]["btx"]
    assert outside_faults(validate(values), tmp_path / "cache") == []
