import errno
import json
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.checkpoints.place import new_directory, place_faults
from upcycle_core.checkpoints.reader import SINGLE_FILE, CheckpointReader
from upcycle_core.checkpoints.writer import (
    PIECE,
    TensorSpec,
    sync_directory,
    sync_file,
    write_sharded,
)
from upcycle_core.durable import reserve
from upcycle_core.errors import FULL


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "z.first": torch.randn(7, 5),
        "b.bf16": torch.randn(11).to(torch.bfloat16),
        "a.half": torch.randn(3, 2, 2).to(torch.float16),
        "c.scalar": torch.tensor(2.5, dtype=torch.float64),
        "c.strided": torch.randn(6, 4).T,
    }


def write(directory, tensors, max_shard_bytes=10**9) -> None:
    specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    write_sharded(directory, specs, tensors.__getitem__, max_shard_bytes=max_shard_bytes)


def test_one_shard_reads_back_bit_for_bit(tmp_path):
    tensors = some_tensors()
    write(tmp_path, tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "model.safetensors", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}


def test_integers_are_written_and_read_where_they_are_asked_for(tmp_path):
    kinds = (torch.uint8, torch.uint16, torch.int32, torch.int64)
    largest = {str(kind): torch.tensor([[0, torch.iinfo(kind).max]]).to(kind) for kind in kinds}
    tensors = {"weights": torch.ones(3), **largest}
    write(tmp_path, tensors)
    (tmp_path / "config.json").write_text("{}")
    reader = CheckpointReader(tmp_path, integers=True)
    for name, tensor in tensors.items():
        assert reader.tensors[name].dtype == reader.tensor(name).dtype == tensor.dtype
        assert torch.equal(reader.tensor(name), tensor)


def test_shards_keep_to_their_size_and_the_index_names_every_tensor(tmp_path):
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(7)}
    tensors["t3"] = torch.zeros(50)  # alone larger than a shard
    write(tmp_path, tensors, max_shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    found = {}
    for file in files:
        held = load_file(tmp_path / file)
        assert sum(t.nbytes for t in held.values()) <= 100 or len(held) == 1
        assert {name: index["weight_map"][name] for name in held} == dict.fromkeys(held, file)
        found |= held
    assert found.keys() == tensors.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("sizes", [(10**9, 100), (100, 10**9), (100, 150)])
def test_nothing_of_an_earlier_write_stays(tmp_path, sizes):
    (tmp_path / "config.json").write_text("{}")
    for value, size in zip((1.0, 2.0), sizes, strict=True):
        write(tmp_path, {f"t{i}": torch.full((10,), value) for i in range(7)}, size)
    reader = CheckpointReader(tmp_path)
    assert all((reader.tensor(f"t{i}") == 2.0).all() for i in range(7))
    write(tmp_path / "alone", {f"t{i}": torch.full((10,), 2.0) for i in range(7)}, sizes[1])
    (tmp_path / "config.json").unlink()
    alone = tree_digest(tmp_path / "alone")
    assert {path.name for path in tmp_path.iterdir()} == {*alone, "alone"}


def test_the_same_tensors_give_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / name, some_tensors(), max_shard_bytes=150)
    assert len(tree_digest(tmp_path / "one")) > 2
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two")


def test_one_tensor_is_asked_for_at_a_time_in_order(tmp_path):
    tensors, asked = some_tensors(), []

    def produce(name: str) -> torch.Tensor:
        asked.append(name)
        return tensors[name]

    specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    write_sharded(tmp_path, specs, produce, max_shard_bytes=10**9)
    assert asked == list(tensors)


def test_pieces_of_a_tensor_are_written_one_by_one(tmp_path):
    whole = torch.randn(7, 3, dtype=torch.bfloat16)
    alive = []

    def pieces():
        for rows in whole.split(2):
            assert all(other() is None for other in alive)  # each is released when written
            piece = rows.clone()
            alive.append(weakref.ref(piece))
            yield piece
            del piece

    specs = [TensorSpec("w", (7, 3), torch.bfloat16), TensorSpec("b", (2,), torch.float32)]
    made = {"w": pieces(), "b": torch.ones(2)}
    write_sharded(tmp_path, specs, made.__getitem__, max_shard_bytes=10**9)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["w"], whole)
    assert torch.equal(found["b"], made["b"])


@pytest.mark.parametrize("counts", [(1,), (1, 2), ()])
def test_pieces_that_are_not_the_whole_are_an_error(tmp_path, counts):
    specs = [TensorSpec("a", (2,), torch.float32)]
    pieces = (torch.zeros(count) for count in counts)
    with pytest.raises(ValueError, match=r"a: .* was produced where"):
        write_sharded(tmp_path, specs, lambda _: pieces, max_shard_bytes=100)


def test_a_piece_of_another_type_is_an_error(tmp_path):
    specs = [TensorSpec("a", (2,), torch.float32)]
    pieces = iter([torch.zeros(1), torch.zeros(1, dtype=torch.float64)])
    with pytest.raises(ValueError, match=r"a: .*float64 was produced where"):
        write_sharded(tmp_path, specs, lambda _: pieces, max_shard_bytes=100)


def test_every_file_and_the_directory_are_brought_to_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}"))
    )
    write(tmp_path, some_tensors(), max_shard_bytes=150)
    assert {*map(str, tmp_path.iterdir()), str(tmp_path)} == set(synced)
    assert synced[-1] == str(tmp_path)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_to_a_directory_stays_one_when_that_is_written_whole(tmp_path, is_there):
    disk, out = tmp_path / "disk" / "model", tmp_path / "out"
    if is_there:
        disk.mkdir(parents=True)
    out.symlink_to(disk)
    assert place_faults(out) == []
    with new_directory(out) as partial:
        write(partial, some_tensors())
    assert out.is_symlink()
    assert [path.name for path in disk.iterdir()] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]
    assert [path.name for path in disk.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)], ids=["shape", "dtype"]
)
def test_a_broken_promise_is_an_error(tmp_path, wrong):
    specs = [TensorSpec("a", (2,), torch.float32)]
    with pytest.raises(ValueError, match=r"a: .* was produced where"):
        write_sharded(tmp_path, specs, lambda _: wrong, max_shard_bytes=100)


def test_a_name_may_come_once_only(tmp_path):
    specs = [TensorSpec("a", (2,), torch.float32)] * 2
    with pytest.raises(ValueError, match="twice"):
        write_sharded(tmp_path, specs, lambda _: torch.zeros(2), max_shard_bytes=100)


def test_a_tensor_of_many_pieces_of_a_file_is_written_whole(tmp_path):
    tensor = torch.arange(5 * PIECE // 8 + 1, dtype=torch.int32)  # two pieces and a rest
    specs = [TensorSpec("a", tuple(tensor.shape), torch.int32)]
    write_sharded(tmp_path, specs, lambda _: tensor, max_shard_bytes=10**9)
    assert torch.equal(load_file(tmp_path / SINGLE_FILE)["a"], tensor)


def test_the_disk_has_room_for_all_of_a_file_before_the_first_tensor_is_made(tmp_path):
    there = []

    def produce(name):
        file = (tmp_path / SINGLE_FILE).stat()
        there.append((file.st_size < 1000, file.st_blocks * 512 >= 2_000_000))
        return torch.ones(250_000)

    specs = [TensorSpec(name, (250_000,), torch.float32) for name in "ab"]
    write_sharded(tmp_path, specs, produce, max_shard_bytes=10**9)
    assert there[0] == (True, True)


def test_a_file_that_no_disk_has_room_for_is_an_error_and_holds_nothing(tmp_path):
    with (
        (tmp_path / "large").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="large") as caught,
    ):
        reserve(file, 2**62)
    assert caught.value.errno in FULL
    assert (tmp_path / "large").stat().st_blocks == 0


def test_a_folder_of_a_file_system_that_syncs_none_is_written_in():
    proc = Path("/proc")  # it has no such call, as some network file systems
    sync_directory(proc)
    with pytest.raises(OSError, match="Invalid argument"):
        sync_file(proc / "self" / "stat")


THREE = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.mark.parametrize("full", THREE)
def test_a_file_that_the_disk_does_not_take_is_said(tmp_path, monkeypatch, full):
    def taken(path):
        if path.name == full:
            raise OSError(errno.EIO, "the disk is broken", str(path))

    monkeypatch.setattr("upcycle_core.checkpoints.writer.sync", taken)
    with pytest.raises(OSError, match=f"the disk is broken: '.*{full}'"):
        write(tmp_path, {name: torch.ones(50) for name in "abc"}, max_shard_bytes=200)


def test_a_file_goes_to_the_disk_while_the_next_is_written(tmp_path, monkeypatch):
    reached, written = threading.Event(), threading.Event()

    def held(path):
        if path.name == THREE[0]:
            reached.set()
            assert written.wait(10)

    def produce(name):
        if name == "b":
            assert reached.wait(10)
            written.set()
        return torch.ones(50)

    monkeypatch.setattr("upcycle_core.checkpoints.writer.sync", held)
    specs = [TensorSpec(name, (50,), torch.float32) for name in "abc"]
    write_sharded(tmp_path, specs, produce, max_shard_bytes=200)
