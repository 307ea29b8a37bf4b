import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.pico import save_pico
from upcycle_core.backbone.average import average_tensors, write_average, write_backbone
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError


def experts(tmp_path: Path, count: int = 3, **overrides) -> list[CheckpointReader]:
    return [
        CheckpointReader(save_pico(tmp_path / f"expert{seed}", seed=seed, **overrides))
        for seed in range(count)
    ]


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_summed_in_fp32_in_order_and_cast_back(tmp_path, dtype):
    torch.manual_seed(0)
    readers, tensors = [], []
    for index in range(3):
        # Larger than one piece of the reader, and of other magnitudes: order and type show.
        tensors.append((torch.randn(1025, 1030) * 10.0 ** (3 * index)).to(dtype))
        directory = tmp_path / str(index)
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        save_file({"w": tensors[-1]}, directory / "model.safetensors")
        readers.append(CheckpointReader(directory))
    expected = ((tensors[0].float() + tensors[1].float() + tensors[2].float()) / 3).to(dtype)
    assert torch.equal(average_tensors(readers, "w"), expected)
    assert average_tensors(readers, "w").dtype == dtype


@pytest.mark.parametrize("tied", [False, True])
def test_the_backbone_is_everything_but_the_ffns(tmp_path, tied):
    readers = experts(tmp_path, tie_word_embeddings=tied)
    write_backbone(readers, tmp_path / "backbone", max_shard_bytes=10_000)
    found = weights_of(tmp_path / "backbone")
    sources = [weights_of(reader.directory) for reader in readers]
    assert set(found) == {name for name in sources[0] if ".mlp." not in name}
    assert ("lm_head.weight" in found) is not tied
    for name, tensor in found.items():
        mean = torch.stack([source[name] for source in sources]).double().mean(dim=0)
        torch.testing.assert_close(tensor.double(), mean, rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "backbone" / "config.json").read_text()) == readers[0].config
    assert len(AutoTokenizer.from_pretrained(tmp_path / "backbone")) == 96


def test_the_average_of_a_model_with_itself_is_that_model(tmp_path):
    reader = experts(tmp_path, 1)[0]
    write_average([reader, reader], tmp_path / "average", max_shard_bytes=20_000)
    assert len(list((tmp_path / "average").glob("*.safetensors"))) > 1
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        ours = load_causal_lm(tmp_path / "average")(input_ids=ids).logits
        theirs = load_causal_lm(reader.directory)(input_ids=ids).logits
    assert torch.equal(ours, theirs)


def test_the_same_experts_give_the_same_bytes(tmp_path):
    readers = experts(tmp_path)
    for name in ("one", "two"):
        write_backbone(readers, tmp_path / name, max_shard_bytes=10_000)
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two")


def test_experts_of_other_shapes_are_refused_before_anything_is_written(tmp_path):
    readers = experts(tmp_path, 1)
    readers.append(CheckpointReader(save_pico(tmp_path / "wide", intermediate_size=64)))
    with pytest.raises(InputError, match=r"mlp\.gate_proj\.weight has shape \[64, 32\]"):
        write_backbone(readers, tmp_path / "backbone", max_shard_bytes=10_000)
    assert not (tmp_path / "backbone").exists()
