import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from tests.upcycle_core.ders.grown import grow, logits_of, set_config, weights_of
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig, DersUpcyclingConfig
from upcycle_core.ders.expand import expand
from upcycle_core.ders.upcycle import write_ders_upcycling
from upcycle_core.errors import InputError

WHOLE = {"max_shard_bytes": 10**9}
CODECS = {
    "sparse": CodecConfig(codec="sparse", drop_rate=0.9),
    "quantised": CodecConfig(codec="quantised", bits=2, group_size=10),
    "low rank": CodecConfig(codec="low_rank", rank=4),
    "energy": CodecConfig(codec="low_rank", energy=0.6),
}
UNIVERSAL = {"intermediate_size": 64}


def config_of(directory) -> dict:
    return json.loads((directory / "config.json").read_text())


def close(one, other) -> bool:
    """Equal but for fp32 sums in another order."""
    return bool((one - other).abs().max() <= 1e-5 * other.abs().max())


def refused(*args, call=expand, **kwargs) -> str:
    with pytest.raises(InputError) as caught:
        call(*args, **WHOLE, **kwargs)
    return str(caught.value)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A compressed Llama in several shards."""
    folder = tmp_path_factory.mktemp("packed")
    grown = grow(folder)
    config = CodecConfig(codec="low_rank", rank=4)
    compress(grown.model, folder / "out", config=config, base=grown.seed, max_shard_bytes=40_000)
    return folder / "out"


@pytest.fixture
def copied(packed, tmp_path):
    """The same without checksums, to be changed."""
    shutil.copytree(packed, tmp_path / "copied")
    (tmp_path / "copied" / "checksums.json").unlink()
    return tmp_path / "copied"


@pytest.mark.parametrize(
    ("family", "codec"),
    [
        ("llama", "sparse"),
        ("mistral", "quantised"),
        ("qwen2", "low rank"),
        ("qwen3", "energy"),
    ],
)
def test_the_stock_model_computes_what_the_compressed_one_does(tmp_path, family, codec):
    grown = grow(tmp_path, family, tie_word_embeddings=family == "qwen3")
    packed, out = tmp_path / "packed", tmp_path / "out"
    report = compress(grown.model, packed, config=CODECS[codec], base=grown.seed, **WHOLE)
    before = tree_digest(packed)
    expand(packed, out, **WHOLE)
    logits = logits_of(out)
    assert close(logits, logits_of(packed))
    assert not close(logits, logits_of(grown.model))
    assert min(report.relative_errors.values()) > 0.1
    assert config_of(out) == config_of(grown.model)
    original, expanded = weights_of(grown.model), weights_of(out)
    assert list(expanded) == list(original)
    for name, weight in original.items():
        assert (expanded[name].shape, expanded[name].dtype) == (weight.shape, weight.dtype)
        if ".experts." not in name:
            assert torch.equal(expanded[name], weight)
    assert tree_digest(packed) == before


def test_bf16_stays_and_what_loses_nothing_gives_the_original_back(tmp_path):
    grown = grow(tmp_path, "qwen3", dtype=torch.bfloat16)
    exact = CodecConfig(codec="sparse", drop_rate=0.0)
    compress(grown.model, tmp_path / "packed", config=exact, base=grown.seed, **WHOLE)
    expand(tmp_path / "packed", tmp_path / "out", max_shard_bytes=40_000)
    original, expanded = weights_of(grown.model), weights_of(tmp_path / "out")
    for name, weight in original.items():
        assert expanded[name].dtype == torch.bfloat16
        # a delta is stored with 8 bits: it is a twentieth of the weight
        torch.testing.assert_close(expanded[name], weight, rtol=2**-7, atol=2**-9)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2


def test_a_model_that_transformers_saved_again_expands(copied, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(copied)
    with torch.no_grad():
        model.model.decoder.layers[1].mlp.experts["up_proj"].b.mul_(2)
    model.save_pretrained(tmp_path / "again")
    copy_tokenizer(copied, tmp_path / "again")
    expand(tmp_path / "again", tmp_path / "out", **WHOLE)
    logits = logits_of(tmp_path / "out")
    assert close(logits, logits_of(tmp_path / "again"))
    assert not close(logits, logits_of(copied))


def vary(source, out, tokenizer):
    """Save a model with other FFNs, so that experts and universal FFN differ."""
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp." in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(out)
    copy_tokenizer(tokenizer, out)


@pytest.mark.parametrize("universal", ["own", "delta"])
def test_a_universal_ffn_becomes_a_shared_expert_and_a_delta_again(tmp_path, universal):
    seed = save_pico(tmp_path / "seed", "qwen2", **UNIVERSAL)
    config = DersUpcyclingConfig(rank=2, universal=universal, combine="sum")
    options = {"config": config, "experts": 3, "top_k": 2, "seed": 0, **WHOLE}
    write_ders_upcycling(seed, tmp_path / "start", **options)
    vary(tmp_path / "start", tmp_path / "trained", seed)
    expand(tmp_path / "trained", tmp_path / "stock", **WHOLE)
    logits = logits_of(tmp_path / "stock")
    assert close(logits, logits_of(tmp_path / "trained"))
    exact = CodecConfig(codec="sparse", drop_rate=0.0)
    report = compress(tmp_path / "stock", tmp_path / "packed", config=exact, base=seed, **WHOLE)
    assert report.universal
    assert config_of(tmp_path / "packed")["universal"] == "delta"
    assert {place.split(".")[1] for place in report.cosines} == {"0", "1", "2", "3"}
    assert close(logits_of(tmp_path / "packed"), logits)
    # What a universal FFN is not: weighed by token, or beside weights that are divided.
    set_config(tmp_path / "stock", norm_topk_prob=True)
    packing = {"call": compress, "config": exact, "base": seed}
    message = refused(tmp_path / "stock", tmp_path / "no", **packing)
    assert "moe.config.norm_topk_prob = True" in message
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    with torch.no_grad():
        model.model.layers[1].mlp.shared_expert_gate.weight[0, 5] = 0.1
    model.save_pretrained(tmp_path / "gated")
    copy_tokenizer(seed, tmp_path / "gated")
    message = refused(tmp_path / "gated", tmp_path / "no", **packing)
    assert "model.layers.1.mlp.shared_expert_gate.weight weighs" in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"moe_layers": [1]}, "moe_layers = [1]: MixtralForCausalLM has experts in every layer"),
        ({"combine": "sum"}, "combine = 'sum': MixtralForCausalLM always divides"),
        ({"universal": "own"}, "universal = 'own': MixtralForCausalLM has no universal FFN"),
        ({"model_type": "llama"}, "model_type = 'llama': is no DeRS model"),
        ({"dense": {"model_type": "phi"}}, "dense.model_type = 'phi': is not supported"),
        ({"delta": {"codec": "quantised", "bits": 3}}, "delta.bits = 3"),
        (
            {"num_experts": 4},
            "lacks tensor model.decoder.layers.0.mlp.gate.weight of shape [4, 32]",
        ),
        (
            {"delta": {"codec": "quantised", "bits": 4}},
            "holds model.decoder.layers.0.mlp.experts.down_proj.a",
        ),
    ],
)
def test_what_no_stock_model_computes_is_refused(copied, tmp_path, fields, said):
    set_config(copied, **fields)
    assert said in refused(copied, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_normalised_beside_a_universal_ffn_is_refused(tmp_path):
    seed = save_pico(tmp_path / "seed", "qwen2", **UNIVERSAL)
    config = DersUpcyclingConfig(rank=2, universal="own", combine="normalised")
    options = {"config": config, "experts": 3, "top_k": 2, "seed": 0, **WHOLE}
    write_ders_upcycling(seed, tmp_path / "start", **options)
    assert "combine = 'normalised'" in refused(tmp_path / "start", tmp_path / "out")


def test_missing_and_altered_files_are_both_named_and_nothing_is_written(packed, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(packed, broken)
    shards = sorted(broken.glob("*.safetensors"))
    content = bytearray(shards[0].read_bytes())
    content[-1] ^= 1
    shards[0].write_bytes(content)
    shards[1].unlink()
    config = broken / "config.json"
    config.write_text(config.read_text() + "\n")
    message = refused(broken, tmp_path / "out")
    for file in (shards[0], config):
        assert f"{file}: was altered" in message
    assert f"{shards[1]}: is missing" in message
    assert shards[2].name not in message
    assert not (tmp_path / "out").exists()
    (broken / "checksums.json").write_text("[1]")
    assert "is no list of checksums" in refused(broken, tmp_path / "out")


def test_it_does_not_write_over_anything(packed, tmp_path):
    assert "is only read" in refused(packed, packed / "inside")
    (tmp_path / "file").write_text("mine")
    assert "is not empty" in refused(packed, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
