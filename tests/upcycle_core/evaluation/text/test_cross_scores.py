"""Experts that are not scored on every text: which, and what a report makes of it."""

import csv
import json
import math

import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.text.config import FEW, SAMPLED, EvaluationConfig
from upcycle_core.evaluation.text.report import DRAWN_ONCE, NO_AVERAGE, UNSCORED, write_report
from upcycle_core.evaluation.text.results import Evaluation, expert_row

MANY = tuple(f"d{n:02}" for n in range(16))


def chosen(domains, word="auto"):
    config = EvaluationConfig(cross_scores=word)
    return {domain: config.scored_on(domain, domains) for domain in domains}


def test_few_domains_are_all_scored_and_many_by_sample():
    assert set(chosen(MANY[:FEW]).values()) == {MANY[:FEW]}
    sampled = chosen(MANY[: FEW + 1])
    assert all(domain in own and len(own) == 1 + SAMPLED for domain, own in sampled.items())
    assert sampled == chosen(MANY[: FEW + 1], "sample")
    assert all(own == tuple(sorted(own)) for own in sampled.values())
    others = [text for domain, own in chosen(MANY).items() for text in own if text != domain]
    assert len(set(others)) > 12  # not the same texts for everyone


def test_the_word_overrules_the_number_of_domains():
    assert set(chosen(MANY, "all").values()) == {MANY}
    assert chosen(MANY, "own") == {domain: (domain,) for domain in MANY}
    assert {len(own) for own in chosen(MANY[:6], "sample").values()} == {1 + SAMPLED}
    assert chosen(MANY[:2], "sample") == chosen(MANY[:2], "all")


def test_a_domain_that_joins_takes_one_place_at_most():
    before, after = chosen(MANY[:-1]), chosen(MANY)
    assert all(len({*own} - {*after[domain]}) <= 1 for domain, own in before.items())
    assert sum(before[domain] == after[domain] for domain in before) > 8


def test_random_routing_is_drawn_once_of_many_unless_the_recipe_says_more():
    assert EvaluationConfig().drawn_seeds(FEW) == (0, 1, 2)
    assert EvaluationConfig().drawn_seeds(FEW + 1) == (0,)
    assert EvaluationConfig(random_routing_seeds=(4, 5)).drawn_seeds(16) == (4, 5)


def test_what_else_is_measured_is_no_part_of_how_a_model_is():
    rows = {"rows": (), "cross_scores": "own", "random_routing_seeds": (1,)}
    some = EvaluationConfig(**rows, sweep_top_k=(2,))
    assert some.measuring == EvaluationConfig().measuring


def evaluation(domains=MANY, word="auto", **more):
    """Experts with 10 on their own text and 20 on others', and a MoE with 12.5 everywhere."""
    scored = chosen(domains, word)
    rows = {
        expert_row(domain): {text: 10.0 if text == domain else 20.0 for text in own}
        for domain, own in scored.items()
    }
    everywhere = dict.fromkeys(domains, 12.5)
    return Evaluation(
        domains=domains,
        perplexities={**rows, "dume": everywhere, "oracle": dict.fromkeys(domains, 10.0)},
        repeats={"random_routing": [everywhere]},
        heldout={domain: {"tokens": 10, "bytes": 30.0} for domain in domains},
        scored_on={expert_row(domain): own for domain, own in scored.items()},
        **more,
    )


def test_what_was_not_scored_is_a_dash_and_part_of_no_average(tmp_path):
    write_report(evaluation(), tmp_path, model="many")
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["normalised_average"].keys() == {"random_routing", "dume", "oracle"}
    assert metrics["normalised_average"]["dume"] == pytest.approx(80)
    assert metrics["worst_domain"].keys() == {"random_routing", "dume", "oracle"}
    for table in ("normalised", "perplexity", "bits_per_byte"):
        for domain, own in chosen(MANY).items():
            assert list(metrics[table][expert_row(domain)]) == list(own)
    assert metrics["normalised"]["expert_d00"]["d00"] == 100
    cells = {line["row"]: line for line in csv.DictReader((tmp_path / "table.csv").open())}
    assert sum(not cells["expert_d00"][domain] for domain in MANY) == len(MANY) - 1 - SAMPLED
    assert cells["expert_d00"]["average"] == ""
    assert all(cells["dume"].values())
    bars = [line["row"] for line in csv.DictReader((tmp_path / "scores.csv").open())]
    assert bars == ["random_routing", "dume", "oracle"]
    [line] = [li for li in (tmp_path / "table.md").read_text().splitlines() if "d00 expert" in li]
    assert line.count("–") == len(MANY) - 1 - SAMPLED + 1
    page = (tmp_path / "report.html").read_text()
    assert all(said.strip() in page for said in (UNSCORED, DRAWN_ONCE, NO_AVERAGE))


def test_few_domains_have_no_dash_and_no_word_of_it(tmp_path):
    write_report(evaluation(MANY[:4]), tmp_path, model="few")
    page = (tmp_path / "report.html").read_text()
    assert not any(said.strip() in page for said in (UNSCORED, DRAWN_ONCE, NO_AVERAGE))
    averages = json.loads((tmp_path / "metrics.json").read_text())["normalised_average"]
    assert averages["expert_d00"] == pytest.approx((100 + 3 * 50) / 4)


def test_a_score_that_was_asked_for_and_is_missing_is_a_fault(tmp_path):
    broken = evaluation()
    other = next(d for d in broken.domains_of("expert_d00") if d != "d00")
    del broken.perplexities["expert_d00"][other]
    broken.perplexities["expert_d01"]["d01"] = math.nan
    del broken.perplexities["dume"]["d02"]
    with pytest.raises(InputError) as caught:
        write_report(broken, tmp_path / "report", model="many")
    for name in (f"perplexities.expert_d00.{other}", "expert_d01.d01", "perplexities.dume.d02"):
        assert name in str(caught.value)


def test_models_that_are_judged_are_scored_everywhere(tmp_path):
    some = evaluation()
    some.scored_on["dume"] = MANY[:3]
    with pytest.raises(InputError, match="only dense experts may be scored on some"):
        write_report(some, tmp_path / "report", model="many")
