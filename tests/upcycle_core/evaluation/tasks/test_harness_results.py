"""Normalised scores, differences and faults of a small evaluation made by hand."""

import json
import math
from dataclasses import replace

import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.items import Item
from upcycle_core.evaluation.tasks.results import (
    TaskEvaluation,
    TaskScore,
    faults,
    flips,
    metrics,
)

LOWER = ("text",)
DOMAINS = {"code": "python", "code2": "python", "sums": "mathematics", "text": "mathematics"}


def score(task, *values, **more):
    metric = "byte_perplexity" if task in LOWER else "acc"
    known = {"metric": metric, "higher_is_better": task not in LOWER, "items": 10, **more}
    return TaskScore(values=values, **known)


def row(**values):
    return {
        task: score(task, *(value if isinstance(value, tuple) else (value,)))
        for task, value in values.items()
    }


def evaluation(**more):
    rows = {
        "expert_python": row(code=0.8, code2=0.5, sums=0.1, text=4.0, quiz=0.3),
        "expert_mathematics": row(code=0.2, code2=0.1, sums=0.6, text=2.0, quiz=0.3),
        "dume": row(code=0.6, code2=0.6, sums=0.3, text=2.5, quiz=0.5),
        "champion": row(code=0.4, code2=0.5, sums=0.6, text=8.0, quiz=0.4),
    }
    tasks = ("code", "code2", "sums", "text", "quiz")
    given = {"tasks": tasks, "titles": {"dume": "DUME"}, "scores": rows, "domains": DOMAINS}
    return TaskEvaluation(**{**given, "subject": "dume", "rivals": ("champion",), **more})


def normalised_average(values, experts):
    """100/D sum_d p_d / p_expert_d, tasks of a domain averaged first."""
    domains = {}
    for task, domain in DOMAINS.items():
        ratio = experts[task] / values[task] if task in LOWER else values[task] / experts[task]
        domains.setdefault(domain, []).append(ratio)
    means = [sum(ratios) / len(ratios) for ratios in domains.values()]
    return 100 * sum(means) / len(means)


def test_normalised_average_is_the_paper_s_over_domains():
    found = metrics(evaluation())
    experts = {"code": 0.8, "code2": 0.5, "sums": 0.6, "text": 2.0}
    for name, own in evaluation().scores.items():
        values = {task: own[task].mean for task in DOMAINS}
        # Only the order of additions differs.
        expected = pytest.approx(normalised_average(values, experts), rel=1e-12)
        assert found["normalised_average"][name] == expected
    assert found["normalised"]["dume"] == {
        "code": pytest.approx(75.0),
        "code2": pytest.approx(120.0),
        "sums": pytest.approx(50.0),
        "text": pytest.approx(80.0),
    }
    assert found["normalised_average"]["dume"] == pytest.approx((97.5 + 65.0) / 2)


def test_a_domain_with_more_tasks_counts_no_more_than_another():
    uneven = evaluation(domains={"code": "python", "code2": "python", "sums": "mathematics"})
    assert metrics(uneven)["normalised_average"]["dume"] == pytest.approx((97.5 + 50.0) / 2)


def test_an_expert_is_exactly_100_on_its_own_tasks():
    for values in ((0.013,), (0.052,), (0.013, 0.052)):  # 100 v / v is not 100 in floating point
        rows = {"expert_python": row(code=values), "dume": row(code=0.1)}
        found = metrics(
            evaluation(tasks=("code",), scores=rows, domains={"code": "python"}, rivals=())
        )
        assert found["normalised"]["expert_python"] == {"code": 100.0}
    assert found["deviation"]["expert_python"] == {"code": 0.0, "average": 0.0}


def test_seeds_are_normalised_one_by_one_where_the_expert_has_as_many():
    rows = {
        "expert_python": row(code=(0.5, 0.8)),
        "expert_mathematics": row(sums=0.5),
        "dume": row(code=(0.5, 0.4), sums=0.4),
    }
    domains = {"code": "python", "sums": "mathematics"}
    found = metrics(evaluation(tasks=("code", "sums"), scores=rows, domains=domains, rivals=()))
    assert found["scores"]["dume"]["code"]["mean"] == pytest.approx(0.45)
    assert found["scores"]["dume"]["code"]["deviation"] == pytest.approx(0.1 / 2**0.5)
    assert found["normalised"]["dume"]["code"] == pytest.approx((100 + 50) / 2)
    assert found["normalised_average"]["dume"] == pytest.approx((75 + 80) / 2)
    assert found["deviation"]["dume"] == {
        "code": pytest.approx(50 / 2**0.5),
        "average": pytest.approx(25 / 2**0.5),
    }


def test_seeds_are_normalised_by_the_expert_s_mean_where_it_has_others():
    rows = {"expert_python": row(code=(0.2, 0.4, 0.6)), "dume": row(code=(0.2, 0.4))}
    found = metrics(evaluation(tasks=("code",), scores=rows, domains={"code": "python"}, rivals=()))
    assert found["normalised"]["dume"]["code"] == pytest.approx(75.0)
    assert found["deviation"]["dume"]["code"] == pytest.approx(50 / 2**0.5)


@pytest.mark.parametrize(
    ("expert", "why"),
    [
        ({"sums": score("sums", 0.0)}, "the mathematics expert scores 0"),
        ({"sums": score("sums", 0.3, 0.0)}, "the mathematics expert scores 0"),
        ({}, "the mathematics expert was not evaluated on it"),
    ],
)
def test_what_an_expert_cannot_do_is_not_normalised_but_named(expert, why):
    rows = {"expert_mathematics": expert, "expert_python": row(code=0.5), "dume": row(code=0.5)}
    rows["dume"] |= row(sums=0.5)
    domains = {"code": "python", "sums": "mathematics"}
    found = metrics(evaluation(tasks=("code", "sums"), scores=rows, domains=domains, rivals=()))
    assert found["normalised"]["dume"] == {"code": 100.0, "sums": None}
    assert found["normalised_average"]["dume"] is None
    assert found["undefined"] == {"sums": why}
    json.dumps(found, allow_nan=False)


def test_without_domains_nothing_is_normalised():
    found = metrics(evaluation(domains={}))
    assert found["normalised"] == found["normalised_average"] == found["undefined"] == {}


def test_a_score_survives_json():
    known = score("code", 0.25, 0.5, categories={"easy": 0.75}, truncated=2)
    assert TaskScore.from_dict(json.loads(json.dumps(known.to_dict()))) == known


def items(task, scores, metric="acc"):
    return [
        Item(
            task=task,
            subtask="",
            category="",
            id=str(name),
            seed=0,
            prompt="p",
            target="t",
            response="r",
            metric=metric,
            score=value,
        )
        for name, value in enumerate(scores)
    ]


def test_differences_and_wins_are_counted_a_task_and_rival():
    ours = [*items("code", [1, 1, 1, 0]), *items("text", [2.0, 3.0, 9.0], "bits")]
    theirs = [*items("code", [0, 1, 0, 1]), *items("text", [3.0, 4.0, 8.0], "bits")]
    scores = {"dume": row(code=0.75, text=14 / 3), "champion": row(code=0.5, text=5.0)}
    both = {"dume": [*ours, *items("sums", [1])], "champion": theirs}
    given = evaluation(items=both, scores={**evaluation().scores, **scores})
    found = metrics(given)["differences"]["champion"]
    assert list(found) == ["code", "text"]
    assert found["code"]["mean"] == pytest.approx(0.25)
    assert (found["code"]["won"], found["code"]["lost"], found["code"]["items"]) == (2, 1, 4)
    assert found["text"]["mean"] == pytest.approx(-1 / 3)
    assert (found["text"]["won"], found["text"]["lost"]) == (2, 1)
    assert found["text"]["metric"] == "bits"
    assert [flip.gain for flip in flips(given)["champion"]] == [1, 1, 1, 1, -1, -1]


def test_a_score_that_is_no_mean_over_items_has_no_difference_of_means():
    """A short text that one model finds hard is little of the whole, and half of the items."""
    nats, lengths = {"dume": (1.0, 8.0), "champion": (1.5, 2.0)}, (1000, 10)
    whole = {
        name: math.exp(math.fsum(n * size for n, size in zip(own, lengths, strict=True)) / 1010)
        for name, own in nats.items()
    }
    assert whole["dume"] < whole["champion"]
    given = evaluation(
        tasks=("text",),
        domains={},
        scores={name: row(text=value) for name, value in whole.items()},
        items={name: items("text", map(math.exp, own)) for name, own in nats.items()},
    )
    found = metrics(given)["differences"]["champion"]["text"]
    assert [found[part] for part in ("mean", "low", "high")] == [None] * 3
    assert not found["excludes_zero"]
    assert (found["won"], found["lost"], found["items"]) == (1, 1, 2)


def test_other_items_of_a_rival_are_refused():
    both = {"dume": items("code", [1, 1]), "champion": items("code", [1])}
    with pytest.raises(InputError, match="code/1"):
        metrics(evaluation(items=both))


def test_a_sound_evaluation_has_no_faults():
    assert faults(evaluation(items={"dume": items("code", [1])})) == []


def test_all_that_does_not_fit_together_is_named():
    rows = {name: dict(own) for name, own in evaluation().scores.items()}
    rows["dume"]["sums"] = score("sums", 0.5, math.nan)
    rows["champion"]["code"] = replace(rows["champion"]["code"], metric="f1")
    broken = evaluation(
        scores=rows,
        tasks=("code", "sums", "riddles"),
        rivals=("dume", "nobody"),
        items={"ghost": []},
    )
    message = "\n".join(map(str, faults(broken)))
    for part in (
        "rivals = 'nobody'",
        "rivals = 'dume'",
        "items = 'ghost'",
        "scores.code = ['acc', 'f1']",
        "scores.riddles = []",
        "scores.dume.sums",
    ):
        assert part in message


def test_an_evaluation_without_tasks_is_a_fault():
    assert [fault.field for fault in faults(evaluation(tasks=()))] == ["tasks"]


def test_a_sweep_is_normalised_as_the_rows_are():
    points = {4.0: row(code=0.4, code2=0.5, sums=0.3, text=4.0, quiz=0.1)}
    points[1.0] = evaluation().scores["dume"]
    found = metrics(evaluation(sweeps={"top_k": points}))
    assert [point["value"] for point in found["sweeps"]["top_k"]] == [1.0, 4.0]
    first, last = found["sweeps"]["top_k"]
    assert first["normalised_average"] == found["normalised_average"]["dume"]
    experts = {"code": 0.8, "code2": 0.5, "sums": 0.6, "text": 2.0}
    values = {"code": 0.4, "code2": 0.5, "sums": 0.3, "text": 4.0}
    assert last["normalised_average"] == pytest.approx(normalised_average(values, experts))
    assert last["scores"]["quiz"] == 0.1
    assert "sweeps" not in metrics(evaluation())


def test_a_sweep_without_a_finite_score_is_named():
    broken = evaluation(sweeps={"ridge_lambda": {0.5: row(code=math.nan)}})
    message = "\n".join(map(str, faults(broken)))
    assert "scores.ridge_lambda = 0.5.code = (nan,)" in message
    assert "sweeps.ridge_lambda = 0.5 = 'text': no score" in message
