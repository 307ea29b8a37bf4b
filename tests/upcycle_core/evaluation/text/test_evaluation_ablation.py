"""The table of joined models: arithmetic by hand, and what stands where nothing was measured."""

import math

import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.text.ablation import (
    Joined,
    ablation_metrics,
    ablation_table,
    draw_ablation,
)

EXPERTS = {"law": 20.0, "code": 10.0}
OUTSIDE = {"poems": 50.0}
ROWS = {
    "dense": Joined(
        title="Dense", before={"law": 20.0, "code": 40.0, "poems": 50.0}, parameters=(10, 10)
    ),
    "joined": Joined(
        title="Joined",
        before={"law": 200.0, "code": 50.0, "poems": 500.0},
        after={"law": 25.0, "code": 8.0, "poems": 40.0},
        own_expert={"law": 80.0, "code": 20.0},
        parameters=(40, 20),
        tokens=1000,
    ),
}


def test_every_number_by_hand():
    found = ablation_metrics(EXPERTS, ROWS, outside=OUTSIDE)["joined"]
    assert found["before"]["mean_perplexity"] == pytest.approx(100.0)
    assert found["own_expert"]["mean_perplexity"] == pytest.approx(40.0)
    assert found["after"]["mean_perplexity"] == pytest.approx(math.sqrt(200))
    assert found["before"]["normalised_average"] == pytest.approx((10 + 20) / 2)
    assert found["after"]["normalised_average"] == pytest.approx((80 + 125) / 2)
    assert found["after"]["outside"] == {"poems": pytest.approx(125.0)}
    assert (found["parameters"], found["active_parameters"], found["tokens"]) == (40, 20, 1000)


def test_the_table_shows_a_dash_where_nothing_was_measured():
    table = ablation_table([ablation_metrics(EXPERTS, ROWS, outside=OUTSIDE)])
    dense, joined = table.rows
    assert table.header[-2:] == ["poems, joined", "poems, trained"]
    assert dense == ["Dense", "–", "28.3", "–", "62.5", "–", "50.0", "–"]
    assert joined == ["Joined", "40.0", "100.0", "14.1", "15.0", "102.5", "500.0", "40.0"]


def test_several_seeds_show_mean_and_deviation():
    one = ablation_metrics(EXPERTS, ROWS, outside={})
    worse = {
        **ROWS,
        "dense": Joined(title="Dense", before={"law": 40.0, "code": 80.0}, parameters=(1, 1)),
    }
    other = ablation_metrics(EXPERTS, worse, outside={})
    line = ablation_table([one, other]).rows[0]
    first, second = math.sqrt(800), math.sqrt(3200)
    spread = abs(first - second) / math.sqrt(2)
    assert line[2] == f"{(first + second) / 2:.1f} ± {spread:.1f}"


def test_a_missing_domain_is_named():
    rows = {"half": Joined(title="Half", before={"law": 1.0}, parameters=(1, 1))}
    with pytest.raises(InputError, match="code"):
        ablation_metrics(EXPERTS, rows, outside={})


def test_the_picture_depends_on_the_numbers_alone(tmp_path):
    found = ablation_metrics(EXPERTS, ROWS, outside={})
    for name in ("one", "two"):
        draw_ablation(found, tmp_path / f"{name}.png", highlight=("joined",))
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert (tmp_path / "one.png").stat().st_size > 5000
