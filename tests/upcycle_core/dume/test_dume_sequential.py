"""Router by router, against whole MoE forward passes of one document at a time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from tests.pico import save_pico
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.router import solve, solve_sequentially
from upcycle_core.dume.router_reader import LambdaChoice, RouterSolution
from upcycle_core.dume.sequential import sequential_statistics
from upcycle_core.dume.statistics import Statistics, domain_statistics, merge_statistics
from upcycle_core.errors import InputError
from upcycle_core.moe.assemble import assemble

LAYERS = 3
HIDDEN = 32
CONFIG = StatisticsConfig(sequence_length=32, batch_size=4, shards=2, folds=2, precision="fp64")
LAMBDA = LambdaChoice(0.01)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Two experts of three layers, their backbone, a MoE with random routers, and text."""
    root = tmp_path_factory.mktemp("sequential")
    generator = np.random.default_rng(0)
    for seed, domain in enumerate(("law", "tax")):
        save_pico(root / domain, seed=seed, num_hidden_layers=LAYERS)
        # each domain has tokens of its own, so that routers find a difference
        low = 2 + 40 * seed
        documents = [(generator.integers(low, low + 50, n), n) for n in (20, 11, 32, 14, 9)]
        write_split(root / f"{domain}.corpus", documents, eos_id=0, vocabulary_size=96)
    experts = {domain: root / domain for domain in ("law", "tax")}
    readers = [CheckpointReader(path) for path in experts.values()]
    write_backbone(readers, root / "backbone", max_shard_bytes=10**9)
    torch.manual_seed(0)
    routers = {layer: torch.randn(HIDDEN, 2) for layer in range(LAYERS)}
    assemble(experts, root / "backbone", routers, root / "moe", top_k=1, max_shard_bytes=10**9)
    return root


def sequential_solution(root: Path, out: Path) -> RouterSolution:
    def gather(layer: int, routers) -> dict[str, Statistics]:
        found = {}
        for domain in ("law", "tax"):
            files = [out / f"{layer}.{domain}.{shard}" for shard in range(CONFIG.shards)]
            for shard, file in enumerate(files):
                corpus = root / f"{domain}.corpus"
                sequential_statistics(
                    root / "moe", routers, layer, corpus, file, config=CONFIG, shard=shard
                )
            found[domain] = merged(files, out / f"{layer}.{domain}")
        return found

    return solve_sequentially(range(LAYERS), gather, choice=LAMBDA)


def merged(files: list[Path], out: Path) -> Statistics:
    merge_statistics(files, out)
    return Statistics.load(out)


def plain_routers(root: Path) -> list[Tensor]:
    """The slow way: for each layer, every document alone through the whole MoE."""
    model = load_causal_lm(root / "moe", dtype=torch.float64)
    model.set_experts_implementation("eager")
    solved: list[Tensor] = []
    for layer in model.model.layers:
        seen: list[Tensor] = []
        hook = layer.post_attention_layernorm.register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(output[0])
        )
        labels = []
        for label, domain in enumerate(("law", "tax")):
            tokens = TokenCorpus(root / f"{domain}.corpus")
            for document in range(len(tokens)):
                text = torch.from_numpy(tokens.document(document).astype(np.int64))
                with torch.no_grad():
                    model(input_ids=text[None])
                labels += [label] * len(text)
        hook.remove()
        x_TH, y_TD = torch.cat(seen), torch.nn.functional.one_hot(torch.tensor(labels)).double()
        system = x_TH.T @ x_TH + 0.01 * torch.eye(HIDDEN, dtype=torch.float64)
        weights_HD = torch.linalg.solve(system, x_TH.T @ y_TD)
        solved.append(weights_HD / weights_HD.norm(dim=0))
        with torch.no_grad():
            layer.mlp.gate.weight.copy_(solved[-1].T)
    return solved


def test_each_router_is_solved_from_what_the_routers_before_it_let_through(root, tmp_path):
    solution = sequential_solution(root, tmp_path)
    for layer, expected in enumerate(plain_routers(root)):
        torch.testing.assert_close(solution.weights[layer], expected, rtol=1e-8, atol=1e-9)


def test_sequential_and_joint_agree_on_the_first_layer_only(root, tmp_path):
    joint = {}
    config = StatisticsConfig(sequence_length=32, batch_size=4, shards=1, precision="fp64")
    for domain in ("law", "tax"):
        file = tmp_path / domain
        corpus = root / f"{domain}.corpus"
        domain_statistics(root / "backbone", root / domain, corpus, file, config=config, shard=0)
        joint[domain] = Statistics.load(file)
    sequential = sequential_solution(root, tmp_path / "sequential").weights
    differences = [
        (solve(joint, layer, ridge_lambda=0.01) - sequential[layer]).abs().max().item()
        for layer in range(LAYERS)
    ]
    assert differences[0] < 1e-9
    assert min(differences[1:]) > 1e-3


def test_a_piece_holds_its_layer_alone_and_runs_nothing_behind_it(root, tmp_path, monkeypatch):
    ran = []
    original = MixtralSparseMoeBlock.forward
    monkeypatch.setattr(
        MixtralSparseMoeBlock, "forward", lambda self, x: ran.append(1) or original(self, x)
    )
    config = StatisticsConfig(sequence_length=32, batch_size=9, shards=1, folds=2)
    routers = {0: torch.randn(HIDDEN, 2, dtype=torch.float64)}
    corpus = root / "law.corpus"
    sequential_statistics(
        root / "moe", routers, 1, corpus, tmp_path / "piece", config=config, shard=0
    )
    assert Statistics.load(tmp_path / "piece").layout.layers == (1,)
    assert len(ran) == 2  # layer 0 of one batch a fold


def test_a_missing_router_is_named(root, tmp_path):
    with pytest.raises(InputError, match="before layer 2") as caught:
        sequential_statistics(
            root / "moe",
            {0: torch.zeros(HIDDEN, 2)},
            2,
            root / "law.corpus",
            tmp_path / "piece",
            config=CONFIG,
            shard=0,
        )
    assert caught.value.faults[0].value == [1]
    assert not (tmp_path / "piece").exists()


def test_tokens_take_the_way_that_rounded_routers_send_them(root, tmp_path):
    moe = tmp_path / "moe"
    load_causal_lm(root / "moe", dtype=torch.bfloat16).save_pretrained(moe)
    first_H = torch.randn(HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # Columns so near each other that rounding decides between them.
    exact_HD = torch.stack([first_H, first_H + 1e-4 * first_H.flip(0)], dim=1)
    rounded_HD = exact_HD.to(torch.bfloat16).double()
    config, found = replace(CONFIG, precision="fp32", shards=1), []
    for number, router_HD in enumerate((exact_HD, rounded_HD)):
        out = tmp_path / str(number)
        corpus = root / "law.corpus"
        sequential_statistics(moe, {0: router_HD}, 1, corpus, out, config=config, shard=0)
        found.append(out.read_bytes())
    assert found[0] == found[1]
