"""The piece that merges a backbone: what a kill has left is gone on with."""

import shutil

import pytest
from killed import files, killed_at

from tasks.dume.backbone import merge_piece
from tests.pico import save_pico
from upcycle_core.backbone.config import MergeConfig
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.progress import Silent


@pytest.fixture
def arguments(tmp_path):
    texts = [([2 + (n * k) % 90 for k in range(32)], 32) for n in range(1, 25)]
    for name in ("first", "second"):
        write_split(tmp_path / name, texts, eos_id=0, vocabulary_size=96)
    return {
        "experts": [save_pico(tmp_path / f"expert{n}", seed=n) for n in range(2)],
        "counted": [],
        "regressed": [tmp_path / "first", tmp_path / "second"],
        "moments": [],
        "config": StatisticsConfig(sequence_length=16, batch_size=3, precision="fp32"),
        "max_shard_bytes": 10**9,
        "device": "cpu",
        "progress": Silent(),
    }


def test_a_killed_merge_keeps_its_average_and_the_layers_that_are_done(
    arguments, tmp_path, monkeypatch
):
    merge = MergeConfig(attention="distilled")

    def call(out):
        merge_piece(out=out, merge=merge, **arguments)

    passed, whole, found = killed_at(monkeypatch, 1, call, tmp_path / "out")
    assert passed == [1]
    assert found == whole
    assert not (tmp_path / "out.averaged").exists()


def test_what_a_kill_left_of_an_average_that_was_removed_is_none(arguments, tmp_path, monkeypatch):
    merge = MergeConfig(attention="distilled")
    merge_piece(out=tmp_path / "whole", merge=merge, **arguments)

    removed = shutil.rmtree

    def killed(place, **how):
        if place.suffix == ".averaged" and place.exists():
            next(place.glob("*.safetensors")).unlink()
            raise KeyboardInterrupt
        removed(place, **how)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        merge_piece(out=tmp_path / "out", merge=merge, **arguments)
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "out")  # as before a piece begins again
    merge_piece(out=tmp_path / "out", merge=merge, **arguments)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert not list(tmp_path.glob("out.*"))
