import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.pico import save_pico
from upcycle_core.checkpoints.reader import BUFFER, CheckpointReader
from upcycle_core.errors import InputError


@pytest.fixture(scope="module")
def pico(tmp_path_factory) -> Path:
    return save_pico(tmp_path_factory.mktemp("reader") / "model")


def reshard(source: Path, out: Path, parts: int = 2) -> Path:
    """The same checkpoint in several files, written by hand."""
    weights = load_file(source / "model.safetensors")
    out.mkdir()
    shutil.copyfile(source / "config.json", out / "config.json")
    weight_map = {}
    for part in range(parts):
        names = sorted(weights)[part::parts]
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        save_file({name: weights[name] for name in names}, out / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def faults_of(directory: Path) -> str:
    with pytest.raises(InputError) as caught:
        CheckpointReader(directory, field="experts.law")
    assert all(fault.field == "experts.law" for fault in caught.value.faults)
    return str(caught.value)


@pytest.mark.parametrize("parts", [1, 3])
def test_tensors_are_what_the_files_hold(pico, tmp_path, parts):
    directory = pico if parts == 1 else reshard(pico, tmp_path / "sharded", parts)
    reader = CheckpointReader(directory)
    expected = load_file(pico / "model.safetensors")
    assert list(reader.tensors) == sorted(expected)
    for name, tensor in expected.items():
        assert reader.tensors[name].shape == tuple(tensor.shape)
        assert reader.tensors[name].dtype == tensor.dtype
        assert torch.equal(reader.tensor(name), tensor)
    assert reader.config == json.loads((pico / "config.json").read_text())


def test_a_tensor_is_mapped_rather_than_copied(tmp_path):
    def anonymous_kb() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1))

    (tmp_path / "config.json").write_text("{}")
    save_file({"big": torch.ones(16_000_000)}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    before = anonymous_kb()
    tensor = reader.tensor("big")
    assert tensor[::1000].sum() == 16_000
    assert anonymous_kb() - before < 16_000  # the tensor has 62_500 kB


@pytest.mark.parametrize("count", [0, 1, BUFFER // 2 - 1, BUFFER // 2, BUFFER + 3])
def test_pieces_are_a_tensor_s_values_in_order(tmp_path, count):
    torch.manual_seed(0)
    values = torch.randn(count).to(torch.bfloat16)
    others = {"before": torch.ones(3), "behind": torch.ones(5, dtype=torch.float64)}
    (tmp_path / "config.json").write_text("{}")
    save_file({"values": values, **others}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    for name, tensor in {"values": values, **others}.items():
        found = [piece.clone() for piece in reader.pieces(name)]
        assert all(piece.nbytes <= BUFFER for piece in found)
        assert torch.equal(torch.cat([torch.empty(0, dtype=tensor.dtype), *found]), tensor)


def test_a_file_that_becomes_shorter_while_it_is_read_is_said(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({"values": torch.ones(BUFFER // 2)}, file)  # two buffers
    pieces = CheckpointReader(tmp_path, field="experts.law").pieces("values")
    assert next(pieces).sum() == BUFFER // 4
    with file.open("r+b") as opened:
        opened.truncate(BUFFER)
    with pytest.raises(InputError, match=r"experts\.law = .* has become shorter"):
        next(pieces)


def test_an_unknown_tensor_is_named(pico):
    with pytest.raises(InputError, match=r"has no tensor model\.nowhere"):
        CheckpointReader(pico).tensor("model.nowhere")
    with pytest.raises(InputError, match=r"has no tensor model\.nowhere"):
        next(CheckpointReader(pico).pieces("model.nowhere"))


def test_a_directory_without_anything_is_refused_with_both_faults(tmp_path):
    message = faults_of(tmp_path)
    assert "config.json" in message
    assert "model.safetensors" in message


def test_pickle_is_refused(pico, tmp_path):
    shutil.copyfile(pico / "config.json", tmp_path / "config.json")
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    message = faults_of(tmp_path)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message


def test_truncated_and_missing_shards_are_both_named(pico, tmp_path):
    sharded = reshard(pico, tmp_path / "sharded", 3)
    shards = sorted(sharded.glob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-100])
    shards[1].unlink()
    message = faults_of(sharded)
    assert shards[0].name in message
    assert shards[1].name in message
    assert shards[2].name not in message


def test_index_and_files_must_agree(pico, tmp_path):
    sharded = reshard(pico, tmp_path / "sharded")
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop("model.norm.weight")
    index["weight_map"]["model.ghost.weight"] = file
    path.write_text(json.dumps(index))
    message = faults_of(sharded)
    assert "model.ghost.weight" in message
    assert "model.norm.weight" in message


def test_a_quantised_checkpoint_is_told_in_one_line(tmp_path):
    names = [f"model.layers.{layer}.mlp.up_proj.qweight" for layer in range(9)]
    tensors = {name: torch.zeros(2, dtype=torch.int32) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError) as caught:
        CheckpointReader(tmp_path)
    (fault,) = caught.value.faults
    assert "stored as I32 (8 more tensors are like it)" in fault.remedy
    assert "quantization_config (gptq); give the model that was quantised" in fault.remedy


def test_integers_are_no_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"ids": torch.ones(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    assert "ids is stored as I64" in faults_of(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_tensors_are_named(tmp_path, value):
    (tmp_path / "config.json").write_text("{}")
    bad = torch.zeros(3 * 2**20 + 5)
    bad[-1] = value
    save_file(
        {"good": torch.zeros(4), "bad": bad, "bf16": torch.zeros(2, dtype=torch.bfloat16)},
        tmp_path / "model.safetensors",
    )
    assert CheckpointReader(tmp_path).non_finite == ["bad"]
