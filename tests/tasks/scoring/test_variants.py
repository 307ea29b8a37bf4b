"""Variants of one MoE: it is loaded once, and a kill costs no more than the one at work."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from infra.cluster.memory import Room
from tasks.dume import variants
from tasks.dume.variants import Drawn, Saved, variants_piece
from tests.pico import save_pico
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.router import save_routers
from upcycle_core.dume.router_reader import LambdaChoice, RouterSolution
from upcycle_core.evaluation.text import pieces
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import Variant, evaluate_checkpoint, evaluate_moe
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers
from upcycle_core.progress import Silent

CONFIG = EvaluationConfig(sequence_length=16, batch_size=2)


class Watching(Silent):
    """Progress that keeps what began, and ends when ``until`` does."""

    def __init__(self, until=""):
        self.began, self._until = [], until

    def start(self, what, total, unit="steps"):
        self.began.append(what)
        if self._until and self._until in what:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A MoE of two, the file of its routers, and a text of each domain."""
    root = tmp_path_factory.mktemp("moe")
    experts = {name: save_pico(root / name, seed=n) for n, name in enumerate("ab")}
    readers = [CheckpointReader(path) for path in experts.values()]
    write_backbone(readers, root / "backbone", max_shard_bytes=10**9)
    routers = random_routers(2, 32, 2, seed=7)
    save_routers(RouterSolution(routers, ("a", "b"), LambdaChoice(1.0)), root / "router")
    assemble(experts, root / "backbone", routers, root / "moe", top_k=1, max_shard_bytes=10**9)
    draw = np.random.default_rng(0)
    for name in experts:
        texts = [(draw.integers(2, 96, n).tolist(), n) for n in (30, 9, 17)]
        write_split(root / f"text-{name}", texts, eos_id=0, vocabulary_size=96)
    return root


@pytest.fixture
def call(root, tmp_path):
    asked = {"dume": Saved(root / "router"), **{f"random-{s}": Drawn(s, 2) for s in (0, 1)}}
    common = {"model": root / "moe", "variants": asked, "config": CONFIG, "device": "cpu"}
    corpora = {name: root / f"text-{name}" for name in "ab"}

    def call(progress, **more):
        out = tmp_path / "moe.partial"
        return variants_piece(out=out, progress=progress, corpora=corpora, **common, **more)

    call.corpora = corpora
    return call


@pytest.fixture
def loads(monkeypatch):
    """How often a model was loaded."""
    load, loaded = pieces.load_scored, []

    def counting(*arguments):
        loaded.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(pieces, "load_scored", counting)
    return loaded


def test_variants_are_scored_with_one_load_as_each_by_itself(root, call, loads, tmp_path):
    found = call(Silent())
    assert len(loads) == 1
    assert not list(tmp_path.iterdir())
    routers = {f"random-{seed}": random_routers(2, 32, 2, seed=seed) for seed in (0, 1)}
    for name, own in {"dume": random_routers(2, 32, 2, seed=7), **routers}.items():
        alone = evaluate_moe(root / "moe", {"": Variant(routers=own)}, call.corpora, config=CONFIG)
        assert found[name] == alone[""]
    assert len({found[name]["scores"]["a"]["nll"] for name in found}) == 3


def test_variants_that_go_layer_by_layer_are_the_same(call, loads, tmp_path):
    room, progress = Room(streamed="always", cpus=1, gpus=0.0, machine_cpus=1), Watching()
    assert call(progress, room=room) == call(Silent())
    assert [what.endswith("layer by layer") for what in progress.began] == [True]
    assert len(loads) == 1  # of the model that is held
    assert not list(tmp_path.iterdir())


def halved(directory, seed):
    """A model whose weights are bf16."""
    model = AutoModelForCausalLM.from_pretrained(save_pico(directory, seed=seed))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def assemble_from(experts, folder, seed, **options):
    """The MoE with the routers of a draw, wholly in the type of its files."""
    out, routers = folder / f"moe-{seed}", random_routers(2, 32, 2, seed=seed)
    if not out.exists():
        assemble(experts, folder / "backbone", routers, out, **options)
    return out


def test_routers_are_scored_as_the_checkpoint_holds_them(root, call, tmp_path):
    experts = {name: halved(tmp_path / name, n) for n, name in enumerate("ab")}
    readers = [CheckpointReader(path) for path in experts.values()]
    write_backbone(readers, tmp_path / "backbone", max_shard_bytes=10**9)
    options = {"top_k": 2, "max_shard_bytes": 10**9}
    asked = {"dume": Saved(root / "router"), "random-3": Drawn(3, 2)}
    found = variants_piece(
        out=tmp_path / "moe.partial",
        progress=Silent(),
        model=assemble_from(experts, tmp_path, 7, **options),
        variants=asked,
        corpora=call.corpora,
        config=CONFIG,
        device="cpu",
    )
    for name, seed in (("dume", 7), ("random-3", 3)):
        own = assemble_from(experts, tmp_path, seed, **options)
        expected = evaluate_checkpoint(own, call.corpora, config=CONFIG)
        assert found[name]["scores"] == expected


def test_a_killed_piece_goes_on_at_the_variant_that_was_at_work(call, tmp_path):
    whole = Watching()
    expected = call(whole)
    killed, again = Watching(until="random-1 on b"), Watching()
    with pytest.raises(KeyboardInterrupt):
        call(killed)
    assert call(again) == expected
    assert list(expected) == ["dume", "random-0", "random-1"]
    assert again.began == whole.began[-2:]
    assert not list(tmp_path.iterdir())


def test_a_damaged_row_is_scored_anew(call, tmp_path):
    expected = call(Silent())
    with pytest.raises(KeyboardInterrupt):
        call(Watching(until="random-1 on a"))
    row = tmp_path / "moe.partial.rows" / "dume.json"
    row.write_text(row.read_text().replace('"tokens": ', '"tokens": 9', 1))
    again = Watching()
    assert call(again) == expected
    assert sum("dume on" in what for what in again.began) == 2


def test_everything_scored_before_a_kill_needs_no_model(call, loads, tmp_path, monkeypatch):
    expected = call(Silent())
    loads.clear()
    monkeypatch.setattr(variants.shutil, "rmtree", lambda path: None)
    call(Silent())
    assert call(Silent()) == expected
    assert len(loads) == 1
