"""Statistics layer by layer are those of the whole model, killed on the way or not."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pyseccomp
import pytest
import torch
from safetensors.torch import load_file

from tests.pico import save_pico
from upcycle_core.activations import resume
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.statistics import domain_statistics
from upcycle_core.progress import Silent

LENGTHS = (30, 9, 17, 24, 8, 12, 31, 21, 10)
LAYERS = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    generator = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("corpora") / "calibration"
    documents = [(generator.integers(2, 96, length), length) for length in LENGTHS]
    write_split(directory, documents, eos_id=0, vocabulary_size=96)
    return directory


def models(root: Path, family: str) -> tuple[Path, Path]:
    paths = [
        save_pico(root / f"expert{seed}", family, seed=seed, num_hidden_layers=LAYERS)
        for seed in range(2)
    ]
    write_backbone([CheckpointReader(p) for p in paths], root / "backbone", max_shard_bytes=10**9)
    return root / "backbone", paths[1]


class KilledAt(Silent):
    """Progress that ends the pass after so many batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def advance(self, amount: int = 1, **shown: float) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Counting(Silent):
    """Progress that counts batches."""

    batches = 0

    def advance(self, amount: int = 1, **shown: float) -> None:
        self.batches += 1


def settings(precision: str) -> StatisticsConfig:
    return StatisticsConfig(
        sequence_length=16,
        batch_size=4,
        shards=1,
        folds=2,
        position_buckets=(4,),
        precision=precision,
    )


def assert_same(one: Path, other: Path) -> None:
    found, expected = load_file(one), load_file(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("family", "precision"), [*zip(FAMILIES, cycle(("fp32", "bf16")))])
def test_streamed_statistics_are_those_of_the_whole_pass(family, precision, corpus, tmp_path):
    parts, config = models(tmp_path, family), settings(precision)
    domain_statistics(*parts, corpus, tmp_path / "whole", config=config, shard=0)
    folder = tmp_path / "folder"
    domain_statistics(
        *parts, corpus, tmp_path / "streamed", config=config, shard=0, streamed=folder
    )
    assert_same(tmp_path / "streamed", tmp_path / "whole")
    assert not folder.exists()


@pytest.mark.parametrize("killed_at", [1, 7, 12])
def test_a_killed_pass_goes_on_at_its_layer(killed_at, corpus, tmp_path):
    parts, config = models(tmp_path, "llama"), settings("fp32")
    domain_statistics(*parts, corpus, tmp_path / "whole", config=config, shard=0)
    folder = tmp_path / "folder"
    common = {"config": config, "shard": 0, "streamed": folder}
    out = tmp_path / "streamed"
    with pytest.raises(KeyboardInterrupt):
        domain_statistics(*parts, corpus, out, progress=KilledAt(killed_at), **common)
    counting = Counting()
    domain_statistics(*parts, corpus, out, progress=counting, **common)
    batches = 4  # a layer
    assert counting.batches == LAYERS * batches - (killed_at - 1) // batches * batches
    assert_same(out, tmp_path / "whole")


def test_what_lies_there_of_another_text_is_left_aside(corpus, tmp_path):
    parts, config = models(tmp_path, "llama"), settings("fp32")
    folder = tmp_path / "folder"
    common = {"shard": 0, "streamed": folder}
    other = StatisticsConfig(sequence_length=12, batch_size=2, shards=1)
    with pytest.raises(KeyboardInterrupt):
        domain_statistics(
            *parts, corpus, tmp_path / "out", config=other, progress=KilledAt(20), **common
        )
    domain_statistics(*parts, corpus, tmp_path / "out", config=config, **common)
    domain_statistics(*parts, corpus, tmp_path / "whole", config=config, shard=0)
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_what_lies_there_of_other_counted_tokens_is_left_aside(tmp_path):
    corpus = tmp_path / "chats"
    chats = [(np.arange(2, length + 2), length, np.arange(length) % 2) for length in LENGTHS]
    write_split(corpus, chats, eos_id=0, vocabulary_size=96)
    parts, common = models(tmp_path, "llama"), {"shard": 0, "streamed": tmp_path / "folder"}
    every, answers = (replace(settings("fp32"), count=count) for count in ("all", "responses"))
    with pytest.raises(KeyboardInterrupt):
        domain_statistics(
            *parts, corpus, tmp_path / "out", config=every, progress=KilledAt(7), **common
        )
    domain_statistics(*parts, corpus, tmp_path / "out", config=answers, **common)
    domain_statistics(*parts, corpus, tmp_path / "whole", config=answers, shard=0)
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_a_pass_that_is_killed_while_its_files_go_is_made_again(corpus, tmp_path, monkeypatch):
    parts, config = models(tmp_path, "llama"), settings("fp32")
    folder, out = tmp_path / "folder", tmp_path / "streamed"
    common = {"config": config, "shard": 0, "streamed": folder}

    def killed(path, **_):
        for first in path.glob("*.sums"):
            first.unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(resume.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            domain_statistics(*parts, corpus, out, **common)
    domain_statistics(*parts, corpus, out, **common)
    domain_statistics(*parts, corpus, tmp_path / "whole", config=config, shard=0)
    assert_same(out, tmp_path / "whole")


def without_fallocate() -> None:
    """From here on this thread's files are as on a disk without fallocate, like NFS before 4.2."""
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    rules.add_rule(pyseccomp.ERRNO(errno.EOPNOTSUPP), "fallocate")
    rules.load()


def test_a_disk_without_fallocate_holds_what_is_between_layers(corpus, tmp_path):
    parts, config = models(tmp_path, "llama"), settings("fp32")
    common = {"config": config, "shard": 0, "streamed": tmp_path / "folder"}
    out = tmp_path / "streamed"
    with ThreadPoolExecutor(1, initializer=without_fallocate) as filtered:
        with pytest.raises(OSError, match="Bad file"), (tmp_path / "file").open("ab") as file:
            filtered.submit(os.posix_fallocate, file.fileno(), 0, 8).result()
        with pytest.raises(KeyboardInterrupt):
            filtered.submit(
                domain_statistics, *parts, corpus, out, progress=KilledAt(7), **common
            ).result()
        filtered.submit(domain_statistics, *parts, corpus, out, **common).result()
    domain_statistics(*parts, corpus, tmp_path / "whole", config=config, shard=0)
    assert_same(out, tmp_path / "whole")
