import pytest

from infra.recipe import GateConfig
from tasks.gate import decide

EXPERTS = {"law": 10.0, "code": 5.0}


def test_first_model_becomes_champion():
    decision = decide(
        GateConfig(), challenger={"law": 20.0, "code": 10.0}, champion=None, experts=EXPERTS
    )
    assert decision.promoted
    assert "no champion" in decision.reason
    assert decision.challenger == pytest.approx(50.0)


def test_average_decides_by_default():
    decision = decide(
        GateConfig(),
        challenger={"law": 10.0, "code": 10.0},  # (100 + 50) / 2
        champion={"law": 12.5, "code": 7.0},  # (80 + 71.4) / 2
        experts=EXPERTS,
    )
    assert not decision.promoted
    assert "75.00 of the challenger does not beat 75.71 of the champion" in decision.reason


def test_worst_domain_decides_where_the_recipe_says_so():
    decision = decide(
        GateConfig(metric="normalised_worst"),
        challenger={"law": 12.5, "code": 6.25},  # 80, 80
        champion={"law": 10.0, "code": 7.0},  # 100, 71.4
        experts=EXPERTS,
    )
    assert decision.promoted
    assert decision.challenger == pytest.approx(80.0)
    assert decision.champion == pytest.approx(500 / 7)


@pytest.mark.parametrize(("margin", "promoted"), [(0.0, False), (-0.1, True), (0.1, False)])
def test_margin_is_what_the_challenger_must_add(margin, promoted):
    same = {"law": 20.0, "code": 10.0}
    decision = decide(GateConfig(margin=margin), challenger=same, champion=same, experts=EXPERTS)
    assert decision.promoted is promoted
