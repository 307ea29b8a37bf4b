import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PhiConfig,
    StableLmConfig,
)

import upcycle_core.ders.model  # noqa: F401  (transformers learns of the architecture)
from tests import pico
from tests.pico import VOCABULARY, pico_config, save_pico
from tests.upcycle_core.moe.joined import recast
from upcycle_core.checkpoints.hashing import sha256_file, tree_digest
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.upcycle import write_ders_upcycling
from upcycle_core.errors import InputError

SPARSE = {"codec": "sparse", "drop_rate": 0.9}
LOW_RANK = {"codec": "low_rank", "rank": 4}
IDS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(7))
IMAGE_TOKEN = VOCABULARY - 1


def small_phi(**shape):
    names = ("head_dim", "num_key_value_heads")
    return PhiConfig(**{k: v for k, v in shape.items() if k not in names})


def small_stablelm(**shape):
    return StableLmConfig(**{k: v for k, v in shape.items() if k != "head_dim"})


@pytest.fixture(autouse=True)
def more_families(monkeypatch):
    monkeypatch.setitem(pico.CONFIGS, "phi", small_phi)
    monkeypatch.setitem(pico.CONFIGS, "stablelm", small_stablelm)


def upcycle(model, out, *, experts=3, top_k=2, seed=0, max_shard_bytes=10**9, **config):
    write_ders_upcycling(
        model,
        out,
        config=DersUpcyclingConfig(**(config if "codec" in config else LOW_RANK | config)),
        experts=experts,
        top_k=top_k,
        seed=seed,
        max_shard_bytes=max_shard_bytes,
    )
    return out


def logits(directory):
    with torch.no_grad():
        return load_causal_lm(directory)(input_ids=IDS).logits


def tensors(directory):
    reader = CheckpointReader(directory, integers=True)
    return {name: reader.tensor(name) for name in reader.tensors}


SETTINGS = [
    {"top_k": 2, "universal": "delta", "layers": "every-other"},
    {"top_k": 2},
    {"top_k": 1},
    {"top_k": 1, "universal": "own"},
    {"top_k": 3, "combine": "sum"},  # k = N: the probabilities themselves sum to one
]


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "ernie4_5", "phi", "stablelm"]
)
def test_step_0_computes_what_the_dense_model_computes(tmp_path, family):
    """For every setting in which the weights of a token sum to one."""
    dense = save_pico(tmp_path / "dense", family, num_hidden_layers=3)
    expected = logits(dense)
    settings = [codec | setting for codec in (SPARSE, LOW_RANK) for setting in SETTINGS]
    if family != "llama":
        settings = [SPARSE | SETTINGS[0], LOW_RANK | SETTINGS[1]]
    for index, setting in enumerate(settings):
        out = upcycle(dense, tmp_path / str(index), **setting)
        # fp32; products are added in another order.
        torch.testing.assert_close(logits(out), expected, atol=2e-5, rtol=1e-5)


def test_a_plain_sum_begins_elsewhere(tmp_path):
    """The paper's sum beside a universal FFN: (1 + sum R) FFN, one layer by hand."""
    dense = save_pico(tmp_path / "dense", num_hidden_layers=1)
    out = upcycle(dense, tmp_path / "out", universal="own", combine="sum", top_k=1)
    model, before = load_causal_lm(out), load_causal_lm(dense)
    seen = {}
    block = model.model.decoder.layers[0].mlp
    block.register_forward_hook(lambda _m, args, y: seen.update(x=args[0], y=y))
    with torch.no_grad():
        model(input_ids=IDS)
        ffn = before.model.layers[0].mlp(seen["x"])
        largest = (seen["x"] @ block.gate.weight.T).softmax(-1).max(-1, keepdim=True).values
    torch.testing.assert_close(seen["y"], (1 + largest) * ffn, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_every_tensor_begins_as_the_paper_says(tmp_path, family):
    dense = save_pico(tmp_path / "dense", family, num_hidden_layers=3)
    recast(dense, torch.bfloat16)
    before = tensors(dense)
    names = ("fc1", "fc2") if family == "phi" else ("gate_proj", "up_proj", "down_proj")
    for codec in (SPARSE, {"codec": "low_rank", "rank": 8}):
        out = upcycle(
            dense, tmp_path / codec["codec"], **codec, universal="delta", layers="every-other"
        )
        after = tensors(out)
        for name, old in before.items():
            new = name.replace("model.", "model.decoder.")
            if any(f"layers.{layer}.mlp." in name for layer in (0, 2)):
                if name.endswith(".bias"):
                    continue  # experts have their own, and the base none
                new = new.replace(".mlp.", ".mlp.base.")
            assert torch.equal(after.pop(new), old), name
        for layer in (0, 2):
            mlp = f"model.decoder.layers.{layer}.mlp"
            gate = after.pop(f"{mlp}.gate.weight").float()
            assert gate.shape == (3, 32)
            assert gate.std() == pytest.approx(0.02, rel=0.3)
            for matrix in names:
                rows, columns = before[f"model.layers.{layer}.mlp.{matrix}.weight"].shape
                delta = f"{mlp}.experts.{matrix}"
                if family == "phi":
                    bias = before[f"model.layers.{layer}.mlp.{matrix}.bias"]
                    assert torch.equal(after.pop(f"{delta}.bias"), bias.expand(4, -1))
                if codec is SPARSE:
                    indices = after.pop(f"{delta}.indices").long()
                    values = after.pop(f"{delta}.values")
                    assert indices.shape == values.shape == (4, round(0.1 * rows * columns))
                    assert (indices.diff(dim=1) > 0).all()
                    assert indices.min() >= 0
                    assert indices.max() < rows * columns
                    # Uniform: the mean of a tenth of the places is near the middle.
                    assert indices.float().mean() == pytest.approx(rows * columns / 2, rel=0.1)
                    assert not torch.equal(indices[0], indices[1])
                    assert not values.any()
                else:
                    a, b = after.pop(f"{delta}.a").float(), after.pop(f"{delta}.b")
                    assert a.shape == (4, 8, columns)
                    assert a.var() == pytest.approx(1 / 8, rel=0.2)
                    assert b.shape == (4, rows, 8)
                    assert not b.any()
        assert not after


def test_the_seed_and_nothing_else_decides_the_bytes(tmp_path):
    dense = save_pico(tmp_path / "dense")
    one, same, other = (
        tree_digest(upcycle(dense, tmp_path / name, seed=seed, **SPARSE))
        for name, seed in (("one", 3), ("same", 3), ("other", 4))
    )
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {
        "model.safetensors",
        "checksums.json",
    }
    name = "model.decoder.layers.1.mlp.experts.up_proj.indices"
    assert not torch.equal(tensors(tmp_path / "one")[name], tensors(tmp_path / "other")[name])
    few, more = (tensors(upcycle(dense, tmp_path / f"{n}", experts=n, **SPARSE)) for n in (2, 4))
    for name in few:
        if name.endswith("indices"):  # those of an expert do not depend on how many there are
            assert torch.equal(few[name], more[name][:2])


def test_the_directory_is_whole(tmp_path):
    dense = save_pico(tmp_path / "dense", tie_word_embeddings=True)
    out = upcycle(dense, tmp_path / "out", max_shard_bytes=20_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    recorded = json.loads((out / "checksums.json").read_text())
    files = [*out.glob("*.safetensors*"), out / "config.json"]
    assert recorded == {file.name: sha256_file(file) for file in files}
    config = AutoConfig.from_pretrained(out)
    assert (config.model_type, config.moe_layers, config.num_experts) == ("ders", [0, 1], 3)
    assert AutoTokenizer.from_pretrained(out)("ab").input_ids
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 0
    for file in ("configuration_ders.py", "deltas_ders.py", "modeling_ders.py"):
        assert (out / file).is_file()
    torch.testing.assert_close(logits(out), logits(dense), atol=2e-5, rtol=1e-5)


def test_all_faults_come_at_once_and_before_anything_is_written(tmp_path):
    dense = save_pico(tmp_path / "dense")
    odd = save_pico(tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    out = tmp_path / "out"
    for model, changes, messages in (
        (dense, {"rank": 33}, ["ders.rank = 33", "at most 32"]),
        (dense, {"rank": None}, ["ders.rank", "say how many"]),
        (dense, {"top_k": 4}, ["top_k = 4", "1 to 3"]),
        (odd, {"out": odd, "top_k": 0}, ["is not empty", "top_k = 0", "which is only read"]),
        (odd, {**SPARSE, "drop_rate": 1.0, "experts": 1}, [
            "ders.drop_rate = 1.0", "experts = 1", "'gpt2'", "llama, mistral"]),
        (tmp_path / "none", {"experts": 0}, ["experts = 0", "has no config.json"]),
    ):  # fmt: skip
        with pytest.raises(InputError) as error:
            upcycle(model, changes.pop("out", out), **changes)
        for message in messages:
            assert message in str(error.value)
    assert not out.exists()


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    dense = save_pico(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(dense)
    state = model.state_dict() | {"model.extra": torch.zeros(2)}
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.norm.weight"] = torch.ones(31)
    model.save_pretrained(dense, state_dict=state)
    with pytest.raises(InputError) as error:
        upcycle(dense, tmp_path / "out")
    for message in ("lacks tensor model.layers.1.mlp.up_proj", "[31]", "holds model.extra"):
        assert message in str(error.value)


def save_llava(directory, **text):
    torch.manual_seed(1)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=pico_config(num_hidden_layers=3, initializer_range=0.2, **text),
        image_token_index=IMAGE_TOKEN,
    )
    LlavaForConditionalGeneration(config).save_pretrained(directory)
    return directory


def load_llava(directory):
    model, info = LlavaForConditionalGeneration.from_pretrained(directory, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def picture_and_text():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, IMAGE_TOKEN, (2, 12), generator=generator)
    ids[:, 1:5] = IMAGE_TOKEN  # an image of 16 x 16 is 4 patches
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("codec", [SPARSE, LOW_RANK], ids=["sparse", "low-rank"])
def test_a_llava_is_upcycled_in_place_trained_and_saved(tmp_path, codec):
    dense = save_llava(tmp_path / "dense")
    template = Path("additional_chat_templates", "tool_use.jinja")
    (dense / template.parent).mkdir()
    (dense / template).write_text("{{ tools }}")
    out = upcycle(dense, tmp_path / "out", **codec, layers="every-other")
    assert (out / template).read_text() == "{{ tools }}"
    inputs = picture_and_text()
    model = load_llava(out)
    with torch.no_grad():
        expected = load_llava(dense)(**inputs).logits
        other = load_llava(dense)(**{**inputs, "pixel_values": -inputs["pixel_values"]}).logits
        torch.testing.assert_close(model(**inputs).logits, expected, atol=2e-5, rtol=1e-5)
    assert (expected - other).abs().max() > 1e-2  # the image matters
    assert [
        hasattr(layer.mlp, "experts") for layer in model.model.language_model.decoder.layers
    ] == [True, False, True]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE_TOKEN, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    moved = {n for n, tensor in model.state_dict().items() if not torch.equal(tensor, before[n])}
    delta = "values" if codec is SPARSE else "b"
    for part in ("vision_tower", "multi_modal_projector", f"experts.up_proj.{delta}", "mlp.gate"):
        assert any(part in name for name in moved), part
    assert not any("indices" in name for name in moved)
    with torch.no_grad():
        trained = model(**inputs).logits
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(load_llava(tmp_path / "saved")(**inputs).logits, trained)
    assert set(tensors(out)) == set(tensors(tmp_path / "saved"))


@pytest.mark.parametrize("place", ["everywhere", "outside", "inside"])
def test_a_llava_with_a_tied_head_is_refused(tmp_path, place):
    dense = save_llava(tmp_path / "dense", tie_word_embeddings=place == "everywhere")
    if place != "everywhere":
        config = json.loads((dense / "config.json").read_text())
        (config if place == "outside" else config["text_config"])["tie_word_embeddings"] = True
        (dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="cannot be tied"):
        upcycle(dense, tmp_path / "out")


@pytest.mark.parametrize("fault", ["types", "head"])
def test_weights_that_are_not_what_their_configuration_says_are_refused(tmp_path, fault):
    dense = save_pico(tmp_path / "dense", tie_word_embeddings=fault == "head")
    found = load_file(dense / "model.safetensors")
    if fault == "types":
        norm = "model.layers.0.input_layernorm.weight"
        found[norm] = found[norm].bfloat16()
    else:
        found["lm_head.weight"] = torch.randn_like(found["model.embed_tokens.weight"])
    save_file(found, dense / "model.safetensors", metadata={"format": "pt"})
    said = {"types": "mixes torch.bfloat16, torch.float32", "head": "is tied by config.json, yet"}
    with pytest.raises(InputError, match=said[fault]):
        upcycle(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()
