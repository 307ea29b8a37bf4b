"""The stage ``report`` of nine domains on a real Ray: what it scores, and what it knows."""

import csv
import json
import os
from statistics import fmean

import pytest

from benchmarks.report import Reported
from infra.cluster.compute import cluster
from infra.settings import read
from tasks.engine.sources import CODE
from upcycle_core.evaluation.text.config import SAMPLED
from upcycle_core.evaluation.text.report import UNSCORED

DOMAINS = 9
MERGED = 4
"""Rows on every text: the average, the oracle, the MoE, random routing."""


@pytest.fixture(scope="module", autouse=True)
def ray(tmp_path_factory):
    with cluster(read(os.environ), 1, CODE, workspace=tmp_path_factory.getbasetemp()):
        yield


def test_what_is_asked_later_is_scored_alone(tmp_path):
    many = Reported(tmp_path / "many", DOMAINS, 256)
    assert many.run()["passes"] == DOMAINS * (1 + SAMPLED) + MERGED * DOMAINS
    folder = many.workspace.path("report")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert {len(metrics["normalised"][f"expert_{name}"]) for name in many.names} == {1 + SAMPLED}
    assert "expert_d00" not in metrics["normalised_average"]
    assert metrics["heldout"].keys() == metrics["normalised"]["dume"].keys() == {*many.names}
    assert UNSCORED.strip() in (folder / "report.html").read_text()
    oracle, dume = (metrics["perplexity"][row] for row in ("oracle", "dume"))

    many.values["evaluation"] |= {"cross_scores": "all", "random_routing_seeds": [0, 1]}
    assert many.run()["passes"] == DOMAINS * (DOMAINS - 1 - SAMPLED) + DOMAINS
    metrics = json.loads((folder / "metrics.json").read_text())
    own = metrics["normalised"]["expert_d00"]
    assert list(own) == many.names
    assert metrics["normalised_average"]["expert_d00"] == pytest.approx(fmean(own.values()))
    assert (metrics["perplexity"]["oracle"], metrics["perplexity"]["dume"]) == (oracle, dume)
    assert metrics["deviation"].keys() == {"random_routing"}
    with (folder / "table.csv").open() as lines:
        assert all(all(line.values()) for line in csv.DictReader(lines))

    many.make_expert("d00", seed=99)
    many.join()
    assert many.run()["passes"] == DOMAINS + (MERGED + 1) * DOMAINS
