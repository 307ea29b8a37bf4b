import pytest
import torch

from tests.pico import save_pico
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
IDS = torch.arange(24).view(2, 12)


def stitched_by_hand(directories, index: int):
    """An expert whose every parameter outside the FFNs is overwritten with the mean."""
    models = [load_causal_lm(directory) for directory in directories]
    states = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]
    for name, tensor in models[index].state_dict().items():
        if ".mlp." not in name:
            tensor.copy_(sum(state[name] for state in states) / len(states))
    return models[index]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_stitched_model_is_the_average_with_one_experts_ffns(tmp_path, family, tied):
    directories = [
        save_pico(tmp_path / str(seed), family, seed=seed, tie_word_embeddings=tied)
        for seed in range(2)
    ]
    write_backbone(
        [CheckpointReader(d) for d in directories], tmp_path / "backbone", max_shard_bytes=10**9
    )
    for index, directory in enumerate(directories):
        model = load_stitched(tmp_path / "backbone", directory)
        assert not model.training
        with torch.no_grad():
            logits = model(input_ids=IDS).logits
            expected = stitched_by_hand(directories, index)(input_ids=IDS).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_headless_has_no_lm_head_and_the_same_hidden_states(tmp_path, tied):
    expert = save_pico(tmp_path / "expert", tie_word_embeddings=tied)
    write_backbone([CheckpointReader(expert)], tmp_path / "backbone", max_shard_bytes=10**9)
    headless = load_stitched(tmp_path / "backbone", expert, headless=True)
    assert not any("lm_head" in name for name, _ in headless.named_modules())
    with torch.no_grad():
        states = headless(input_ids=IDS).last_hidden_state
        whole = load_stitched(tmp_path / "backbone", expert).model(input_ids=IDS)
    assert torch.equal(states, whole.last_hidden_state)


def test_weights_get_the_type_that_is_asked_for(tmp_path):
    expert = save_pico(tmp_path / "expert")
    write_backbone([CheckpointReader(expert)], tmp_path / "backbone", max_shard_bytes=10**9)
    model = load_stitched(tmp_path / "backbone", expert, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_an_expert_of_another_shape_is_refused(tmp_path):
    expert = save_pico(tmp_path / "expert")
    write_backbone([CheckpointReader(expert)], tmp_path / "backbone", max_shard_bytes=10**9)
    other = save_pico(tmp_path / "other", intermediate_size=64)
    with pytest.raises(InputError, match=r"expert = .*gate_proj\.weight has shape \[64, 32\]"):
        load_stitched(tmp_path / "backbone", other)


def test_a_whole_model_is_no_backbone(tmp_path):
    expert = save_pico(tmp_path / "expert")
    with pytest.raises(InputError, match=r"backbone = .*mlp\.gate_proj\.weight"):
        load_stitched(expert, expert)
