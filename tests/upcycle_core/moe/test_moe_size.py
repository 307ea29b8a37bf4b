import json

import pytest
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import WIDTH, join
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.moe.size import Counts, parameter_counts

FAMILIES = pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
# 2 layers, H = 32: the parameters of one expert in all layers.
ONE_EXPERT = 2 * 3 * 32 * WIDTH


def loaded(directory) -> int:
    return sum(parameter.numel() for parameter in load_causal_lm(directory).parameters())


@FAMILIES
@TIED
def test_a_dense_model_is_active_as_a_whole(tmp_path, family, tied):
    model = save_pico(tmp_path, family, tie_word_embeddings=tied)
    assert parameter_counts(model) == Counts(loaded(model), loaded(model))


@FAMILIES
@TIED
@pytest.mark.parametrize("top_k", [1, 2])
def test_of_a_moe_k_of_its_experts_are_active(tmp_path, family, tied, top_k):
    model = join(tmp_path, family, tie_word_embeddings=tied, top_k=top_k).model
    total = loaded(model)
    assert parameter_counts(model) == Counts(total, total - (3 - top_k) * ONE_EXPERT)


@FAMILIES
def test_a_model_that_transformers_saved_in_shards_counts_the_same(tmp_path, family):
    model = join(tmp_path, family, top_k=2).model
    again = AutoModelForCausalLM.from_pretrained(model)
    again.save_pretrained(tmp_path / "again", max_shard_size="30KB")
    assert (tmp_path / "again" / "model.safetensors.index.json").is_file()
    assert parameter_counts(tmp_path / "again") == parameter_counts(model)


def test_a_tied_head_that_is_stored_twice_counts_once(tmp_path):
    model = save_pico(tmp_path)
    untied = parameter_counts(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert parameter_counts(model).total == untied.total - 96 * 32


def test_experts_without_a_number_are_an_error(tmp_path):
    model = join(tmp_path).model
    config = json.loads((model / "config.json").read_text())
    del config["num_experts_per_tok"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="how many a token uses"):
        parameter_counts(model)
