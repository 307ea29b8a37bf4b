"""The statistics pass, against documents forwarded one by one through the whole dense model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pico import save_pico
from upcycle_core.activations.moments import Moments
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.batches import Batch
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.collect import Layout, collect
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.statistics import (
    Statistics,
    domain_statistics,
    merge_statistics,
    save_statistics,
)
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent

LENGTHS = (30, 9, 17, 24, 8, 12, 31, 21, 10)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """An averaged backbone and one of its experts."""
    root = tmp_path_factory.mktemp("models")
    experts = [save_pico(root / f"expert{seed}", seed=seed) for seed in range(2)]
    write_backbone([CheckpointReader(e) for e in experts], root / "backbone", max_shard_bytes=10**9)
    return root / "backbone", experts[1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    generator = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("corpora") / "calibration"
    documents = [(generator.integers(2, 96, length), length) for length in LENGTHS]
    write_split(directory, documents, eos_id=0, vocabulary_size=96)
    return directory


def compute(models, corpus, out: Path, **settings) -> Statistics:
    """All shards, merged."""
    fields = {"sequence_length": 16, "batch_size": 4, "precision": "fp64", **settings}
    config = StatisticsConfig(**fields)
    files = [out / f"shard{shard}" for shard in range(config.shards)]
    for shard, file in enumerate(files):
        domain_statistics(*models, corpus, file, config=config, shard=shard)
    merge_statistics(files, out / "merged")
    return Statistics.load(out / "merged")


def plain_features(models, corpus: Path, layer: int, length: int = 16) -> Iterator[tuple]:
    """(document, router inputs [S, H]) of each paragraph: no batch, no padding, no shortcut."""
    model = load_stitched(*models, dtype=torch.float64)
    seen: list[Tensor] = []
    norm = model.model.layers[layer].post_attention_layernorm
    norm.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    tokens = TokenCorpus(corpus)
    for document in range(len(tokens)):
        text = torch.from_numpy(tokens.document(document).astype(np.int64))
        for paragraph in text.split(length):
            if len(paragraph) >= 8:
                with torch.no_grad():
                    model(input_ids=paragraph[None])
                yield document, seen.pop()


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert found.dtype == torch.float64
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("layer", [0, 1])
def test_statistics_are_sums_over_every_documents_router_inputs(models, corpus, tmp_path, layer):
    statistics = compute(models, corpus, tmp_path)
    x_TH = torch.cat([x for _, x in plain_features(models, corpus, layer)])
    assert statistics.layout.layers == (0, 1)
    assert statistics.moments(layer).count() == len(x_TH)
    assert_equal(statistics.moments(layer).gram(), x_TH.T @ x_TH)
    assert_equal(statistics.moments(layer).sum(), x_TH.sum(0))


def test_responses_alone_are_counted_of_all_that_is_forwarded(models, tmp_path):
    draw = np.random.default_rng(1)
    documents = [(draw.integers(2, 96, n), n, (draw.random(n) < 0.4).tolist()) for n in LENGTHS]
    write_split(tmp_path / "chats", documents, eos_id=0, vocabulary_size=96)
    statistics = compute(models, tmp_path / "chats", tmp_path, count="responses")
    paragraphs = [
        torch.tensor(marks[start : start + 16])
        for _, _, marks in documents
        for start in range(0, len(marks), 16)
        if len(marks) - start >= 8
    ]
    features = [x for _, x in plain_features(models, tmp_path / "chats", 1)]
    x_TH = torch.cat([x[marks] for x, marks in zip(features, paragraphs, strict=True)])
    moments = statistics.moments(1)
    assert moments.count() == len(x_TH) < sum(LENGTHS) / 2
    assert_equal(moments.gram(), x_TH.T @ x_TH)
    assert_equal(moments.sum(), x_TH.sum(0))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lower_precision_is_close(models, corpus, tmp_path, precision):
    exact = compute(models, corpus, tmp_path / "fp64")
    found = compute(models, corpus, tmp_path / precision, precision=precision)
    # bf16 weights and states have 8 bits
    tolerance = {"fp32": 1e-5, "bf16": 0.05}[precision]
    assert found.moments(0).count() == exact.moments(0).count()
    assert_equal(found.moments(1).gram(), exact.moments(1).gram(), tolerance)
    assert not torch.equal(found.moments(1).gram(), exact.moments(1).gram())


def test_batching_and_padding_do_not_change_the_sums(models, corpus, tmp_path):
    one = compute(models, corpus, tmp_path / "one", batch_size=1, shards=1)
    for batch_size, shards in ((3, 1), (9, 2), (32, 1)):
        out = tmp_path / f"{batch_size}-{shards}"
        other = compute(models, corpus, out, batch_size=batch_size, shards=shards)
        for layer in (0, 1):
            assert_equal(other.moments(layer).gram(), one.moments(layer).gram())
            assert_equal(other.moments(layer).sum(), one.moments(layer).sum())
        assert other.moments(0).count() == one.moments(0).count()


@pytest.mark.parametrize("pad_id", [1, 77])
def test_padding_is_never_counted_whatever_it_holds(models, corpus, pad_id):
    model = load_stitched(*models, headless=True, dtype=torch.float64)
    tokens = TokenCorpus(corpus)
    texts = [torch.from_numpy(tokens.document(d)[:16].astype(np.int64)) for d in range(4)]
    layout = Layout(32, (0, 1), 1)
    batches = []
    for width in (16, 40):
        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.full((len(texts), width), pad_id)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        mask = (torch.arange(width) < lengths[:, None]).long()
        batches.append(Batch(ids, mask, lengths, torch.arange(4), 0))
    short, long = (
        collect(model, [batch], layout, device="cpu", progress=Silent()) for batch in batches
    )
    for layer in (0, 1):
        assert long[layer].count() == sum(len(text) for text in texts)
        assert_equal(long[layer].gram(), short[layer].gram())


def test_folds_hold_whole_documents(models, corpus, tmp_path):
    statistics = compute(models, corpus, tmp_path, folds=3)
    paragraphs = list(plain_features(models, corpus, 1))
    for fold in range(3):
        x_TH = torch.cat([x for document, x in paragraphs if document % 3 == fold])
        assert statistics.moments(0, folds=[fold]).count() == len(x_TH)
        assert_equal(statistics.moments(1, folds=[fold]).gram(), x_TH.T @ x_TH)


def test_position_buckets_nest(models, corpus, tmp_path):
    statistics = compute(models, corpus, tmp_path, folds=2, position_buckets=(1, 4, 12))
    paragraphs = list(plain_features(models, corpus, 1))
    for window in (1, 4, 12, None):
        x_TH = torch.cat([x[:window] for _, x in paragraphs])
        assert statistics.moments(0, window=window).count() == len(x_TH)
        assert_equal(statistics.moments(1, window=window).gram(), x_TH.T @ x_TH)
        assert_equal(statistics.moments(1, window=window).sum(), x_TH.sum(0))
        odd = torch.cat([x[:window] for document, x in paragraphs if document % 2])
        assert_equal(statistics.moments(1, window=window, folds=[1]).gram(), odd.T @ odd)


def test_a_window_cut_before_the_forward_equals_a_bucket_read_after(models, corpus, tmp_path):
    cut = compute(models, corpus, tmp_path / "cut", window=4)
    read = compute(models, corpus, tmp_path / "read", position_buckets=(4,))
    assert cut.moments(0).count() == read.moments(0, window=4).count() < read.moments(0).count()
    assert_equal(cut.moments(1).gram(), read.moments(1, window=4).gram())


def test_a_window_that_was_not_kept_apart_is_refused(models, corpus, tmp_path):
    statistics = compute(models, corpus, tmp_path, position_buckets=(4,))
    with pytest.raises(InputError, match=r"\[4\]"):
        statistics.moments(0, window=5).gram()


def test_calibration_tokens_are_limited_over_all_shards(models, corpus, tmp_path):
    statistics = compute(models, corpus, tmp_path, tokens=48, shards=3)
    assert 48 <= statistics.moments(0).count() < 48 + 16


def test_a_piece_is_the_same_bytes_every_time(models, corpus, tmp_path):
    config = StatisticsConfig(sequence_length=16, batch_size=4)
    files = [tmp_path / "one", tmp_path / "two"]
    for file in files:
        domain_statistics(*models, corpus, file, config=config, shard=1)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_forward_pass_has_no_lm_head_and_no_last_mlp(models, corpus, tmp_path, monkeypatch):
    ran = []
    original = torch.nn.Linear.forward

    def watched(self, x):
        ran.append(tuple(self.weight.shape))
        return original(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)
    compute(models, corpus, tmp_path, shards=1, folds=2, batch_size=100)
    batches = 2  # one a fold
    assert ran.count((96, 32)) == 0  # lm_head
    assert ran.count((32, 48)) == batches  # down_proj of the first layer only
    assert ran.count((16, 32)) == batches * 2 * 2  # k_proj and v_proj of both


def test_a_domain_without_text_gives_zero_counts(models, tmp_path):
    write_split(tmp_path / "empty", [], eos_id=0, vocabulary_size=96)
    statistics = compute(models, tmp_path / "empty", tmp_path)
    assert statistics.moments(0).count() == 0
    assert not statistics.moments(0).gram().any()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    layout = Layout(4, (0,), 1)
    old, new = Moments(4), Moments(4)
    new.update(torch.ones(3, 4))
    path = tmp_path / "statistics.safetensors"
    save_statistics(path, layout, {0: old})
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("upcycle_core.checkpoints.writer.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_statistics(path, layout, {0: new})
    assert path.read_bytes() == before


def test_merging_adds_in_the_order_given(tmp_path):
    # 1e16 + 1 is 1e16 in fp64, so the order can be read off the result
    layout = Layout(1, (0,), 1)
    files = []
    for index, value in enumerate((1e8, 1.0, 1.0)):
        moments = Moments(1)
        moments.update(torch.tensor([[value]], dtype=torch.float64))
        files.append(tmp_path / str(index))
        save_statistics(files[-1], layout, {0: moments})
    merge_statistics(files, tmp_path / "large-first")
    merge_statistics(files[::-1], tmp_path / "large-last")
    assert Statistics.load(tmp_path / "large-first").moments(0).gram().item() == 1e16
    assert Statistics.load(tmp_path / "large-last").moments(0).gram().item() == 1e16 + 2
    assert Statistics.load(tmp_path / "large-last").moments(0).count() == 3


def test_shards_that_keep_different_things_apart_are_not_merged(tmp_path):
    for name, folds in (("a", 1), ("b", 2)):
        save_statistics(tmp_path / name, Layout(4, (0,), folds), {0: Moments(4, cells=folds)})
    with pytest.raises(InputError, match="compute it again"):
        merge_statistics([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
