"""The comparison's table: means, deviations, and what is unknown."""

import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.report.text import markdown_table
from upcycle_core.evaluation.text.comparison import Compared, across_seeds, comparison_metrics
from upcycle_core.evaluation.text.comparison_report import comparison_table, draw_comparison

EXPERTS = {"law": 10.0, "physics": 20.0}


def row(title, law, physics, **more):
    counts = {"trained_parameters": 5_000_000, "active_parameters": 1_500_000}
    counts |= {"total_parameters": 2_000_000, "tokens": 3_000_000}
    return Compared(title=title, perplexities={"law": law, "physics": physics}, **counts | more)


def runs():
    first = comparison_metrics(
        EXPERTS, {"dume": row("DUME", 10.0, 40.0), "b": row("B", 20.0, 20.0)}
    )
    second = comparison_metrics(EXPERTS, {"dume": row("DUME", 12.5, 40.0), "b": row("B", 20, 25)})
    first["dume"] |= {"core_seconds": 100.0, "peak_memory_bytes": 10**9}
    second["dume"] |= {"core_seconds": 200.0, "peak_memory_bytes": 2 * 10**9}
    first["b"] |= {"core_seconds": 100.0, "peak_memory_bytes": 10**9}
    return [first, second]


def test_scores_are_percent_of_the_experts():
    found = runs()[0]["dume"]
    assert found["normalised"] == {"law": 100.0, "physics": 50.0}
    assert found["normalised_average"] == 75.0


def test_seeds_become_mean_and_sample_deviation():
    rows = across_seeds(runs())
    assert rows["dume"]["scores"]["law"] == pytest.approx((90.0, 200**0.5))
    assert rows["dume"]["scores"]["average"] == pytest.approx((70.0, 50**0.5))
    assert rows["dume"]["core_seconds"] == 150.0
    assert rows["dume"]["peak_memory_bytes"] == 2 * 10**9


def test_cost_unknown_for_one_seed_is_unknown():
    rows = across_seeds(runs())
    assert rows["b"]["core_seconds"] is rows["b"]["peak_memory_bytes"] is None
    assert comparison_table(rows, seeds=2).rows[-1][-2:] == ["–", "–"]


def test_table_shows_deviations_only_where_there_are_several_seeds():
    assert "±" not in markdown_table(comparison_table(across_seeds(runs()[:1])))
    text = markdown_table(comparison_table(across_seeds(runs()), seeds=2))
    assert "| DUME | 90.0 ± 14.1 | 50.0 ± 0.0 | 70.0 ± 7.1 |" in text
    assert "| 5.00 M | 1.50 M | 2.00 M | 3.00 M | 2.5 min | 2.00 GB |" in text


def test_tokens_of_given_experts_are_a_dash_and_the_caption_says_so():
    rows = comparison_metrics(EXPERTS, {"dume": row("DUME", 10.0, 40.0, tokens=None)})
    table = comparison_table(across_seeds([rows]))
    assert dict(zip(table.header, table.rows[0], strict=True))["Tokens"] == "–"
    assert "given experts" in table.caption
    assert "given experts" not in comparison_table(across_seeds(runs())).caption


def test_a_row_that_misses_a_domain_is_refused():
    with pytest.raises(InputError, match="physics"):
        comparison_metrics(
            {**EXPERTS}, {"x": Compared(**{**vars(row("X", 1, 1)), "perplexities": {"law": 1.0}})}
        )


def test_picture_leaves_out_rows_of_unknown_cost(tmp_path):
    draw_comparison(across_seeds(runs()), tmp_path / "one.png", highlight="dume")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_picture_of_unknown_costs_alone_is_empty(tmp_path):
    rows = {name: row for name, row in across_seeds(runs()).items() if name == "b"}
    draw_comparison(rows, tmp_path / "one.png", highlight="dume")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_picture_is_the_same_for_the_same_rows(tmp_path):
    for name in ("one.png", "two.png"):
        draw_comparison(across_seeds(runs()[:1]), tmp_path / name, highlight="dume")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
