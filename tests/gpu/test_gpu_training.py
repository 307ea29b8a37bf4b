"""Trainings on a GPU, against the same on the CPU: every method, both precisions, resumed."""

import shutil
from dataclasses import replace

import pytest
import torch

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import join
from tests.upcycle_core.training.dividing import train_any
from tests.upcycle_core.training.runs import AnswerRows, RandomRows, settings
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.upcycle import write_ders_upcycling
from upcycle_core.evaluation.instructions.answers import answer
from upcycle_core.progress import Silent
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.train import train_simoe
from upcycle_core.training.config import ExpertTrainingConfig, LoraSettings, MoEObjective

pytestmark = pytest.mark.gpu
CONFIG = settings(steps=6, gradient_accumulation=2, checkpoint_steps=3)
PART = ExpertTrainingConfig(**vars(CONFIG))
BALANCED = {"objective": MoEObjective(balance_coefficient=0.01, z_coefficient=0.01, watch_steps=3)}
KINDS = {
    "full": {"config": CONFIG},
    "answers": {"config": CONFIG, "rows": AnswerRows(24)},
    "recomputed": {"config": replace(CONFIG, gradient_checkpointing=True)},
    "narrow": {"config": replace(CONFIG, optimizer_state="bf16")},
    "layers": {"config": replace(PART, method="layers")},
    "ffn": {"config": replace(PART, method="ffn")},
    "lora": {"config": replace(PART, method="lora", lora=LoraSettings(rank=3))},
    "mixtral": {"config": CONFIG, **BALANCED},
    "sparse": {"config": CONFIG, **BALANCED},
    "low-rank": {"config": CONFIG},
}
DELTAS = {
    "sparse": DersUpcyclingConfig(codec="sparse", drop_rate=0.8, universal="delta"),
    "low-rank": DersUpcyclingConfig(codec="low_rank", rank=4),
}
TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2}
"""Of losses near 5 after six steps."""
ROUNDED = {"narrow": 1e-2, "low-rank": 1e-2}
"""Where sums of another order come farther apart: moments in bf16; Adam's whole steps of gradients
that are nearly zero, those of a factor whose other one is zero."""
SIMOE = SimoeUpcyclingConfig(
    experts=3, mask_learning_rate=0.6, router_learning_rate=1e-2, multiplier_learning_rate=2.0
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    dense = save_pico(folder / "dense")
    for name, config in DELTAS.items():
        size = {"experts": 3, "top_k": 2, "seed": 5, "max_shard_bytes": 10**9}
        write_ders_upcycling(dense, folder / name, config=config, **size)
    made = dict.fromkeys(KINDS, dense) | {name: folder / name for name in DELTAS}
    return made | {"mixtral": join(folder / "mixtral", top_k=2).model}


def losses(result):
    return [point["loss"] for point in result.curves if "loss" in point]


def trained(folder, models, name, out, *, device, precision="fp32", **more):
    options = KINDS[name] | more
    options["config"] = replace(options["config"], precision=precision)
    return train_any(folder, models[name], out, progress=Silent(), device=device, **options)


@pytest.mark.parametrize("name", KINDS)
def test_it_learns_what_a_cpu_learns(tmp_path, models, name):
    expected = trained(tmp_path, models, name, "cpu", device="cpu")
    for precision, tolerance in TOLERANCE.items():
        found = trained(tmp_path, models, name, precision, device="cuda", precision=precision)
        off = max(tolerance, ROUNDED.get(name, 0.0))
        assert losses(found) == pytest.approx(losses(expected), abs=off), precision
        assert found.trained_parameters == expected.trained_parameters
        model = load_causal_lm(tmp_path / precision, device="cuda")
        with torch.inference_mode():
            logits = model(torch.arange(2, 18, device="cuda")[None]).logits
        assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["full", "narrow", "lora", "mixtral"])
def test_it_goes_on_from_its_checkpoint(tmp_path, models, name):
    whole = trained(tmp_path, models, name, "whole", device="cuda")
    kept = tmp_path / "again-checkpoints" / "checkpoint-3"
    shutil.copytree(tmp_path / "whole-checkpoints" / "checkpoint-3", kept)
    again = trained(tmp_path, models, name, "again", device="cuda")
    assert losses(again) == pytest.approx(losses(whole), abs=1e-4)


@pytest.mark.parametrize("masks", ["neurons", "parameters"])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_simoe_trains_is_pruned_and_answers(tmp_path, masks, precision):
    dense = save_pico(tmp_path / "dense")
    simoe = replace(SIMOE, masks=masks)
    config = settings(steps=16, checkpoint_steps=8, gradient_accumulation=2)
    found, said = {}, {}
    for device in ("cpu", "cuda"):
        own = replace(config, precision=precision if device == "cuda" else "fp32")
        out = tmp_path / device
        where = {"checkpoints": tmp_path / f"{device}-checkpoints", "device": device}
        found[device] = train_simoe(
            *(dense, AnswerRows(64), out),
            **{"config": own, "simoe": simoe, "seed": 3, "progress": Silent(), **where},
        )
        asked = [{"prompt": "ab"}, {"prompt": "hello, you"}]
        said[device] = answer(tmp_path / "cpu", asked, max_new_tokens=8, device=device).texts
        load_causal_lm(out, device=device)
    curves = [losses(result.training) for result in found.values()]
    assert curves[1] == pytest.approx(curves[0], abs=4 * TOLERANCE[precision])
    assert said["cuda"] == said["cpu"]


def test_rows_of_a_gpu_are_those_of_a_cpu(tmp_path, models):
    """What was begun on one is ended on the other."""
    whole = trained(tmp_path, models, "full", "whole", device="cpu")
    kept = tmp_path / "again-checkpoints" / "checkpoint-3"
    shutil.copytree(tmp_path / "whole-checkpoints" / "checkpoint-3", kept)
    rows = RandomRows(24)
    again = trained(tmp_path, models, "full", "again", device="cuda", rows=rows)
    assert losses(again) == pytest.approx(losses(whole), abs=TOLERANCE["fp32"])
