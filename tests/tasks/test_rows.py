"""Rows of a comparison, trained where their starts were not made."""

import json

import pytest

from tests import warm
from tests.upcycle_core.baselines.dense import COMMON, dense_models
from upcycle_core.baselines.bam.write import write_bam
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.upcycle import write_ders_upcycling

TRAINED = """
import sys
from pathlib import Path

import torch

from tasks.baselines.rows import row_piece
from upcycle_core.progress import Silent
from upcycle_core.training.config import MoEObjective, TrainingConfig


class Rows:
    def rows(self, tokenizer, *, config, seed):
        return [torch.arange(8) + n for n in range(config.steps * config.batch_size)]


row_piece(
    out=Path(sys.argv[2]),
    progress=Silent(),
    start=Path(sys.argv[1]),
    data=Rows(),
    config=TrainingConfig(steps=2, batch_size=2, sequence_length=8, precision="fp32"),
    seed=0,
    device="cpu",
    objective=MoEObjective(),
)
"""


@pytest.mark.parametrize("kind", ["bam", "ders"])
def test_a_model_of_our_code_is_trained_by_a_process_that_has_not_made_it(tmp_path, kind):
    models, start = dense_models(tmp_path / "models"), tmp_path / "start"
    if kind == "bam":
        write_bam(models, start, top_k=2, **COMMON)
    else:
        ders, shards = DersUpcyclingConfig(codec="low_rank", rank=4), COMMON["max_shard_bytes"]
        sizes = {"experts": 2, "top_k": 2, "seed": 0, "max_shard_bytes": shards}
        write_ders_upcycling(models["domain0"], start, config=ders, **sizes)
    warm.call(TRAINED, str(start), str(tmp_path / "trained"))
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert config["model_type"] == kind
    assert (tmp_path / "trained" / "model.safetensors").exists()
