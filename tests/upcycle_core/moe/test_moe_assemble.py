import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import join, recast
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.config import MergeConfig
from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.inspect import force_expert, record_routing, routers_of, set_top_k

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# family and what its configuration says, each tied and untied
CASES = {
    "llama": ("llama", {}),
    "llama, one kv head a head": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, a window that is not used": (
        "llama",
        {"sliding_window": 5, "use_sliding_window": False},
    ),
    "mistral": ("mistral", {}),
    "mistral, sliding window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2, sliding windows by layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 16}),
    "qwen3, attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3, sliding windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "ernie4.5": ("ernie4_5", {}),
    "ernie4.5, wide heads": ("ernie4_5", {"head_dim": 16}),
    "olmo2": ("olmo2", {}),
    "olmo2, attention bias": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES)
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def some_ids() -> torch.Tensor:
    return torch.randint(0, 96, (3, 19), generator=torch.Generator().manual_seed(5))


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=some_ids()).logits


def weights_of(directory) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


@EVERY_CASE
@TIED
def test_transformers_loads_it_with_every_key_in_its_place(tmp_path, case, tied):
    family, overrides = CASES[case]
    joined = join(tmp_path, family, tie_word_embeddings=tied, **overrides)
    _, info = AutoModelForCausalLM.from_pretrained(joined.model, output_loading_info=True)
    assert not any(info.values()), info


@EVERY_CASE
@TIED
def test_identical_experts_reproduce_the_dense_model(tmp_path, case, tied):
    family, overrides = CASES[case]
    joined = join(tmp_path, family, seeds=(3, 3, 3), tie_word_embeddings=tied, **overrides)
    dense = logits_of(load_causal_lm(joined.experts["domain0"]))
    moe = load_causal_lm(joined.model)
    for top_k in (1, 2):
        set_top_k(moe, top_k)
        assert (logits_of(moe) - dense).abs().max() <= 1e-5 * dense.abs().max()


@EVERY_CASE
@TIED
def test_a_forced_expert_is_its_dense_model_bit_for_bit(tmp_path, case, tied):
    family, overrides = CASES[case]
    joined = join(tmp_path, family, seeds=(0, 1), tie_word_embeddings=tied, **overrides)
    moe = load_causal_lm(joined.model)
    dense = [logits_of(load_stitched(joined.backbone, d)) for d in joined.experts.values()]
    for implementation, top_k in itertools.product(("eager", "grouped_mm"), (1, 2)):
        moe.set_experts_implementation(implementation)
        set_top_k(moe, top_k)
        for index, expected in enumerate(dense):
            with force_expert(moe, index):
                assert torch.equal(logits_of(moe), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_configuration_on_disk_decides_top_k(tmp_path, family):
    model = load_causal_lm(join(tmp_path, family, top_k=2).model)
    with record_routing(model) as counts:
        logits_of(model)
    assert counts.sum(dim=1).tolist() == [2 * some_ids().numel()] * 2


def test_experts_differ_and_routing_matters(tmp_path):
    joined = join(tmp_path)
    moe = load_causal_lm(joined.model)
    forced = []
    for index in range(3):
        with force_expert(moe, index):
            forced.append(logits_of(moe))
    routed = logits_of(moe)
    assert all((routed - one).abs().max() > 0.1 for one in forced)


@pytest.mark.parametrize(
    ("family", "router", "expert"),
    [
        ("llama", "block_sparse_moe.gate.weight", "block_sparse_moe.experts.1.{}.weight"),
        ("qwen2", "mlp.gate.weight", "mlp.experts.1.{}.weight"),
        ("qwen3", "mlp.gate.weight", "mlp.experts.1.{}.weight"),
    ],
)
def test_names_on_disk_are_the_ecosystems(tmp_path, family, router, expert):
    joined = join(tmp_path, family)
    found = weights_of(joined.model)
    own = weights_of(joined.experts["domain1"])
    parts = ("w1", "w3", "w2") if family == "llama" else ("gate_proj", "up_proj", "down_proj")
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for part, dense in zip(parts, ("gate_proj", "up_proj", "down_proj"), strict=True):
            ours = found[prefix + expert.format(part)]
            assert torch.equal(ours, own[f"{prefix}mlp.{dense}.weight"])
        assert torch.equal(found[prefix + router], joined.routers[layer].T.float())
    # What transformers itself writes for such a model has the same names.
    AutoModelForCausalLM.from_pretrained(joined.model).save_pretrained(tmp_path / "again")
    again = weights_of(tmp_path / "again")
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())


@TIED
def test_a_tied_model_has_no_lm_head_on_disk(tmp_path, tied):
    joined = join(tmp_path, tie_word_embeddings=tied)
    assert ("lm_head.weight" in weights_of(joined.model)) is not tied


def test_shards_and_sharded_input_give_the_same_model(tmp_path):
    whole = join(tmp_path / "whole")
    parts = join(tmp_path / "parts", max_shard_bytes=15_000)
    assert len(list(parts.model.glob("*.safetensors"))) > 3
    sharded = tmp_path / "sharded"
    experts = {}
    for name, directory in whole.experts.items():
        experts[name] = sharded / name
        model = AutoModelForCausalLM.from_pretrained(directory)
        model.save_pretrained(experts[name], max_shard_size="30KB")
        assert (experts[name] / "model.safetensors.index.json").is_file()
    assemble(
        experts,
        parts.backbone,
        whole.routers,
        sharded / "moe",
        top_k=1,
        max_shard_bytes=15_000,
    )
    expected = logits_of(load_causal_lm(whole.model))
    for directory in (parts.model, sharded / "moe"):
        assert torch.equal(logits_of(load_causal_lm(directory)), expected)
    assert tree_digest(sharded / "moe") == tree_digest(parts.model)


def test_bf16_experts_stay_bf16(tmp_path):
    joined = join(tmp_path, "qwen2", dtype=torch.bfloat16)
    assert {t.dtype for t in weights_of(joined.model).values()} == {torch.bfloat16}
    config = json.loads((joined.model / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    moe = load_causal_lm(joined.model)
    dense = load_stitched(joined.backbone, joined.experts["domain2"])
    with force_expert(moe, 2):
        assert torch.equal(logits_of(moe), logits_of(dense))


def test_the_same_parts_give_the_same_bytes(tmp_path):
    digests = [
        tree_digest(join(tmp_path / name, "qwen3", max_shard_bytes=15_000).model)
        for name in ("one", "two")
    ]
    assert digests[0] == digests[1]


def test_tokenizer_and_generation_come_along(tmp_path):
    joined = join(tmp_path)
    assert len(AutoTokenizer.from_pretrained(joined.model)) == 96
    assert GenerationConfig.from_pretrained(joined.model).eos_token_id == 0
    (joined.backbone / "generation_config.json").unlink()
    assemble(
        joined.experts,
        joined.backbone,
        joined.routers,
        tmp_path / "again",
        top_k=1,
        max_shard_bytes=10**9,
    )
    assert GenerationConfig.from_pretrained(tmp_path / "again").pad_token_id == 1


def test_the_assembled_model_generates(tmp_path):
    model = load_causal_lm(join(tmp_path, top_k=2).model)
    out = model.generate(some_ids()[:, :4], max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert out.shape == (3, 9)


def test_every_tensor_is_reported(tmp_path):
    joined = join(tmp_path)

    class Listener:
        total, done = 0, 0

        def start(self, what, total, unit="steps"):
            self.total = total

        def advance(self, amount=1, **shown):
            self.done += amount

        def metrics(self, values, step): ...

    listener = Listener()
    assemble(
        joined.experts,
        joined.backbone,
        joined.routers,
        tmp_path / "again",
        top_k=1,
        max_shard_bytes=10**9,
        progress=listener,
    )
    assert listener.done == listener.total == len(weights_of(joined.model))


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    joined = join(tmp_path)
    wide = save_pico(tmp_path / "wide", intermediate_size=96)
    routers = {0: torch.zeros(32, 2), 3: torch.full((32, 3), float("nan"))}
    with pytest.raises(InputError) as caught:
        assemble(
            {**joined.experts, "domain2": wide},
            joined.backbone,
            routers,
            tmp_path / "out",
            top_k=1,
            max_shard_bytes=10**9,
        )
    message = str(caught.value)
    assert "experts.domain2" in message
    assert "routers = [0, 3]: must be layers 0 to 1" in message
    assert "routers.0 = [32, 2]: must be [32, 3]" in message
    assert "routers.3 = 'NaN or infinity'" in message
    assert not (tmp_path / "out").exists()


def in_half(source, out):
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(out)
    return out


def test_a_narrower_expert_is_as_exact_in_the_type_of_the_rest(tmp_path):
    joined = join(tmp_path)
    half = in_half(joined.experts["domain0"], tmp_path / "half")
    experts, out = {**joined.experts, "domain0": half}, tmp_path / "out"
    assemble(experts, joined.backbone, joined.routers, out, top_k=1, max_shard_bytes=10**9)
    found, own = weights_of(out), weights_of(half)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    expert = found["model.layers.1.block_sparse_moe.experts.0.w2.weight"]
    assert torch.equal(expert, own["model.layers.1.mlp.down_proj.weight"].float())


def test_a_backbone_whose_type_cannot_hold_the_experts_is_refused(tmp_path):
    joined = join(tmp_path)
    backbone = in_half(joined.experts["domain0"], tmp_path / "half")
    with pytest.raises(
        InputError, match=r"weights are torch\.float32, the backbone's torch\.bfloat16"
    ):
        assemble(
            joined.experts,
            backbone,
            joined.routers,
            tmp_path / "out",
            top_k=1,
            max_shard_bytes=10**9,
        )


def test_more_experts_a_token_than_there_are_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"moe\.top_k = 4"):
        join(tmp_path, top_k=4)


def test_routers_are_stored_in_the_type_of_the_weights(tmp_path):
    joined = join(tmp_path, dtype=torch.bfloat16)
    reader = CheckpointReader(joined.model)
    stored = reader.tensor("model.layers.1.block_sparse_moe.gate.weight")
    assert torch.equal(stored, joined.routers[1].T.to(torch.bfloat16))
    assert len(routers_of(load_causal_lm(joined.model))) == 2


def test_an_edit_sees_every_matrix_and_its_result_is_written(tmp_path):
    joined = join(tmp_path)
    seen = {}

    def edit(layer, expert, part, weight):
        seen[layer, expert, part] = weight.clone()
        return weight + (layer + 10 * expert) if part == "up" else weight

    assemble(
        joined.experts,
        joined.backbone,
        joined.routers,
        tmp_path / "edited",
        top_k=1,
        max_shard_bytes=10**9,
        edit=edit,
    )
    before, after = weights_of(joined.model), weights_of(tmp_path / "edited")
    parts = {"gate": "w1", "up": "w3", "down": "w2"}
    assert len(seen) == 2 * 3 * 3
    for (layer, expert, part), weight in seen.items():
        name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{parts[part]}.weight"
        assert torch.equal(weight, before[name])
        added = layer + 10 * expert if part == "up" else 0
        assert torch.equal(after[name], before[name] + added)
    others = [name for name in before if ".experts." not in name]
    assert all(torch.equal(after[name], before[name]) for name in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_backbone_it_is_averaged_on_the_way(tmp_path, dtype):
    joined = join(tmp_path, "qwen3", dtype=dtype)
    options = {"top_k": 1, "max_shard_bytes": 10**9}
    assemble(joined.experts, None, joined.routers, tmp_path / "again", **options)
    assert tree_digest(tmp_path / "again") == tree_digest(joined.model)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("half", ["domain0", "domain1"])
def test_the_mean_of_two_types_is_of_the_one_that_holds_both(tmp_path, half, counted):
    """A LoRA expert is as the seed is, bf16, and one that was trained further is fp32."""
    joined = join(tmp_path, "qwen2", seeds=(0, 1))
    recast(joined.experts[half], torch.bfloat16)
    readers = [CheckpointReader(expert) for expert in joined.experts.values()]
    merge = MergeConfig(embeddings="counts", head="counts") if counted else None
    backbone, out = tmp_path / "mean", tmp_path / "out"
    counts = [torch.arange(96) + domain for domain in range(2)] if counted else []
    write_backbone(readers, backbone, max_shard_bytes=10**9, merge=merge, counts=counts)
    options = {"top_k": 1, "max_shard_bytes": 10**9}
    assemble(joined.experts, backbone, joined.routers, out, **options)
    found, sources = weights_of(out), [weights_of(expert) for expert in joined.experts.values()]
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(found[norm], (sources[0][norm].float() + sources[1][norm].float()) / 2)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float32"
    if not counted:
        assemble(joined.experts, None, joined.routers, tmp_path / "again", **options)
        assert tree_digest(tmp_path / "again") == tree_digest(out)


def test_a_fault_of_a_checkpoint_that_comes_several_times_is_said_once(tmp_path):
    joined = join(tmp_path)
    wide = save_pico(tmp_path / "wide", intermediate_size=96)
    experts = {"law": joined.experts["domain0"], "code": wide, "history": wide}
    with pytest.raises(InputError) as caught:
        assemble(experts, None, joined.routers, tmp_path / "out", top_k=1, max_shard_bytes=10**9)
    message = str(caught.value)
    assert message.count("layers.0.mlp.gate_proj.weight") == 1
    assert "experts.code" in message
    assert "experts.history" not in message
