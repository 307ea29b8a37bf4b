"""What a plan says of the models that a recipe names, from their config.json alone."""

import json

import pytest
from forms import change_json
from pico import save_pico

from tasks.planning.subjects import subjects_of
from tasks.recipes import validate
from upcycle_core.errors import InputError


@pytest.fixture
def like(tmp_path, llama):
    """Makes folders of the Llama's config.json with other values."""

    def made(name, **values):
        folder = tmp_path / name
        folder.mkdir()
        config = json.loads((llama / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return made


@pytest.fixture
def refused(tmp_path):
    """{field: all that is said of it} by a plan of domains with these experts."""

    def found(sections=None, /, **experts):
        own = {
            name: {"train": {"files": [f"{name}.txt"]}, **({"expert": str(e)} if e else {})}
            for name, e in experts.items()
        }
        recipe = validate({"name": "small", "domains": own, **(sections or {})})
        try:
            subjects_of(recipe, tmp_path / "models")
        except InputError as error:
            return {fault.field: str(fault) for fault in error.faults}
        return {}

    return found


def test_each_model_that_cannot_be_read_is_said_by_its_field_in_the_recipe(
    tmp_path, llama, like, refused
):
    gemma = like("gemma", model_type="gemma")
    said = refused({"seed_model": {"model": str(tmp_path)}}, code=llama, law=gemma, art=gemma)
    assert set(said) == {
        "domains.law.expert.config.model_type",
        "domains.art.expert.config.model_type",
        "seed_model.model",
    }
    refusal = said["domains.law.expert.config.model_type"]
    assert "= 'gemma': is not supported: no stock MoE" in refusal
    assert f"= '{tmp_path}': has no config.json" in said["seed_model.model"]


@pytest.mark.parametrize("named", ["/data/experts/gone", "./gone", "data/experts/gone"])
def test_a_later_expert_that_is_not_there_is_refused(llama, refused, named):
    """The first one's shape would do for it, if a hub could have it."""
    said = refused(code=llama, law=named)
    assert set(said) == {"domains.law.expert"}
    assert "is no directory, and no name that a hub could have" in said["domains.law.expert"]
    assert not refused(code=llama, law="owner/name")


def test_models_of_a_symphony_are_said_by_their_fields_too(tmp_path, llama, like, refused):
    text = {"train": {"files": ["a.txt"]}}
    domains = {
        "law": text | {"expert": str(like("gemma", model_type="gemma"))},
        "code": text | {"origin": {"model": str(like("sizeless", hidden_size=None))}},
        "art": text | {"expert": str(llama)},
    }
    said = refused({"method": "symphony", "symphony": {}, "domains": domains})
    assert set(said) == {
        "domains.law.expert.config.model_type",
        "domains.code.origin.model.config.hidden_size",
    }


def test_models_that_cannot_become_one_are_refused_as_the_flow_does(llama, like, refused):
    qwen, small = like("qwen", model_type="qwen3"), like("small", hidden_size=2048, head_dim=128)
    said = refused({"seed_model": {"model": str(small)}}, code=llama, law=qwen)
    assert set(said) == {
        "domains.law.expert.config.model_type",
        "seed_model.model.config.hidden_size",
    }
    kind = said["domains.law.expert.config.model_type"]
    assert kind.endswith("another architecture than domains.code.expert (llama); use one family")
    size = said["seed_model.model.config.hidden_size"]
    assert "= 2048: another shape than domains.code.expert (4096); use experts of one" in size


def test_strangers_may_differ_as_their_own_rule_says(llama, like, refused):
    tied = like("tied", tie_word_embeddings=True, vocab_size=32000)
    far = like("far", rope_theta=5e5)
    own = {"method": "symphony", "symphony": {}}
    assert refused(own, code=llama, law=tied) == {}
    assert set(refused(own, code=llama, law=far)) == {"domains.law.expert.config.rope_parameters"}
    assert refused({**own, "symphony": {"rope": "anchor"}}, code=llama, law=far) == {}


def test_a_type_that_what_is_trained_beside_given_experts_has_not_is_refused(llama, refused):
    sections = {"seed_model": {"model": str(llama)}, "experts": {"dtype": "bf16"}}
    assert (
        "what is trained here (law) is fp32"
        in refused(sections, code=llama, law=None)["experts.dtype"]
    )
    assert refused(sections, code=llama, law=llama) == {}


@pytest.mark.parametrize(("length", "is_refused"), [(64, False), (65, True)])
def test_sequences_longer_than_a_model_was_made_for_are_refused_as_the_flow_does(
    llama, like, refused, length, is_refused
):
    short = like("short", max_position_embeddings=64)
    fits = {"statistics": {"sequence_length": 64, "window": None}}
    said = refused({**fits, "evaluation": {"sequence_length": length}}, code=short, law=llama)
    assert ("evaluation.sequence_length" in said) == is_refused
    if is_refused:
        assert "longer than the 64 positions of" in said["evaluation.sequence_length"]
        assert set(said) == {"evaluation.sequence_length"}


@pytest.mark.parametrize(
    ("sections", "field", "said"),
    [
        (
            {
                "compression": {
                    "base": "mean",
                    "codecs": {"low": {"codec": "low_rank", "rank": 5000}},
                }
            },
            "compression.codecs.low.rank",
            "above the matrices, 4096 by 14336; use at most 4096",
        ),
        (
            {"experts": {"repair": "down"}, "statistics": {"tokens": 1000}},
            "statistics.tokens",
            "",
        ),
        (
            {"backbone": {"merge": {"head": "counts"}}},
            "backbone.merge.head",
            "the head is the embedding",
        ),
    ],
)
def test_what_models_do_not_let_be_done_with_them_is_refused_as_the_flow_does(
    llama, like, refused, sections, field, said
):
    given = like("tied", tie_word_embeddings=True) if field.startswith("backbone") else llama
    found = refused(sections, code=given, law=given)
    assert set(found) == {field}
    assert said in found[field]
    assert not refused({}, code=given, law=given)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"vocab_size": 200}, "; [200, 32] is expected by config.json"),
        ({"num_key_value_heads": 1}, "is expected by config.json"),
        ({"head_dim": 4}, "is expected by config.json"),
        ({"num_hidden_layers": 3}, "lacks tensor model.layers.2."),
        ({"attention_bias": True}, "MixtralForCausalLM cannot express it"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            "Missing required keys",
        ),
    ],
)
def test_weights_that_a_config_does_not_fit_are_refused_as_the_flow_does(
    tmp_path, refused, values, said
):
    short = {"statistics": {"sequence_length": 16, "window": None}}
    short["evaluation"] = {"sequence_length": 16}
    given = {name: save_pico(tmp_path / name, seed=i) for i, name in enumerate(("code", "law"))}
    assert refused(short, **given) == {}
    change_json(given["law"] / "config.json", **values)
    found = refused(short, **given)
    assert all(field.startswith("domains.law.expert") for field in found)
    assert any(said in text for text in found.values()), found


def test_what_a_stopped_fetch_left_of_a_model_is_its_config_alone(
    llama, like, refused, monkeypatch
):
    begun = like("snapshot")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (begun / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(
        "tasks.planning.subjects.hf_hub_download", lambda *_, **__: str(begun / "config.json")
    )
    assert not refused(code="owner/name", law=llama)
    assert "model-00001" in refused(code=begun, law=llama)["domains.code.expert"]


def test_pickled_weights_are_refused_and_no_stand_in(tmp_path, llama, like, refused):
    pickled = like("pickled")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    found = refused(code=llama, law=pickled)
    assert "holds pickled weights" in found["domains.law.expert"]


@pytest.mark.parametrize(
    ("values", "field", "said"),
    [
        ({"hidden_size": 4097, "num_attention_heads": 7}, "", "is not a multiple of the number"),
        ({"layer_types": ["full_attention"]}, "", "must be equal to the number of `layer_types`"),
        ({"num_hidden_layers": 10**7}, ".num_hidden_layers", "is more than any model has"),
        ({"vocab_size": 10**15}, ".vocab_size", "is more than any model has"),
    ],
)
def test_a_config_that_no_model_has_is_refused_at_once(llama, like, refused, values, field, said):
    found = refused(code=llama, law=like("odd", **values))
    assert said in found[f"domains.law.expert.config{field}"]
