import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.pico import VOCABULARY, save_pico
from tests.upcycle_core.ders.grown import grow
from tests.upcycle_core.moe.joined import WIDTH, join
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig, DersUpcyclingConfig
from upcycle_core.ders.upcycle import write_ders_upcycling
from upcycle_core.errors import InputError
from upcycle_core.moe.size import Counts, expert_bytes, parameter_counts

FAMILIES = pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "ernie4_5"])
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


SPARSE = {"codec": "sparse", "drop_rate": 0.9}
LOW_RANK = {"codec": "low_rank", "rank": 4}


def upcycled(folder, *, top_k=1, tied=False, **config):
    """A DeRS model of three experts."""
    write_ders_upcycling(
        save_pico(folder / "dense", num_hidden_layers=3, tie_word_embeddings=tied),
        folder / "ders",
        config=DersUpcyclingConfig(**config),
        experts=3,
        top_k=top_k,
        seed=0,
        max_shard_bytes=10**9,
    )
    return folder / "ders"


def counted_by_use(directory) -> Counts:
    """Of the loaded model: a delta that gets no gradient of one token's output is not passed."""
    model, unused = load_causal_lm(directory), 0
    with torch.no_grad():
        for parameter in model.parameters():  # b and values begin as zero, which stops gradients
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    logits = model(input_ids=torch.tensor([[5]])).logits
    (
        logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    ).sum().backward()
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:  # [D, ...]
            unused += sum(own.numel() for own in parameter.grad if not own.any())
    total = sum(parameter.numel() for parameter in model.parameters())
    return Counts(total, total - unused)


@pytest.mark.parametrize(
    "how",
    [
        {**SPARSE, "top_k": 1},
        {**SPARSE, "top_k": 2, "universal": "delta"},
        {**SPARSE, "top_k": 2, "universal": "own", "layers": "every-other"},
        {**LOW_RANK, "top_k": 2, "tied": True},
        {**LOW_RANK, "top_k": 1, "universal": "delta", "layers": "every-other"},
        {**LOW_RANK, "top_k": 3, "combine": "sum"},
    ],
    ids=str,
)
def test_of_a_ders_model_k_of_its_deltas_and_the_universal_one_are_active(tmp_path, how):
    model = upcycled(tmp_path, **how)
    assert parameter_counts(model) == counted_by_use(model)


@pytest.mark.parametrize("made_by", ["upcycling", "compression"])
def test_a_tied_head_of_a_ders_model_that_is_stored_as_well_counts_once(tmp_path, made_by):
    if made_by == "upcycling":
        model = upcycled(tmp_path, **SPARSE, tied=True)
    else:
        grown, model = grow(tmp_path, top_k=1, tie_word_embeddings=True), tmp_path / "out"
        few = CodecConfig(codec="sparse", drop_rate=0.9)
        compress(grown.model, model, config=few, base=grown.seed, max_shard_bytes=10**9)
    once, file = parameter_counts(model), model / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    head = tensors["model.decoder.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    (model / "checksums.json").unlink()
    assert parameter_counts(model) == once == counted_by_use(model)
    config = json.loads((model / "config.json").read_text())
    config["dense"]["tie_word_embeddings"] = False
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert parameter_counts(model).total == once.total + VOCABULARY * 32


@FAMILIES
def test_bytes_of_experts_are_those_of_their_matrices_alone(tmp_path, family):
    model = join(tmp_path, family, dtype=torch.bfloat16).model
    assert expert_bytes(model) == 3 * ONE_EXPERT * 2


@pytest.mark.parametrize(
    "how",
    [
        CodecConfig(codec="sparse", drop_rate=0.9),
        CodecConfig(codec="quantised", bits=4, group_size=8),
        CodecConfig(codec="low_rank", rank=3),
    ],
    ids=lambda how: how.codec,
)
def test_bytes_of_a_ders_models_experts_are_those_of_its_deltas_places_and_codes_too(tmp_path, how):
    grown = grow(tmp_path, dtype=torch.bfloat16)
    compress(grown.model, tmp_path / "out", config=how, base=grown.seed, max_shard_bytes=10**9)
    model = load_causal_lm(tmp_path / "out", dtype=torch.bfloat16)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    expected = sum(tensor.nbytes for name, tensor in tensors if ".mlp.experts." in name)
    assert expert_bytes(tmp_path / "out") == expected > 0
