import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PhiConfig,
)

from tests import warm
from tests.pico import VOCABULARY, pico_config
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.ders.model import DersConfig, DersForCausalLM
from upcycle_core.evaluation.text.perplexity import check_plain_head
from upcycle_core.moe.inspect import force_expert, record_routing, routers_of, set_top_k
from upcycle_core.training.losses import balance_loss, record_routers

CODECS = {
    "low rank": {"codec": "low_rank", "rank": 2},
    "low rank, by expert": {"codec": "low_rank", "rank": 90},
    "sparse": {"codec": "sparse", "drop_rate": 0.9},
    "quantised": {"codec": "quantised", "bits": 4, "group_size": 10},
}


def phi_config(**overrides) -> PhiConfig:
    llama = pico_config().to_dict()
    shape = {key: llama[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 0}
    return PhiConfig(**shape, **layers, eos_token_id=0, pad_token_id=1, **overrides)


def random_model(codec="low rank", dense=None, dtype=torch.float32, **settings) -> DersForCausalLM:
    """Three experts in both layers, far from one another and from the base."""
    torch.manual_seed(0)
    dense = pico_config() if dense is None else dense
    config = DersConfig(dense=dense, num_experts=3, delta=CODECS[codec], **settings)
    model = DersForCausalLM(config).to(dtype).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("codes"):
            tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
        elif ".mlp." in name and tensor.is_floating_point():
            small = "experts" in name and name.rsplit(".", 1)[-1] in ("a", "b", "scales")
            tensor.data.normal_(std=2 if "mlp.gate." in name else 0.1 if small else 0.3)
    return model


def some_ids(rows=2, length=9) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def logits_of(model, ids=None, **kwargs) -> Tensor:
    with torch.no_grad():
        return model(input_ids=some_ids() if ids is None else ids, **kwargs).logits


def slow_expert(block, x_H: Tensor, expert: int | None) -> Tensor:
    """E_i(x) of whole matrices base + delta; of the base's own, or the universal FFN's, if None."""
    state = dict((block.universal if expert is None else block.base).named_parameters())

    def affine(name: str, x: Tensor) -> Tensor:
        weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
        if expert is not None:
            delta = block.experts[name]
            weight = weight + delta.dense(expert)
            bias = None if delta.bias is None else delta.bias[expert]
        return weight @ x if bias is None else weight @ x + bias

    if "fc1.weight" in state:
        return affine("fc2", block.activation(affine("fc1", x_H)))
    gate, up = affine("gate_proj", x_H), affine("up_proj", x_H)
    return affine("down_proj", gate / (1 + (-gate).exp()) * up)


def slow_layer(block, x_TH: Tensor, config: DersConfig) -> Tensor:
    """The equation of one layer, token by token."""
    rows = []
    for x_H in x_TH:
        scores = (block.gate.weight @ x_H).float().softmax(0).tolist()
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: config.num_experts_per_tok]
        total = sum(scores[i] for i in best)
        divide = config.combine == "normalised" and config.universal == "none"
        y_H = sum(scores[i] / (total if divide else 1) * slow_expert(block, x_H, i) for i in best)
        if config.universal != "none":
            share = 1 - total if config.combine == "normalised" else 1
            last = None if config.universal == "own" else config.num_experts
            y_H = y_H + share * slow_expert(block, x_H, last)
        rows.append(y_H)
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("combine", ["sum", "normalised"])
@pytest.mark.parametrize("universal", ["none", "own", "delta"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_layer_computes_the_equation(codec, universal, combine, top_k, family):
    settings = {"universal": universal, "combine": combine, "num_experts_per_tok": top_k}
    dense = phi_config() if family == "phi" else pico_config()
    model = random_model(codec, dense, torch.float64, moe_layers=[1], **settings)
    block = model.model.decoder.layers[1].mlp
    x_BSH = torch.randn(2, 4, 32, dtype=torch.float64)
    expected = slow_layer(block, x_BSH.view(8, 32), model.config).view(2, 4, 32).detach()
    # Probabilities are fp32.
    torch.testing.assert_close(block(x_BSH).detach(), expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(block(x_BSH), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi", "llama, tied"])
def test_without_deltas_it_is_the_dense_model(family):
    name, tied = family.split(",")[0], "tied" in family
    config = phi_config() if name == "phi" else pico_config(name, tie_word_embeddings=tied)
    torch.manual_seed(3)
    dense = AutoModelForCausalLM.from_config(config).eval()
    for parameter in dense.parameters():
        parameter.data.normal_(std=0.2)
    model = DersForCausalLM(DersConfig(dense=config, num_experts=3, num_experts_per_tok=2)).eval()
    state = {}
    for key, tensor in dense.state_dict().items():
        key = key.replace("model.", "model.decoder.", 1)
        if ".mlp." in key and key.endswith(".bias"):
            state[key.replace(".mlp.", ".mlp.experts.")] = tensor.expand(3, -1)
        else:
            state[key.replace(".mlp.", ".mlp.base.")] = tensor
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(".mlp.gate." in key or ".mlp.experts." in key for key in missing), missing
    found, expected = logits_of(model), logits_of(dense)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("codec", CODECS)
def test_saved_and_loaded_it_is_the_same(tmp_path, codec, tied):
    dense = pico_config(tie_word_embeddings=tied)
    model = random_model(codec, dense, universal="delta", moe_layers=[1])
    model.save_pretrained(tmp_path / "model")
    again = load_causal_lm(tmp_path / "model")
    assert torch.equal(logits_of(again), logits_of(model))
    assert again.config._experts_implementation == "eager"
    names = set(load_file(tmp_path / "model" / "model.safetensors"))
    assert ("lm_head.weight" in names) is not tied
    assert "model.decoder.layers.0.mlp.gate_proj.weight" in names
    half = load_causal_lm(tmp_path / "model", dtype=torch.bfloat16, training=True)
    for name, tensor in half.state_dict().items():
        ours = model.state_dict()[name]
        assert tensor.dtype == (torch.bfloat16 if ours.is_floating_point() else ours.dtype)
        assert ours.is_floating_point() or torch.equal(tensor, ours)
    assert torch.isfinite(logits_of(half)).all()


def test_changed_files_are_refused(tmp_path):
    model = random_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    recorded = json.loads((tmp_path / "checksums.json").read_text())
    weights = sorted(tmp_path.glob("*.safetensors"))
    assert len(weights) > 1
    assert {file.name for file in weights} | {"config.json"} <= set(recorded)
    with torch.no_grad():  # saved again after training: nothing stale
        model.lm_head.weight.add_(1)
    model.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.glob("*.safetensors")} == {"model.safetensors"}
    for name, digest in json.loads((tmp_path / "checksums.json").read_text()).items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    assert torch.equal(logits_of(load_causal_lm(tmp_path)), logits_of(model))
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + "\n")
    with pytest.raises(ValueError, match="write or download") as error:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    for name in ("model.safetensors", "config.json"):
        assert f"{tmp_path / name}: was altered" in str(error.value)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: is missing"):
        DersForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("codec", "implementation"), [("low rank", "sdpa"), ("sparse", "eager"), ("quantised", "sdpa")]
)
def test_it_generates_the_same_with_a_cache_without_and_padded_on_the_left(codec, implementation):
    model = random_model(codec, num_experts_per_tok=2)
    model.set_attn_implementation(implementation)
    assert model.model.decoder.config._attn_implementation == implementation
    ids = some_ids(3, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    cached, plain = (model.generate(ids, use_cache=use, **options) for use in (True, False))
    assert cached.shape == (3, 14)
    assert torch.equal(cached, plain)
    padded = torch.cat([torch.full((1, 3), 1), ids[:1, :3]], dim=1)
    batch = torch.cat([padded, ids[1:]])
    mask = torch.ones_like(batch)
    mask[0, :3] = 0
    together = model.generate(batch, attention_mask=mask, **options)
    assert torch.equal(together[0, 6:], model.generate(ids[:1, :3], **options)[0, 3:])
    assert torch.equal(together[1:], cached[1:])
    beams = model.generate(ids, num_beams=2, **options)
    assert beams.shape == (3, 14)


def gradients(codec: str, *, checkpointing: bool) -> dict[str, Tensor | None]:
    model = random_model(codec, num_experts_per_tok=2, universal="own").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model(input_ids=some_ids(), labels=some_ids(), use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("codec", CODECS)
def test_gradient_checkpointing_gives_the_same_gradients(codec):
    plain, again = gradients(codec, checkpointing=False), gradients(codec, checkpointing=True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert all(gradient.abs().max() > 0 for gradient in plain.values())


def test_routers_are_handled_like_those_of_any_moe():
    model = random_model(num_experts_per_tok=2, combine="sum", universal="own")
    check_plain_head(model)
    assert [router.top_k for router in routers_of(model)] == [2, 2]
    with record_routers(model) as routing:
        model(input_ids=some_ids())
    assert balance_loss(routing).requires_grad
    set_top_k(model, 1)
    with record_routing(model) as counts_LD:
        logits_of(model)
    assert counts_LD.sum(dim=1).tolist() == [some_ids().numel()] * 2
    block = model.model.decoder.layers[0].mlp
    x = torch.randn(1, 5, 32)
    with torch.no_grad(), force_expert(model, 2):
        found = block(x)[0]
        expected = torch.stack(
            [slow_expert(block, row, 2) + slow_expert(block, row, None) for row in x[0]]
        )
    torch.testing.assert_close(found, expected)


def test_which_parameters_are_which_group():
    model = random_model(universal="own", moe_layers=[1])
    groups = {
        name: module.parameter_group
        for name, module in model.named_modules()
        if hasattr(module, "parameter_group")
    }
    place = "model.decoder.layers.1.mlp"
    assert groups == {
        f"{place}.base": "base",
        f"{place}.gate": "router",
        f"{place}.experts": "experts",
    }


def test_a_vision_language_model_holds_it(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
    vision = CLIPVisionConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    text = DersConfig(dense=pico_config(), delta=CODECS["sparse"], moe_layers=[0])
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=95)
    model = LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, 95, 95, 95, 95, 7, 8]])  # 2 x 2 patches
    picture = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}
    loss = model(**picture, labels=ids).loss
    loss.backward()
    assert model.model.language_model.decoder.layers[0].mlp.gate.weight.grad is not None
    model.save_pretrained(tmp_path)
    again, info = LlavaForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(again.eval()(**picture).logits, model(**picture).logits)
    text = again.generate(**picture, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert text.shape == (1, 11)


def test_the_configuration_reads_the_dense_one_and_checks_itself(tmp_path):
    config = DersConfig(
        dense=pico_config(sliding_window=7),
        delta={"codec": "low_rank", "rank": 1, "ranks": {"1.up_proj": 5}},
    )
    assert (config.hidden_size, config.eos_token_id, config.sliding_window) == (32, 0, 7)
    assert not hasattr(config, "no_such_field")
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, DersConfig)
    assert again.to_dict() == {**config.to_dict(), "_name_or_path": str(tmp_path)}
    decoder = DersForCausalLM(config).model.decoder
    ranks = [[d.rank for d in layer.mlp.experts.values()] for layer in decoder.layers]
    assert ranks == [[1, 1, 1], [1, 5, 1]]
    with pytest.raises(
        ValueError, match=r"(?s)combine = 'mean': choose sum.*num_experts_per_tok = 5"
    ):
        DersConfig(dense=pico_config(), combine="mean", num_experts_per_tok=5)
    with pytest.raises(ValueError, match=r"moe_layers = \[2\]: choose from 0 to 1"):
        DersConfig(dense=pico_config(), moe_layers=[2])


REMOTE = """
import sys
sys.path = [p for p in sys.path if p]
import torch
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], trust_remote_code=True, local_files_only=True, output_loading_info=True,
    experts_implementation="eager",
)
assert not any(info.values()), info
assert not any(name.startswith("upcycle_core") for name in sys.modules)
ids = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(model(input_ids=ids, use_cache=False).logits, sys.argv[3])
model.save_pretrained(sys.argv[4])
"""


def test_it_loads_elsewhere_with_the_code_beside_its_weights(tmp_path):
    model = random_model("sparse", universal="own")
    model.save_pretrained(tmp_path / "model")
    torch.save(some_ids(), tmp_path / "ids.pt")
    files = [tmp_path / name for name in ("model", "ids.pt", "logits.pt", "saved")]
    warm.elsewhere(REMOTE, *files, folder=tmp_path)
    # The other process computes with as many threads as it likes.
    elsewhere = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(elsewhere, logits_of(model), rtol=1e-5, atol=1e-6)
    source = Path(sys.modules[DersForCausalLM.__module__].__file__).parent
    for name in ("configuration_ders.py", "deltas_ders.py", "modeling_ders.py"):
        assert (tmp_path / "saved" / name).read_text() == (source / name).read_text()
    assert torch.equal(logits_of(load_causal_lm(tmp_path / "saved")), logits_of(model))


def test_tokens_can_be_added(tmp_path):
    model = random_model()
    more = VOCABULARY + 4
    model.resize_token_embeddings(more)
    assert model.config.vocab_size == model.config.dense.vocab_size == more
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path)
    assert loaded.config.vocab_size == more
    ids = some_ids()
    ids[0, 0] = more - 1
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
