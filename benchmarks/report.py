"""The stage `report` with four domains and with sixteen, first and after one expert has changed.

    python -m benchmarks.report [--tokens N] [--repeats N]

Experts of pico shape with random weights, their backbone, a MoE of them and held-out texts are
published in workspaces, and the stage runs on a Ray of one worker. Counted are passes, a model or a
variant of one through a domain's text, and the CPU time of the worker, which has run a report
before: its imports are not in it. In the night after, one expert is another, and with it routers
and MoE; the backbone is pinned. `sixteen, all` is the report with all cross scores and three draws
of random routing, whatever the domains: D^2 + 6 D passes. `own rows` is a night that scores what a
gate reads, experts on their own text and the MoE (`evaluation.rows: []`, `cross_scores: own`).
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.children import ROOT
from benchmarks.common import median, parser_of, print_result, print_table
from benchmarks.models import SHARD, save_word_tokenizer
from infra import settings as environment
from infra.cluster.compute import cluster
from infra.cluster.pieces import Piece
from tasks.dume.report import report
from tasks.engine import stage_run
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import validate
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.load import quiet_loading
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.router import save_routers
from upcycle_core.dume.router_reader import LambdaChoice, RouterSolution
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LENGTH = 64
ALL = {"cross_scores": "all", "random_routing_seeds": [0, 1, 2]}
OWN: dict[str, Any] = {"rows": [], "cross_scores": "own"}
GOALS = {"16 / 4": 4.5, "night of own rows / first": 0.15}


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("--tokens", type=int, default=4096, help="of a domain's held-out text")
    options = parser.parse_args()
    settings = environment.configure()
    runs: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="report-") as name, cluster(settings, 1, ROOT):
        Reported(Path(name, "warm-up"), 2, options.tokens).run()
        for number in range(options.repeats):
            runs.append(measured(Path(name, str(number)), options.tokens, 100 * number))
    first = runs[0]
    figures = {
        kind: {row: median([run[row][kind] for run in runs]) for row in first}
        for kind in ("passes", "cpu_s")
    }
    columns = ["report", "passes", "CPU s"]
    rows = [[row, figures["passes"][row], figures["cpu_s"][row]] for row in first]
    print_table("the stage report's pieces", columns, rows)
    ratios = {}
    for kind, own in figures.items():
        ratios[f"16 / 4, {kind}"] = own["sixteen"] / own["four"]
        ratios[f"night / first of 16, {kind}"] = own["sixteen, one changed"] / own["sixteen"]
        ratios[f"night of own rows / first of 16, {kind}"] = (
            own["sixteen, one changed, own rows"] / own["sixteen"]
        )
        ratios[f"night / all of 16, {kind}"] = own["sixteen, one changed"] / own["sixteen, all"]
        ratios[f"all of 16 / 4, {kind}"] = own["sixteen, all"] / own["four"]
    print_result(
        "report", ratios, {"goal": {"at_most": GOALS}, "tokens": options.tokens, **figures}
    )


def measured(folder: Path, tokens: int, seed: int) -> dict[str, dict[str, float]]:
    """Passes and CPU seconds of each report."""
    rows = {"four": Reported(folder / "four", 4, tokens, seed=seed).run()}
    sixteen = Reported(folder / "sixteen", 16, tokens, seed=seed)
    rows["sixteen"] = sixteen.run()
    sixteen.make_expert("d00", seed=seed + 50)
    sixteen.join(pinned=True)
    rows["sixteen, one changed"] = sixteen.run()
    sixteen.values["evaluation"] |= OWN
    sixteen.make_expert("d00", seed=seed + 60)
    sixteen.join(pinned=True)
    rows["sixteen, one changed, own rows"] = sixteen.run()
    every = Reported(folder / "all", 16, tokens, seed=seed, evaluation=ALL)
    rows["sixteen, all"] = every.run()
    return rows


class Reported:
    """A workspace with all that the stage reads, and the stage.

    Args:
        folder: The workspace's.
        domains: How many.
        tokens: Of each held-out text.
        seed: Of the first expert's weights.
        evaluation: What the recipe says of it.
    """

    def __init__(
        self,
        folder: Path,
        domains: int,
        tokens: int,
        *,
        seed: int = 0,
        evaluation: Mapping[str, Any] | None = None,
    ) -> None:
        self.workspace = Workspace(folder)
        self.names = [f"d{number:02}" for number in range(domains)]
        self.values: dict[str, Any] = {
            "name": "reported",
            "domains": {
                name: {"expert": name, **dict.fromkeys(("calibration", "heldout"), text(name))}
                for name in self.names
            },
            "evaluation": {"sequence_length": LENGTH, "batch_size": 8, **(evaluation or {})},
            "compute": {"cpus": 1},
        }
        for number, name in enumerate(self.names):
            self.make_expert(name, seed=seed + number)
            self._make_text(name, tokens, seed=number)
        self.join()

    def run(self) -> dict[str, float]:
        """Ensure the stage; returns how many passes and CPU seconds its pieces took."""
        session = Session(validate(self.values), self.workspace, log=lambda line: None)
        before = worker_seconds()
        with counted_passes() as pieces:
            report.ensure(session)
        after = worker_seconds()
        if before and before.keys() != after.keys():
            raise RuntimeError("another worker was started, and its imports are in the figures")
        return {
            "passes": sum(map(passes, pieces)),
            "cpu_s": sum(after.values()) - sum(before.values()),
        }

    def make_expert(self, name: str, *, seed: int) -> None:
        """Publish a domain's expert."""
        torch.manual_seed(seed)
        with self._published(f"experts/{name}") as folder, quiet_loading():
            LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
            save_word_tokenizer(folder, words=SHAPE["vocab_size"])

    def join(self, *, pinned: bool = False) -> None:
        """Publish what is made of the experts there are; a pinned backbone stays."""
        experts = {name: self.workspace.path(f"experts/{name}") for name in self.names}
        if not pinned:
            self._average([CheckpointReader(path) for path in experts.values()])
        layers, size = SHAPE["num_hidden_layers"], SHAPE["hidden_size"]
        routers = random_routers(layers, size, len(experts), seed=len(experts))
        solution = RouterSolution(routers, tuple(experts), LambdaChoice(1.0))
        with self._published("router") as folder:
            save_routers(solution, folder / "router.safetensors")
        backbone = self.workspace.path("backbone")
        with self._published("model") as folder:
            assemble(experts, backbone, routers, folder, top_k=1, max_shard_bytes=SHARD)

    def _average(self, readers: Sequence[CheckpointReader]) -> None:
        with self._published("backbone") as folder:
            write_backbone(readers, folder / "whole", max_shard_bytes=SHARD)
            for file in (folder / "whole").iterdir():
                file.rename(folder / file.name)
            (folder / "whole").rmdir()

    def _make_text(self, name: str, tokens: int, *, seed: int) -> None:
        draw = np.random.default_rng(seed)
        vocabulary = SHAPE["vocab_size"]
        documents = [
            (draw.integers(1, vocabulary, 2 * LENGTH).tolist(), 6 * LENGTH)
            for _ in range(tokens // (2 * LENGTH))
        ]
        with self._published(f"corpora/{name}") as folder:
            write_split(folder / "heldout", documents, eos_id=0, vocabulary_size=vocabulary)

    @contextmanager
    def _published(self, artifact: str) -> Iterator[Path]:
        staged = self.workspace.stage(artifact)
        yield staged
        self.workspace.publish(staged, artifact, {"inputs": {}, "params": {}, "fingerprint": ""})


def text(name: str) -> dict[str, list[str]]:
    """A text as a recipe names it; nobody reads its file."""
    return {"files": [f"{name}.txt"]}


def passes(piece: Piece) -> int:
    """How often a text goes through a model in a piece."""
    return len(piece.arguments["corpora"]) * len(piece.arguments.get("variants", [""]))


@contextmanager
def counted_passes() -> Iterator[list[Piece]]:
    """The pieces that stages hand to Ray meanwhile."""
    asked: list[Piece] = []
    run_pieces = stage_run.run_pieces

    def counting(pieces: Sequence[Piece], **how: Any) -> Any:
        asked.extend(pieces)
        return run_pieces(pieces, **how)

    with mock.patch.object(stage_run, "run_pieces", counting):
        yield asked


def worker_seconds() -> dict[int, float]:
    """{Ray's worker process: its CPU seconds}."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        name = " ".join(process.cmdline())
        if name.startswith("ray::") and "Agent" not in name:  # Ray's own
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


if __name__ == "__main__":
    main()
