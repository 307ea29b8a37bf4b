import pytest

from infra.recipe.schema import GateConfig
from tasks.release.gate import decide, figures, without
from upcycle_core.evaluation.tasks.results import TaskEvaluation
from upcycle_core.evaluation.tasks.score import TaskScore

EXPERTS = {"law": 10.0, "code": 5.0}


def text_figures(gate, perplexities):
    return figures(gate, "dume", perplexities=perplexities, experts=EXPERTS, tasks=None)


def judged(gate, challenger, champion):
    theirs = None if champion is None else text_figures(gate, champion)
    return decide(gate, challenger=text_figures(gate, challenger), champion=theirs)


def test_first_model_becomes_champion():
    decision = judged(GateConfig(), {"law": 20.0, "code": 10.0}, None)
    assert decision.promoted
    assert "no champion" in decision.reason
    assert decision.challenger == pytest.approx(50.0)


def test_no_model_takes_the_place_of_a_champion_that_is_gone():
    mine = text_figures(GateConfig(), {"law": 20.0, "code": 10.0})
    decision = decide(GateConfig(), challenger=mine, champion=None, former="2")
    assert not decision.promoted
    assert decision.reason.startswith("normalised_average 50.00; version 2 was champion")
    assert decide(GateConfig(), challenger=mine, champion=mine, former="2").reason == (
        decide(GateConfig(), challenger=mine, champion=mine).reason
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_first_model_without_a_figure_is_no_champion(value):
    """No other could ever beat it."""
    gate = GateConfig(metric="perplexity.law")
    decision = judged(gate, {"law": value, "code": 10.0}, None)
    assert not decision.promoted
    assert decision.outcome == "refused: undefined, the first"
    assert judged(gate, {"law": 20.0, "code": 10.0}, {"law": value, "code": 1.0}).promoted is False


def test_an_expert_that_was_rolled_back_is_not_promoted_again():
    decision = judged(GateConfig(), {"law": 20.0, "code": 10.0}, None)
    assert without({}, decision) == decision
    refused = without({"law": 2}, decision)
    assert not refused.promoted
    assert refused.outcome == "refused: an expert was rolled back"
    assert refused.reason.startswith(f"{decision.reason}; it holds law's expert of version 2")
    assert without({"law": 2}, refused) == refused


def test_average_decides_by_default():
    decision = judged(
        GateConfig(),
        {"law": 10.0, "code": 10.0},  # (100 + 50) / 2
        {"law": 12.5, "code": 7.0},  # (80 + 71.4) / 2
    )
    assert not decision.promoted
    assert "75.00 of the challenger does not beat 75.71 of the champion" in decision.reason


def test_worst_domain_decides_where_the_recipe_says_so():
    decision = judged(
        GateConfig(metric="normalised_worst"),
        {"law": 12.5, "code": 6.25},  # 80, 80
        {"law": 10.0, "code": 7.0},  # 100, 71.4
    )
    assert decision.promoted
    assert decision.challenger == pytest.approx(80.0)
    assert decision.champion == pytest.approx(500 / 7)


@pytest.mark.parametrize(("points", "promoted"), [(1.0, False), (3.0, True)])
def test_a_domain_may_lose_no_more_than_its_tolerance(points, promoted):
    decision = judged(
        GateConfig(tolerances={"perplexity.code": points}),
        {"law": 10.0, "code": 10.0},  # average 75, and 2 more in code
        {"law": 20.0, "code": 8.0},  # average 56
    )
    assert decision.promoted is promoted
    assert "perplexity.code -10.00 against -8.00" in decision.reason


@pytest.mark.parametrize(("margin", "promoted"), [(0.0, False), (-0.1, True), (0.1, False)])
def test_margin_is_what_the_challenger_must_add(margin, promoted):
    same = {"law": 20.0, "code": 10.0}
    assert judged(GateConfig(margin=margin), same, same).promoted is promoted


def score(value, *, higher=True):
    return TaskScore(metric="m", higher_is_better=higher, values=(value,), items=4)


def table(dume, champion, expert=0.5):
    """Two tasks: a rate with a domain, and bits a byte without."""

    def row(rate, bits):
        return {"exam": score(rate), "text": score(bits, higher=False)}

    return TaskEvaluation(
        tasks=("exam", "text"),
        titles={},
        scores={"dume": row(*dume), "champion": row(*champion), "expert_law": row(expert, 1.0)},
        domains={"exam": "law"},
        subject="dume",
    )


def judged_on_tasks(gate, tasks, perplexities=EXPERTS):
    rows = {
        row: figures(gate, row, perplexities=perplexities, experts=EXPERTS, tasks=tasks)
        for row in ("dume", "champion")
    }
    return decide(gate, challenger=rows["dume"], champion=rows["champion"])


def test_a_task_can_decide_in_percent():
    decision = judged_on_tasks(
        GateConfig(metric="task.exam", margin=4), table((0.45, 1.0), (0.40, 1.0))
    )
    assert decision.promoted
    assert (decision.challenger, decision.champion) == pytest.approx((45.0, 40.0))


def test_a_metric_in_points_of_a_hundred_is_not_made_percent_again():
    bleu = table((20.5, 1.0), (20.0, 1.0), expert=0.9)  # one model's points may look like a share
    decision = judged_on_tasks(GateConfig(metric="task.exam", margin=1), bleu)
    assert (decision.challenger, decision.champion) == pytest.approx((20.5, 20.0))
    assert not decision.promoted
    assert judged_on_tasks(GateConfig(metric="task.exam", margin=0.4), bleu).promoted


def test_where_less_is_better_less_wins():
    tasks = table((0.4, 1.25), (0.4, 1.5))
    assert judged_on_tasks(GateConfig(metric="task.text", margin=0.2), tasks).promoted
    assert not judged_on_tasks(GateConfig(metric="task.text", margin=0.3), tasks).promoted


def test_the_average_over_tasks_is_normalised_by_the_experts():
    decision = judged_on_tasks(GateConfig(metric="task_average"), table((0.45, 1.0), (0.40, 1.0)))
    assert (decision.challenger, decision.champion) == pytest.approx((90.0, 80.0))


@pytest.mark.parametrize(("tolerance", "promoted"), [(1.9, False), (2.1, True)])
def test_a_metric_may_lose_its_tolerance_and_no_more(tolerance, promoted):
    gate = GateConfig(metric="task.text", tolerances={"task.exam": tolerance})
    decision = judged_on_tasks(gate, table((0.38, 1.0), (0.40, 1.5)))
    assert decision.promoted is promoted
    words = "stays within" if promoted else "loses more than"
    assert f"task.exam 38.00 against 40.00 {words} the tolerance of {tolerance}" in decision.reason


def test_what_is_undefined_promotes_nobody():
    decision = judged_on_tasks(
        GateConfig(metric="task_average"), table((0.45, 1.0), (0.40, 1.0), expert=0.0)
    )
    assert not decision.promoted
    assert "task_average undefined of the challenger" in decision.reason


@pytest.mark.parametrize(
    ("gate", "mine", "theirs", "outcome"),
    [
        (GateConfig(), {"law": 20.0, "code": 10.0}, None, "promoted: 50.00, the first"),
        (GateConfig(), {"law": 20.0, "code": 10.0}, {"law": 10.0, "code": 10.0}, "50.00 < 75.00"),
        (GateConfig(), {"law": 10.0, "code": 10.0}, {"law": 20.0, "code": 10.0}, "75.00 > 50.00"),
        (GateConfig(), {"law": 10.0, "code": 10.0}, {"law": 10.0, "code": 10.0}, "75.00 = 75.00"),
        (
            GateConfig(margin=30),
            {"law": 10.0, "code": 10.0},
            {"law": 20.0, "code": 10.0},
            "75.00 < 50.00 + 30",
        ),
        (
            GateConfig(tolerances={"perplexity.code": 1.0}),
            {"law": 10.0, "code": 10.0},
            {"law": 20.0, "code": 8.0},
            "perplexity.code -10.00 < -8.00 - 1",
        ),
    ],
)
def test_outcome_is_the_comparison_that_decided(gate, mine, theirs, outcome):
    decision = judged(gate, mine, theirs)
    assert decision.outcome.endswith(outcome)
    assert decision.outcome.startswith("promoted" if decision.promoted else "refused")


def test_figures_that_would_print_the_same_get_more_digits():
    figures = {"challenger": {"normalised_average": 95.23412}}
    champion = {"normalised_average": 95.23391}
    assert decide(GateConfig(), **figures, champion=champion).outcome == (
        "promoted: 95.2341 > 95.2339"
    )


def test_an_undefined_figure_is_refused_in_words():
    decision = decide(
        GateConfig(),
        challenger={"normalised_average": None},
        champion={"normalised_average": 56.25},
    )
    assert decision.outcome == "refused: undefined ? 56.25"
