"""Scores and routing layer by layer are those of the model that is held, to the last bit."""

import shutil
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.pico import save_pico
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import (
    Variant,
    evaluate_checkpoint,
    evaluate_moe,
    evaluate_own_experts,
    evaluate_stitched,
)
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers
from upcycle_core.progress import Silent

DOMAINS = {"law": 0, "code": 1}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("corpora")
    for domain, seed in DOMAINS.items():
        generator = np.random.default_rng(seed)
        texts = [(generator.integers(2, 96, n), n) for n in (30, 9, 17, 24, 8, 12)]
        write_split(root / domain, texts, eos_id=0, vocabulary_size=96)
    return {domain: root / domain for domain in DOMAINS}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """{family: folder} of two experts, their backbone and their MoE, made when asked for."""
    folders: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in folders:
            root = folders[family] = tmp_path_factory.mktemp(family)
            tied = {"tie_word_embeddings": family == "qwen2"}
            experts = {d: save_pico(root / d, family, seed=n, **tied) for d, n in DOMAINS.items()}
            readers = [CheckpointReader(path) for path in experts.values()]
            write_backbone(readers, root / "backbone", max_shard_bytes=10**9)
            routers = {n: 20 * w for n, w in random_routers(2, 32, 2, seed=0).items()}
            settings = {"top_k": 1, "max_shard_bytes": 10**9}
            assemble(experts, root / "backbone", routers, root / "moe", **settings)
        return folders[family]

    return build


def config(precision: str = "fp32") -> EvaluationConfig:
    return EvaluationConfig(sequence_length=16, batch_size=4, precision=precision)


@pytest.mark.parametrize(("family", "precision"), [*zip(FAMILIES, cycle(("fp32", "bf16")))])
def test_a_moe_is_scored_layer_by_layer(family, precision, built, corpora, tmp_path):
    moe, folder = built(family) / "moe", tmp_path / "folder"
    drawn = random_routers(2, 32, 2, seed=3)
    variants = {"saved": Variant(), "drawn": Variant(routers=drawn), "both": Variant(top_k=2)}
    whole = evaluate_moe(moe, variants, corpora, config=config(precision))
    assert evaluate_moe(moe, variants, corpora, config=config(precision), streamed=folder) == whole
    assert whole["saved"] != whole["drawn"]
    assert whole["saved"]["scores"] != whole["both"]["scores"]
    assert not folder.exists()


@pytest.mark.parametrize("family", ["llama", "qwen2", "ernie4_5"])
def test_dense_models_and_forced_experts_too(family, built, corpora, tmp_path):
    root, common = built(family), {"config": config()}
    streamed = {"streamed": tmp_path / "folder"}
    dense = evaluate_checkpoint(root / "law", corpora, **common)
    assert evaluate_checkpoint(root / "law", corpora, **common, **streamed) == dense
    parts = (root / "backbone", root / "code", corpora)
    assert evaluate_stitched(*parts, **common, **streamed) == evaluate_stitched(*parts, **common)
    own = evaluate_own_experts(root / "moe", DOMAINS, corpora, **common)
    assert evaluate_own_experts(root / "moe", DOMAINS, corpora, **common, **streamed) == own


class Watching(Silent):
    """Progress that says what began, and may end it after so many batches."""

    def __init__(self, batches: int | None = None) -> None:
        self.began: list[str] = []
        self.left, self.passed = batches, 0

    def start(self, what: str, total: int, unit: str = "steps") -> None:
        self.began.append(what)

    def advance(self, amount: int = 1, **shown: float) -> None:
        self.passed += 1
        if self.passed == self.left:
            raise KeyboardInterrupt


def test_a_killed_scoring_goes_on_at_its_layer(built, corpora, tmp_path):
    moe, folder = built("qwen3") / "moe", tmp_path / "folder"
    whole = evaluate_moe(moe, {"saved": Variant()}, corpora, config=config())
    common = {"config": config(), "streamed": folder}
    with pytest.raises(KeyboardInterrupt):
        evaluate_moe(moe, {"saved": Variant()}, corpora, progress=Watching(6), **common)
    again = Watching()
    assert evaluate_moe(moe, {"saved": Variant()}, corpora, progress=again, **common) == whole
    assert again.passed == 4  # batches of the second layer


def write_texts(folder: Path, seed: int) -> dict[str, Path]:
    """One text of six documents, whose lengths do not depend on the seed."""
    generator = np.random.default_rng(seed)
    texts = [(generator.integers(2, 96, n), n) for n in (30, 9, 17, 24, 8, 12)]
    write_split(folder, texts, eos_id=0, vocabulary_size=96)
    return {"law": folder}


def other_routers(moe: Path, text: Path) -> dict[str, Variant]:
    return {"saved": Variant(routers=random_routers(2, 32, 2, seed=3))}


def other_k(moe: Path, text: Path) -> dict[str, Variant]:
    return {"saved": Variant(top_k=2)}


def other_weights(moe: Path, text: Path) -> dict[str, Variant]:
    [file] = moe.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.input_layernorm.weight"
    save_file(tensors | {name: 2 * tensors[name]}, file, {"format": "pt"})
    return {"saved": Variant()}


def other_text(moe: Path, text: Path) -> dict[str, Variant]:
    shutil.rmtree(text)
    write_texts(text, seed=8)
    return {"saved": Variant()}


@pytest.mark.parametrize("change", [other_routers, other_k, other_weights, other_text])
def test_what_lies_there_of_another_call_is_left_aside(change, built, tmp_path):
    """Though the places and all shapes are the same."""
    moe = shutil.copytree(built("llama") / "moe", tmp_path / "moe")
    (moe / "checksums.json").unlink(missing_ok=True)  # the weights are changed on purpose
    common = {"config": config(), "streamed": tmp_path / "folder"}
    text = write_texts(tmp_path / "text", seed=7)
    with pytest.raises(KeyboardInterrupt):
        evaluate_moe(moe, {"saved": Variant()}, text, progress=Watching(3), **common)
    variants = change(moe, tmp_path / "text")
    found = evaluate_moe(moe, variants, text, **common)
    assert found == evaluate_moe(moe, variants, text, config=config())


def test_another_model_does_not_take_what_was_left(built, corpora, tmp_path):
    root, folder = built("llama"), tmp_path / "folder"
    common = {"config": config(), "streamed": folder}
    with pytest.raises(KeyboardInterrupt):
        evaluate_checkpoint(root / "law", corpora, progress=Watching(6), **common)
    found = evaluate_checkpoint(root / "code", corpora, **common)
    assert found == evaluate_checkpoint(root / "code", corpora, config=config())
