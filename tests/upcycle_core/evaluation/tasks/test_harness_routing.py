"""A MoE on tasks with other routers, another k, or one expert alone."""

import shutil
from pathlib import Path

import pytest

from tests.pico import save_pico
from upcycle_core.backbone.average import write_backbone
from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.adapter import evaluate_tasks
from upcycle_core.evaluation.tasks.config import EvaluationTask, TaskEvaluationConfig
from upcycle_core.evaluation.tasks.definitions import write_task
from upcycle_core.evaluation.text.pieces import Variant
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.random import random_routers

DOMAINS = ("law", "code")
TEXTS = {
    "law": [f"{i} WHEREAS THE PARTY OF THE FIRST PART (THE LESSOR) " * 8 for i in range(4)],
    "code": [f"for i in range({i}): print(i) # and so on " * 8 for i in range(4)],
}


class Bench:
    """Two experts, their backbone, MoEs with two draws of routers and two k, a task a domain."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.experts = {d: save_pico(folder / d, seed=i) for i, d in enumerate(DOMAINS)}
        self.backbone = folder / "backbone"
        readers = [CheckpointReader(path) for path in self.experts.values()]
        write_backbone(readers, self.backbone, max_shard_bytes=10**9)
        self.routers = [random_routers(2, 32, 2, seed=seed) for seed in (5, 6)]
        self.sets = {}
        for domain in DOMAINS:
            self.sets[domain] = folder / f"task-{domain}"
            task = EvaluationTask(heldout="text", domain=domain, items=2, metric="bits_per_byte")
            write_task(
                task,
                self.sets[domain],
                folder=None,
                root=Path("/"),
                seed=0,
                texts=lambda domain=domain: TEXTS[domain],
            )

    def moe(self, *, draw: int = 0, top_k: int = 1) -> Path:
        out = self.folder / f"moe-{draw}-{top_k}"
        if not out.exists():
            assemble(
                self.experts,
                self.backbone,
                self.routers[draw],
                out,
                top_k=top_k,
                max_shard_bytes=10**9,
            )
            copy_tokenizer(self.experts["law"], out)
        return out

    def stitched(self, domain: str) -> Path:
        out = self.folder / f"stitched-{domain}"
        load_stitched(self.backbone, self.experts[domain]).save_pretrained(out)
        copy_tokenizer(self.experts["law"], out)
        return out

    def values(self, model: Path, **how) -> dict[str, float]:
        scores, _ = evaluate_tasks(model, self.sets, config=TaskEvaluationConfig(), **how)
        return {task: score.mean for task, score in scores.items()}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    yield Bench(folder)
    shutil.rmtree(folder)


def test_the_oracle_of_a_task_is_the_dense_model_of_its_domain(bench):
    found = bench.values(bench.moe(), experts={"law": 0, "code": 1})
    for task in DOMAINS:
        dense = bench.values(bench.stitched(task))
        assert found[task] == pytest.approx(dense[task], rel=1e-6)
    # An expert that is not named leaves its task to the routers.
    half = bench.values(bench.moe(), experts={"law": 0})
    assert half["law"] == found["law"]
    assert half["code"] == bench.values(bench.moe())["code"] != found["code"]


def test_a_variant_is_the_model_that_was_saved_with_it(bench):
    saved = bench.values(bench.moe())
    other = bench.values(bench.moe(), variant=Variant(routers=bench.routers[1]))
    wider = bench.values(bench.moe(), variant=Variant(top_k=2))
    assert other == bench.values(bench.moe(draw=1)) != saved
    assert wider == bench.values(bench.moe(top_k=2)) != saved


def test_an_expert_or_a_k_that_is_not_there_is_refused(bench):
    with pytest.raises(InputError, match="expert = 2: choose 0 to 1"):
        bench.values(bench.moe(), experts={"law": 2})
    with pytest.raises(InputError, match="top_k = 3: choose 1 to 2"):
        bench.values(bench.moe(), variant=Variant(top_k=3))
