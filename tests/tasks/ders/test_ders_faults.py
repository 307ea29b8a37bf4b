"""What is wrong with deltas in a recipe, found without any file."""

import copy

import pytest
from pico import save_pico

from tasks.ders.section import section
from tasks.recipes import check, validate
from upcycle_core.errors import InputError

TEXT = {"files": ["text.txt"]}
VALID = {
    "name": "deltas",
    "domains": {"code": {"train": TEXT}, "law": {"train": TEXT}},
    "seed_model": {"shape": {"hidden_size": 64, "intermediate_size": 96}},
    "baselines": {
        "light": {"method": "ders", "ders": {"codec": "low_rank", "rank": 4}},
        "copies": {"method": "sparse-upcycling"},
        "dense": {"method": "full-finetune"},
    },
    "compression": {
        "models": ["dume", "copies"],
        "codecs": {
            "few": {"codec": "sparse", "drop_rate": 0.9},
            "coarse": {"codec": "quantised", "bits": 4, "group_size": 16},
            "rank": {"codec": "low_rank", "energy": 0.9},
        },
    },
}


def fields_of(values):
    with pytest.raises(InputError) as error:
        validate(values)
    return {fault.field for fault in error.value.faults}


def changed(path, value):
    values = copy.deepcopy(VALID)
    *parents, last = path.split("/")
    place = values
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return values


def test_a_valid_recipe_has_no_fault():
    recipe = validate(VALID)
    assert section(recipe).models == ("dume", "copies")
    assert recipe.baselines["light"].experts(2) == 2


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("codecs/few/drop_rate", 1.0, "codecs.few.drop_rate"),
        ("codecs/few/drop_rate", -0.1, "codecs.few.drop_rate"),
        ("codecs/few", {"codec": "sparse"}, "codecs.few.drop_rate"),
        ("codecs/few/rank", 4, "codecs.few.rank"),
        ("codecs/coarse/bits", 3, "codecs.coarse.bits"),
        ("codecs/rank/rank", 4, "codecs.rank.rank"),
        ("codecs/rank/energy", 1.5, "codecs.rank.energy"),
        ("codecs/rank", {"codec": "low_rank", "rank": 65}, "codecs.rank.rank"),
        ("codecs/original", {"codec": "quantised", "bits": 8}, "codecs.original"),
        ("codecs/No name", {"codec": "quantised", "bits": 8}, "codecs.No name"),
        ("codecs", {}, "codecs"),
        ("models", [], "models"),
        ("models", ["dume", "dume"], "models"),
        ("codecs/coarse/keep", "magnitude", "codecs.coarse.keep"),
        ("codecs/rank/rescale", False, "codecs.rank.rescale"),
        ("models", ["light"], "models"),
        ("models", ["dense"], "models"),
        ("models", ["copies", "nobody"], "models"),
    ],
)
def test_a_fault_of_the_compression_is_named(path, value, field):
    assert fields_of(changed(f"compression/{path}", value)) == {f"compression.{field}"}


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("light/ders", None, "light.ders"),
        ("light/ders", {"codec": "sparse", "drop_rate": 1}, "light.ders.drop_rate"),
        ("light/ders", {"codec": "low_rank", "rank": 65}, "light.ders.rank"),
        ("light/top_k", 1, "light.top_k"),
        ("light/ders", {"codec": "low_rank"}, "light.ders.rank"),
        ("copies/title", "DUME", "copies.title"),
        ("copies/objective", {"trainable": ["shared_base"]}, "copies.objective.trainable"),
        ("copies/ders", {"codec": "low_rank", "rank": 4}, "copies.ders"),
    ],
)
def test_a_fault_of_a_row_is_named(path, value, field):
    assert fields_of(changed(f"baselines/{path}", value)) == {f"baselines.{field}"}


@pytest.mark.parametrize(("drawn", "fits"), [(0.5, False), (0.4, True)])
def test_experts_that_are_mostly_drawn_anew_have_no_ancestor(drawn, fits):
    values = changed("baselines/dropped", {"method": "drop-upcycling", "reinitialised": drawn})
    values["compression"]["models"] = ["dume", "dropped"]
    if fits:
        validate(values)
    else:
        assert fields_of(values) == {"compression.models"}
        values["compression"]["base"] = "mean"
        validate(values)
        values["compression"] |= {"base": "seed", "minimum_cosine": 0.3}
        validate(values)


def test_ranks_reach_the_smaller_side_of_a_matrix():
    for shape in ((32, 96), (96, 32)):
        values = changed("compression/codecs/rank", {"codec": "low_rank", "rank": 32})
        sizes = dict(zip(("hidden_size", "intermediate_size"), shape, strict=True))
        values["seed_model"]["shape"] = sizes
        validate(values)
        values["compression"]["codecs"]["rank"]["rank"] = 33
        assert fields_of(values) == {"compression.codecs.rank.rank"}


def given(folder):
    """A recipe of given experts and their given seed; every matrix is 32 by 48."""
    seed = save_pico(folder / "seed", seed=0, max_position_embeddings=1024)
    domains = {}
    for number, name in enumerate(("code", "law"), 1):
        text = folder / f"{name}.txt"
        text.write_text(f"text of some length on {name}\n<|doc|>\nmore of it\n" * 20)
        expert = str(save_pico(folder / name, seed=number, max_position_embeddings=1024))
        domains[name] = {"expert": expert, "train": {"files": [str(text)]}}
    codecs = {
        "rank": {"codec": "low_rank", "rank": 32},
        "coarse": {"codec": "quantised", "bits": 4},
    }
    light = {"method": "ders", "ders": {"codec": "low_rank", "rank": 32}}
    return {
        "name": "deltas",
        "domains": domains,
        "seed_model": {"model": str(seed)},
        "compression": {"codecs": codecs},
        "baselines": {"light": light},
    }


def test_ranks_above_the_matrices_of_given_models_are_refused_before_anything_is_made(tmp_path):
    values = given(tmp_path)
    check(validate(values), tmp_path)
    values["compression"]["codecs"]["rank"]["rank"] = 33
    values["baselines"]["light"]["ders"]["rank"] = 40
    with pytest.raises(InputError) as error:
        check(validate(values), tmp_path)
    assert {fault.field: fault.value for fault in error.value.faults} == {
        "compression.codecs.rank.rank": 33,
        "baselines.light.ders.rank": 40,
    }
    assert "above the matrices, 32 by 48; use at most 32" in str(error.value)


def test_one_expert_a_token_trains_the_router_where_its_weight_is_not_always_one():
    row = {"method": "ders", "top_k": 1, "ders": {"codec": "low_rank", "rank": 4}}
    for more in ({"combine": "sum"}, {"universal": "delta"}):
        validate(changed("baselines/light", {**row, "ders": {**row["ders"], **more}}))


def test_strangers_share_no_base():
    values = changed("symphony", {})
    values["baselines"] = {}
    values["compression"]["models"] = ["symphony"]
    values["compression"]["base"] = "mean"
    assert fields_of(values) == {"compression"}


def test_ready_experts_without_their_seed_are_taken_apart_from_their_mean():
    values = copy.deepcopy(VALID)
    values["baselines"] = {}
    values["compression"]["models"] = ["dume"]
    values["domains"] = {
        name: {"expert": name, "calibration": TEXT, "heldout": TEXT} for name in ("code", "law")
    }
    assert fields_of(values) == {"compression.base"}
    values["compression"]["base"] = "mean"
    assert section(validate(values)).models == ("dume",)
