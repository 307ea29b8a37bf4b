import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import upcycle_core
from tests import warm
from tests.pico import pico_config, save_pico
from tests.upcycle_core.baselines.dense import (
    COMMON,
    WIDTH,
    average,
    dense_models,
    logits_of,
    some_ids,
    weights_of,
)
from upcycle_core.baselines.bam.modeling_bam import BamAttention, BamConfig, BamForCausalLM
from upcycle_core.baselines.bam.write import write_bam
from upcycle_core.baselines.mixture import with_seed, write_mixture
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.moe.inspect import record_routing, routers_of, set_top_k
from upcycle_core.moe.size import Counts, parameter_counts

CASES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "mistral, sliding window": ("mistral", {"sliding_window": 5}),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> dict[str, Path]:
    return dense_models(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def folder(experts, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("bam") / "moe"
    write_bam(experts, out, top_k=2, **COMMON)
    return out


@pytest.mark.parametrize("case", CASES)
def test_identical_experts_reproduce_the_dense_model(tmp_path, case):
    family, overrides = CASES[case]
    models = dense_models(tmp_path, family, seeds=(3, 3, 3), **overrides)
    write_bam(models, tmp_path / "moe", top_k=2, **COMMON)
    dense = logits_of(load_causal_lm(models["domain0"]))
    bam = load_causal_lm(tmp_path / "moe")
    for implementation in ("sdpa", "eager"):
        bam.set_attn_implementation(implementation)
        assert (logits_of(bam) - dense).abs().max() <= 1e-5 * dense.abs().max()


def rotated(x_N: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary embedding of one head's vector: pairs (i, i + N/2) turn by position theta^(-2i/N)."""
    half = len(x_N) // 2
    result = torch.empty_like(x_N)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_N))
        result[i] = x_N[i] * math.cos(angle) - x_N[i + half] * math.sin(angle)
        result[i + half] = x_N[i + half] * math.cos(angle) + x_N[i] * math.sin(angle)
    return result


def slow_attention(module: BamAttention, x_SH: torch.Tensor, theta: float) -> torch.Tensor:
    """y = sum_i softmax(W x)_i O_i attention(Q_i x, K x, V x): every loop written out."""
    size, heads, groups = module.head_dim, 4, module.num_key_value_groups
    keys, values = x_SH @ module.k_proj.weight.T, x_SH @ module.v_proj.weight.T
    rows = []
    for t, x_H in enumerate(x_SH):
        scores = [math.exp(float(row @ x_H)) for row in module.router.weight]
        y_H = torch.zeros_like(x_H)
        for score, expert in zip(scores, module.experts, strict=True):
            query = expert.q_proj.weight @ x_H
            mixed = []
            for head in range(heads):
                own, shared = slice(head * size, (head + 1) * size), head // groups
                of = slice(shared * size, (shared + 1) * size)
                q_N = rotated(query[own], t, theta)
                weights = [
                    math.exp(float(q_N @ rotated(keys[s][of], s, theta)) / math.sqrt(size))
                    for s in range(t + 1)
                ]
                total = sum(weights)
                mixed.append(sum(w / total * values[s][of] for s, w in enumerate(weights)))
            y_H += score / sum(scores) * (expert.o_proj.weight @ torch.cat(mixed))
        rows.append(y_H)
    return torch.stack(rows)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_attention_layer_computes_the_equation(folder, implementation):
    model = load_causal_lm(folder, dtype=torch.float64)
    model.set_attn_implementation(implementation)
    theta = model.config.rope_parameters["rope_theta"]
    seen = []
    layer = model.model.layers[1].self_attn
    layer.register_forward_hook(
        lambda _m, _args, kwargs, output: seen.append((kwargs["hidden_states"], output[0])),
        with_kwargs=True,
    )
    model.set_experts_implementation("eager")
    with torch.no_grad():
        layer.router.weight.mul_(50)  # far from a plain mean
        model(input_ids=some_ids()[:, :7], use_cache=False)
        for x_SH, found_SH in zip(*seen[0], strict=True):
            expected = slow_attention(layer, x_SH, theta)
            # Rotary angles and routing weights are computed in fp32.
            torch.testing.assert_close(found_SH, expected, rtol=1e-5, atol=1e-5)


def test_what_is_an_expert_and_what_is_shared(experts, folder):
    found, dense = weights_of(folder), [weights_of(path) for path in experts.values()]
    for layer in (0, 1):
        attention = f"model.layers.{layer}.self_attn"
        for projection in ("q_proj", "o_proj"):
            for index, own in enumerate(dense):
                ours = found[f"{attention}.experts.{index}.{projection}.weight"]
                assert torch.equal(ours, own[f"{attention}.{projection}.weight"])
            assert f"{attention}.{projection}.weight" not in found
        for projection in ("k_proj", "v_proj"):
            name = f"{attention}.{projection}.weight"
            expected = average([own[name] for own in dense])
            torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6)
        router = found[f"{attention}.router.weight"]
        assert router.shape == (3, 32)
        assert router.std() == pytest.approx(0.02, rel=0.3)


def test_outside_of_attention_it_is_btx(experts, folder, tmp_path):
    write_mixture(experts, tmp_path / "btx", top_k=2, **COMMON)
    ours, btx = weights_of(folder), weights_of(tmp_path / "btx")
    shared = {name for name in btx if "q_proj" not in name and "o_proj" not in name}
    assert all(torch.equal(ours[name], btx[name]) for name in shared)
    assert {n for n in set(ours) - shared if "self_attn" not in n} == set()


def test_routers_of_the_ffns_alone_have_a_top_k(folder):
    model = load_causal_lm(folder)
    assert [type(router).__name__ for router in routers_of(model)] == ["MixtralTopKRouter"] * 2
    set_top_k(model, 1)
    with record_routing(model) as counts_LD:
        logits_of(model)
    assert counts_LD.sum(dim=1).tolist() == [some_ids().numel()] * 2


def test_attention_modules_say_which_group_they_train_with(folder):
    model = load_causal_lm(folder)
    groups: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        group = getattr(module, "parameter_group", None)
        if group is not None:
            groups.setdefault(group, set()).add(name)
    attentions = [f"model.layers.{layer}.self_attn" for layer in (0, 1)]
    assert groups["router"] == {f"{attention}.router" for attention in attentions}
    assert groups["experts"] == {f"{a}.experts.{i}" for a in attentions for i in range(3)}


def test_saved_by_transformers_it_is_the_same_on_the_disk(folder, tmp_path):
    model = load_causal_lm(folder)
    model.save_pretrained(tmp_path / "again")
    ours, again = weights_of(folder), weights_of(tmp_path / "again")
    assert ours.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.items())
    assert torch.equal(logits_of(load_causal_lm(tmp_path / "again")), logits_of(model))
    assert (tmp_path / "again" / "modeling_bam.py").is_file()
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["model_type"] == "bam"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_bam.BamForCausalLM"


def test_shards_give_the_same_model(experts, folder, tmp_path):
    write_bam(experts, tmp_path / "moe", top_k=2, router_seed=7, max_shard_bytes=15_000)
    assert len(list((tmp_path / "moe").glob("*.safetensors"))) > 3
    found = logits_of(load_causal_lm(tmp_path / "moe"))
    assert torch.equal(found, logits_of(load_causal_lm(folder)))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_it_generates_the_same_with_a_cache_and_without(tmp_path, window, implementation):
    models = dense_models(tmp_path, "mistral", sliding_window=window)
    write_bam(models, tmp_path / "moe", top_k=2, **COMMON)
    model = load_causal_lm(tmp_path / "moe")
    model.set_attn_implementation(implementation)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    texts = [
        model.generate(some_ids()[:, :6], use_cache=cached, **options) for cached in (True, False)
    ]
    assert texts[0].shape == (3, 18)
    assert torch.equal(*texts)


def test_padding_changes_nothing(folder):
    model = load_causal_lm(folder)
    ids = some_ids()[:1, :9]
    padded = torch.cat([ids, torch.full((1, 4), 1)], dim=1)
    mask = torch.tensor([[1] * 9 + [0] * 4])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        found = model(input_ids=padded, attention_mask=mask).logits[:, :9]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def gradients(folder: Path, *, checkpointing: bool) -> dict[str, torch.Tensor]:
    model = load_causal_lm(folder).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    loss = model(input_ids=some_ids(), labels=some_ids(), use_cache=False).loss
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradient_checkpointing_gives_the_same_gradients(folder):
    plain, again = gradients(folder, checkpointing=False), gradients(folder, checkpointing=True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert all(gradient.abs().max() > 0 for gradient in plain.values())


def test_experts_run_in_either_implementation(folder):
    model = load_causal_lm(folder)
    assert model.config._experts_implementation == "eager"
    eager = logits_of(model)
    model.set_experts_implementation("grouped_mm")
    assert model.config._experts_implementation == "grouped_mm"
    torch.testing.assert_close(logits_of(model), eager, rtol=1e-5, atol=1e-5)
    grouped = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="grouped_mm")
    assert grouped.config._experts_implementation == "grouped_mm"


def test_a_new_model_has_every_weight_drawn():
    """Attention is put in after the Mixtral has drawn its own."""
    shape = pico_config("mistral").to_dict()
    shape = {k: v for k, v in shape.items() if k not in ("model_type", "architectures")}
    torch.manual_seed(0)
    model = BamForCausalLM(BamConfig(**shape, num_local_experts=3))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            assert parameter.detach().std() == pytest.approx(0.02, rel=0.4), name


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


def test_it_loads_elsewhere_with_the_code_beside_its_weights(folder, tmp_path):
    torch.save(some_ids(), tmp_path / "ids.pt")
    files = [tmp_path / name for name in ("ids.pt", "logits.pt", "saved")]
    warm.elsewhere(REMOTE, folder, *files, folder=tmp_path)
    # The other process computes with as many threads as it likes.
    elsewhere, here = torch.load(tmp_path / "logits.pt"), logits_of(load_causal_lm(folder))
    torch.testing.assert_close(elsewhere, here, rtol=1e-5, atol=1e-6)
    ours, again = weights_of(folder), weights_of(tmp_path / "saved")
    assert ours.keys() == again.keys()
    assert (tmp_path / "saved" / "modeling_bam.py").is_file()


def test_the_copied_code_needs_torch_and_transformers_alone(folder):
    source = Path(upcycle_core.__file__).parent / "baselines" / "bam" / "modeling_bam.py"
    assert (folder / "modeling_bam.py").read_text() == source.read_text()
    imports = [line for line in source.read_text().splitlines() if " import " in f" {line} "]
    modules = {line.split()[1].split(".")[0] for line in imports if line[:1].strip()}
    assert modules == {"torch", "transformers", "typing"}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_all_attention_experts_count_as_active(tmp_path, tied):
    models = dense_models(tmp_path, tie_word_embeddings=tied)
    write_bam(models, tmp_path / "moe", top_k=2, **COMMON)
    total = sum(p.numel() for p in load_causal_lm(tmp_path / "moe").parameters())
    found = parameter_counts(tmp_path / "moe")
    assert found == Counts(total, total - 2 * 3 * 32 * WIDTH)


def test_the_seed_is_one_more_expert(experts, tmp_path):
    seed = save_pico(tmp_path / "seed", seed=9, intermediate_size=WIDTH)
    write_bam(with_seed(experts, seed), tmp_path / "moe", top_k=2, **COMMON)
    ours, own = weights_of(tmp_path / "moe"), weights_of(seed)
    name = "model.layers.0.self_attn.{}q_proj.weight"
    assert torch.equal(ours[name.format("experts.3.")], own[name.format("")])
    assert len(load_causal_lm(tmp_path / "moe").model.layers[0].self_attn.experts) == 4
    half = load_causal_lm(seed).to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    write_bam(with_seed(experts, tmp_path / "half"), tmp_path / "of-half", top_k=2, **COMMON)
    ours, own = weights_of(tmp_path / "of-half"), half.state_dict()
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    assert torch.equal(ours[name.format("experts.3.")], own[name.format("")].float())


def test_what_cannot_be_a_bam_is_refused_before_anything_is_written(experts, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError, match="choose a model of llama, mistral"):
        write_bam(dense_models(tmp_path, "qwen3"), out, top_k=1, **COMMON)
    with pytest.raises(InputError, match="must be two or more"):
        write_bam(with_seed({"law": experts["domain0"]}, None), out, top_k=1, **COMMON)
    with pytest.raises(InputError, match=r"moe\.top_k = 4"):
        write_bam(experts, out, top_k=4, **COMMON)
    wide = save_pico(tmp_path / "wide", intermediate_size=96)
    with pytest.raises(InputError, match=r"experts\.wide"):
        write_bam({**experts, "wide": wide}, out, top_k=1, **COMMON)
    assert not out.exists()
