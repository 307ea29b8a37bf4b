"""What is wrong in a recipe that joins models of different origin, found without any file."""

import copy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.methods import METHODS, models_of
from tasks.recipes import validate
from tasks.release.card import of_experts
from tasks.symphony.experts import experts
from tasks.symphony.model import baselines as stage
from tasks.symphony.model import model
from tasks.symphony.pairs import _lacking
from tasks.symphony.variants import anchor_of, chosen_of, pairings, section, variants
from upcycle_core.corpora.shards import write_split
from upcycle_core.errors import InputError

TEXT = {"files": ["text.txt"]}
VALID = {
    "name": "strangers",
    "domains": {
        "code": {"train": TEXT, "origin": {"mixture": {"code": 3, "law": 1}}},
        "law": {"train": TEXT, "origin": {"initialisation": 7}},
        "physics": {"train": TEXT},
    },
    "outside": {"medicine": TEXT},
    "symphony": {"anchor": "law"},
    "moe": {"top_k": 2},
    "post_training": {},
    "baselines": {
        "paper": {"method": "symphony", "symphony": {"alignment": {"neurons": "cosine"}}}
    },
}


def fields_of(values):
    with pytest.raises(InputError) as error:
        validate(values)
    return {fault.field for fault in error.value.faults}


def changed(path, value):
    values = copy.deepcopy(VALID)
    *parents, last = path.split(".")
    place = values
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return values


def test_every_row_of_the_report_is_scored():
    assert fields_of(changed("evaluation.rows", ["oracle"])) == {"evaluation.rows"}


@pytest.mark.parametrize(
    "sweep", [{"sweep_top_k": [1, 2]}, {"sweep_ridge_lambda": [0.1]}, {"sweep_window": [2]}]
)
def test_no_sweep_is_asked_for_that_the_report_does_not_hold(sweep):
    (name,) = sweep
    values = changed("evaluation", sweep) | {"statistics": {"position_buckets": [2]}}
    assert fields_of(values) == {f"evaluation.{name}"}


def test_all_backbones_are_merged():
    assert fields_of(changed("backbone.experts", ["code"])) == {"backbone.experts"}


def test_a_valid_recipe_has_no_fault():
    recipe = validate(VALID)
    assert recipe.method == "symphony"
    assert list(variants(recipe)) == ["symphony", "paper"]
    assert tuple(models_of(recipe)) == (
        "expert_code",
        "expert_law",
        "expert_physics",
        "model_averaging",
        "harmonised",
        "symphony",
        "paper",
    )


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("domains.code.origin.mixture", {"tax": 1}, "domains.code.origin.mixture"),
        ("domains.code.origin.mixture", {"law": -1}, "domains.code.origin.mixture.law"),
        ("domains.code.origin.mixture", {"law": 0}, "domains.code.origin.mixture"),
        ("domains.code.expert", "models/code", "domains.code.origin"),
        ("domains.law.origin.model", "models/law", "domains.law.origin.initialisation"),
        ("domains.law.elsewhere", TEXT, "domains.law.elsewhere"),
        ("domains.law.origin.vocabulary_size", 400, "symphony.segmentation"),
        (
            "post_training.objective.trainable",
            ["router", "shared_base"],
            "post_training.objective.trainable",
        ),
        ("experts.training.method", "lora", "experts.training.method"),
        ("symphony.anchor", "tax", "symphony.anchor"),
        ("symphony.models", ["law"], "symphony.models"),
        ("symphony.models", ["law", "law"], "symphony.models"),
        ("symphony.models", ["code", "physics"], "symphony.anchor"),
        ("symphony.merge", {"weights": {"tax": 1}}, "symphony.merge.weights"),
        ("symphony.merge", {"weights": {"law": -1}}, "symphony.merge.weights"),
        (
            "symphony.merge",
            {"weights": dict.fromkeys(VALID["domains"], 0)},
            "symphony.merge.weights",
        ),
        ("symphony.calibration", {"domains": ["tax"]}, "symphony.calibration.domains"),
        ("symphony.calibration", {"domains": []}, "symphony.calibration.domains"),
        ("baselines.paper.symphony.anchor", "tax", "baselines.paper.symphony.anchor"),
        ("baselines.paper.symphony.segmentation", "law", "baselines.paper.symphony.segmentation"),
        ("baselines.seeded", {"method": "sparse-upcycling"}, "baselines.seeded.method"),
        ("baselines.drop", {"method": "drop-upcycling"}, "baselines.drop.start"),
        ("baselines.harmonised", {"method": "btx"}, "baselines.harmonised"),
        ("baselines.more", {"method": "btx", "seed_expert": True}, "baselines.more.seed_expert"),
        ("baselines.more", {"method": "btx", "reinitialised": 0.2}, "baselines.more.reinitialised"),
        ("symphony.rope", "anchor", "symphony.rope"),
        (
            "baselines.dense",
            {
                "method": "full-finetune",
                "tuned": "lora",
                "training": {"steps": 20, "checkpoint_steps": 10, "evaluation_steps": 10},
            },
            "baselines.dense.training.evaluation_steps",
        ),
        ("seed_model.model", "models/seed", "seed_model.model"),
        ("moe.top_k", 1, "moe.top_k"),
        (
            "post_training.training",
            {"steps": 10, "warmup_steps": 10},
            "post_training.training.warmup_steps",
        ),
        (
            "post_training.objective",
            {"domain_weights": {"tax": 1}},
            "post_training.objective.domain_weights",
        ),
        ("compute.post_training", {"workers": 2}, "post_training.training.gradient_accumulation"),
        ("outside.law", TEXT, "outside.law"),
        ("outside.medicine", {}, "outside.medicine"),
        ("symphony.calibration", {"sequence_length": 2048}, "symphony.calibration.sequence_length"),
    ],
)
def test_each_fault_names_its_field(path, value, field):
    assert field in fields_of(changed(path, value))


@pytest.mark.parametrize("place", ["symphony", "baselines.paper.symphony"])
def test_ridge_routers_get_folds_and_are_solved_jointly(place):
    values = changed(f"{place}.router", "ridge")
    assert validate(values).statistics.folds is None  # as models of before were recorded
    values["router"] = {"ridge_lambda": "cross-validate"}
    assert validate(values).statistics.folds == 4
    assert section(validate(values)).anchor == "law"
    assert fields_of(values | {"statistics": {"folds": 1}}) == {"statistics.folds"}
    assert fields_of(values | {"router": {"solve": "sequential"}}) == {"router.solve"}
    assert validate(VALID | {"router": values["router"]}).statistics.folds is None


def test_text_that_no_lambda_can_be_chosen_on_is_said_before_models_are_trained(tmp_path):
    values = changed("symphony.router", "ridge") | {"router": {"ridge_lambda": "cross-validate"}}
    workspace = Workspace(tmp_path / "home" / "strangers")
    session = Session(validate(values), workspace, log=print)
    for domain, count in {"code": 1, "law": 1, "physics": 2}.items():
        texts = [(np.full(9, 3), 9)] * count + [(np.full(2, 3), 2)]
        folder = workspace.path(f"corpora/{domain}/calibration")
        write_split(folder, texts, eos_id=0, vocabulary_size=96)
        file = workspace.path(f"documents/{domain}") / "calibration.parquet"
        file.parent.mkdir(parents=True)
        parquet.write_table(pyarrow.table({"text": ["some text"] * count}), file)
    looks = METHODS["symphony"].before()
    for stage_name in ("experts", "united"):
        faults = list(looks[stage_name](session))
        fields = [fault.field for fault in faults]
        assert fields == ["domains.code.calibration", "domains.law.calibration"]
    session.recipe = validate(changed("symphony.router", "ridge"))
    assert not [fault for look in looks.values() for fault in look(session)]


def test_bam_has_no_counterpart_for_qwen2():
    values = changed("baselines.bam", {"method": "bam"})
    validate(values)
    values["seed_model"] = {"shape": {"family": "qwen2"}}
    assert fields_of(values) == {"baselines.bam.method"}


def test_all_faults_come_in_one_message():
    values = changed("symphony.anchor", "tax")
    values["moe"]["top_k"] = 1
    values["domains"]["law"]["elsewhere"] = TEXT
    assert {"symphony.anchor", "moe.top_k", "domains.law.elsewhere"} <= fields_of(values)


def test_without_a_symphony_section_its_fields_are_no_use():
    values = {**VALID, "symphony": None, "similarity": {}}
    assert {
        "domains.code.origin",
        "domains.law.origin",
        "post_training",
        "similarity",
        "outside.medicine",
        "baselines.paper.method",
    } <= fields_of(values)


def test_variants_on_the_same_text_and_anchor_share_what_is_collected():
    values = copy.deepcopy(VALID)
    paper = values["baselines"]["paper"]["symphony"]
    rows = {
        "same": {**paper, "anchor": "law"},
        "other-anchor": {**paper, "anchor": "code"},
        "other-text": {**paper, "anchor": "law", "calibration": {"domains": "anchor"}},
        "nothing": {"anchor": "law", "alignment": {"neurons": "none"}},
        "without-data": {
            "anchor": "law",
            "alignment": {"neurons": "none", "residual": "embeddings"},
        },
    }
    values["baselines"] = {n: {"method": "symphony", "symphony": row} for n, row in rows.items()}
    assert pairings(validate(values)) == {
        "symphony": "symphony",
        "same": "symphony",
        "other-anchor": "other-anchor",
        "other-text": "other-text",
    }


def test_experts_stand_in_the_recipe_s_order_however_models_are_named():
    values = changed("symphony", {"models": ["physics", "code"]})
    recipe = validate(values)
    assert chosen_of(recipe, section(recipe)) == ("code", "physics")
    assert anchor_of(recipe, section(recipe)) in ("code", "physics")


@pytest.mark.parametrize("where", ["symphony", "baselines.paper.symphony"])
def test_a_solver_that_is_not_installed_is_said_before_models_are_trained(monkeypatch, where):
    monkeypatch.setitem(sys.modules, "lapjv", None)
    values = changed(f"{where}.alignment", {"solver": "lapjv"})
    assert fields_of(values) == {f"{where}.alignment.solver"}
    validate(changed(f"{where}.alignment", {"solver": "lapjv", "neurons": "none"}))
    installed = ModuleType("lapjv")
    installed.__spec__ = ModuleSpec("lapjv", None)
    monkeypatch.setitem(sys.modules, "lapjv", installed)
    validate(values)


def test_the_anchor_is_the_first_by_name_before_domains_are_in_order_too():
    values = changed("symphony", {"rope": "anchor"})
    own = {"expert": "models/physics", "train": TEXT}
    values["domains"] = {"physics": own, "code": {"train": TEXT}, "law": {"train": TEXT}}
    values["symphony"]["segmentation"] = "law"
    assert fields_of(values) == {"symphony.rope"}  # code's model, which is trained here
    values["symphony"]["anchor"] = "physics"
    assert section(validate(values)).rope == "anchor"


def test_rows_are_joined_to_the_recipe_s_anchor():
    """One that names none, but not one that leaves that model out, or names another."""
    values = changed("baselines.fewer", {"method": "symphony", "symphony": {}})
    values["baselines"]["fewer"]["symphony"] = {"models": ["code", "physics"]}
    values["baselines"]["other"] = {"method": "symphony", "symphony": {"anchor": "code"}}
    values["baselines"]["plain"] = {"method": "symphony"}
    found = {name: own.anchor for name, own in variants(validate(values)).items()}
    assert found == {
        "symphony": "law", "paper": "law", "fewer": None, "other": "code", "plain": "law"
    }  # fmt: skip


def test_a_row_that_tunes_a_part_is_trained_and_recorded_as_such():
    rows = {"one": {"method": "full-finetune"}, "part": {"method": "full-finetune"}}
    rows["part"] |= {"tuned": "lora", "lora": {"rank": 2}}
    before = validate(changed("baselines", rows))
    assert before.baselines["part"].trained_as.method == "lora"
    rows["part"]["lora"] = {"rank": 4}
    after = validate(changed("baselines", rows))
    assert stage.values(before, "part") != stage.values(after, "part")
    assert stage.values(before, "one") == stage.values(after, "one")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("domains.law.heldout", TEXT),
        ("experts.continued", {"steps": 7, "warmup_steps": 1}),
        ("statistics.tokens", 999),
        ("router.scale", 2.0),
    ],
)
def test_what_has_no_part_in_post_training_does_not_start_it_again(path, value):
    before, after = validate(VALID), validate(changed(path, value))
    assert before != after
    assert model.values(before, "") == model.values(after, "")


def test_post_training_begins_again_where_its_own_settings_change():
    before, after = validate(VALID), validate(changed("post_training.training", {"steps": 77}))
    assert model.values(before, "") != model.values(after, "")


def test_a_model_that_training_goes_on_from_may_lie_elsewhere():
    own = [
        {"model": "/here", "mixture": {"code": 1.0}},
        {"model": "/there", "mixture": {"code": 1}},
    ]
    here, there = (validate(changed("domains.code.origin", origin)) for origin in own)
    assert experts.values(here, "code") == experts.values(there, "code")
    mixed = validate(changed("domains.code.origin", own[0] | {"mixture": {"code": 2, "law": 1}}))
    assert experts.values(here, "code") != experts.values(mixed, "code")


def test_a_token_passes_through_as_many_experts_as_there_are():
    values = changed("symphony.models", ["code", "law"])
    values["moe"]["top_k"] = 3
    assert fields_of(values) == {"moe.top_k"}


def test_a_version_names_the_domains_whose_models_are_its_experts():
    """The others are aligned and give it tokens, and have no expert."""
    assert of_experts(validate(VALID)) == "Symphony-MoE Mixture-of-Experts of code, law, physics"
    some = validate(changed("symphony.models", ["physics", "law"]))
    assert of_experts(some) == "Symphony-MoE Mixture-of-Experts of law, physics"


def test_how_little_the_shortest_text_lends_to_all_is_said():
    (said,) = _lacking(100_000, [{"tokens": {"law": 600, "code": 600}}])
    assert "asks for 100,000 of each text, and the shortest has 600: so many are" in said
    assert said.endswith("(law, code)")
    assert not list(_lacking(600, [{"tokens": {"law": 600, "code": 600}}]))
