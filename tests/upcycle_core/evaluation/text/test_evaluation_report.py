import csv
import json
import math
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.report.page import SCALE
from upcycle_core.evaluation.report.text import terminal_table
from upcycle_core.evaluation.text import plots, results, routing
from upcycle_core.evaluation.text.report import (
    best_row,
    score_table,
    write_report,
)
from upcycle_core.evaluation.text.results import Evaluation, expert_row

DOMAINS = ("law", "code")
COUNTS = {"law": [[6, 2], [1, 3]], "code": [[1, 9], [0, 5]]}


def _row(law: float, code: float) -> dict[str, float]:
    """Perplexities with these normalised scores: the experts have 10 and 4."""
    return {"law": 1000 / law, "code": 400 / code}


@pytest.fixture
def evaluation() -> Evaluation:
    return Evaluation(
        domains=DOMAINS,
        perplexities={  # in no particular order
            "oracle": _row(97, 95),
            "dume": _row(94, 91),
            "btx": _row(90, 92),
            expert_row("code"): _row(60, 100),
            expert_row("law"): _row(100, 70),
            "dume_ood": _row(93, 88),
            "model_averaging": _row(86, 84),
            "seed": _row(80, 82),
        },
        repeats={"random_routing": [_row(70, 80), _row(80, 80), _row(90, 80)]},
        heldout={"law": {"tokens": 100, "bytes": 300.0}, "code": {"tokens": 50, "bytes": 100.0}},
        routing=COUNTS,
        sweeps={
            "top_k": {"dume": {2: _row(90, 90), 1: _row(94, 91)}},
            "ridge_lambda": {"dume": {0.01: _row(94, 91), 100.0: _row(90, 80)}},
            "window": {"dume": {2: _row(80, 90), 16: _row(94, 91)}},
        },
    )


@pytest.fixture
def report(evaluation, tmp_path) -> Path:
    write_report(evaluation, tmp_path / "report", model="demo")
    return tmp_path / "report"


def _read(path: Path) -> list[dict[str, str]]:
    with path.open() as lines:
        return list(csv.DictReader(lines))


def test_metrics_hold_the_normalised_averages_by_row(report):
    metrics = json.loads((report / "metrics.json").read_text())
    assert metrics["normalised_average"] == {
        "expert_law": pytest.approx(85),
        "expert_code": pytest.approx(80),
        "seed": pytest.approx(81),
        "model_averaging": pytest.approx(85),
        "random_routing": pytest.approx(80),
        "btx": pytest.approx(91),
        "dume": pytest.approx(92.5),
        "dume_ood": pytest.approx(90.5),
        "oracle": pytest.approx(96),
    }
    assert metrics["normalised"]["dume"] == {"law": pytest.approx(94), "code": pytest.approx(91)}
    assert metrics["perplexity"]["dume"]["law"] == pytest.approx(1000 / 94)
    assert metrics["deviation"]["random_routing"] == {
        "law": pytest.approx(10),
        "code": pytest.approx(0, abs=1e-9),
        "average": pytest.approx(5),
    }
    assert metrics["worst_domain"]["seed"] == {"domain": "law", "normalised": pytest.approx(80)}
    assert metrics["bits_per_byte"]["dume"]["code"] == pytest.approx(math.log2(400 / 91) / 2)
    assert metrics["sweeps"]["top_k"]["dume"] == [
        {"value": 1, "normalised_average": pytest.approx(92.5)},
        {"value": 2, "normalised_average": pytest.approx(90)},
    ]


def test_gaps_stand_below_the_table_once(report):
    gaps = "Backbone gap (100 - oracle) 4.0, router gap (oracle - DUME) 3.5."
    for name in ("table.txt", "table.md", "report.html"):
        text = (report / name).read_text()
        assert text.count("gap (") == 2, name
        assert gaps in text.partition("Oracle")[2], name


def test_gaps_need_both_rows(evaluation, tmp_path):
    for row in ("oracle", "dume"):
        rows = {name: own for name, own in evaluation.perplexities.items() if name != row}
        assert results.gaps(results.averages(replace(evaluation, perplexities=rows))) == []


def test_routing_shares_and_agreement_with_the_label(report):
    found = json.loads((report / "metrics.json").read_text())["routing"]
    assert found["shares"] == {"law": [[0.75, 0.25], [0.25, 0.75]], "code": [[0.1, 0.9], [0, 1]]}
    assert found["agreement_by_layer"] == [pytest.approx(0.825), pytest.approx(0.625)]
    assert found["agreement"] == pytest.approx(0.725)
    assert routing.mean_shares(COUNTS["law"]) == [0.5, 0.5]


def test_routing_follows_the_order_of_the_experts(evaluation, tmp_path):
    shuffled = replace(evaluation, routing={"code": COUNTS["code"], "law": COUNTS["law"]})
    assert results.routing_summary(shuffled) == results.routing_summary(evaluation)


def test_rows_come_in_the_paper_s_order(report):
    rows = [line["row"] for line in _read(report / "table.csv")]
    assert rows == [
        "expert_law",
        "expert_code",
        "seed",
        "model_averaging",
        "random_routing",
        "btx",
        "dume",
        "dume_ood",
        "oracle",
    ]


def test_best_leaves_out_the_oracle_and_the_domain_s_own_expert(evaluation, report):
    assert best_row(evaluation, "law") == "dume"
    assert best_row(evaluation, "code") == "btx"
    assert best_row(evaluation) == "dume"
    lines = (report / "table.md").read_text().splitlines()
    assert "| DUME | **94.0** | 91.0 | **92.5** |" in lines
    assert "| btx | 90.0 | **92.0** | 91.0 |" in lines
    assert "| Oracle | 97.0 | 95.0 | 96.0 |" in lines
    assert "| law expert | 100.0 | 70.0 | 85.0 |" in lines
    assert "| Random routing | 80.0 ± 10.0 | 80.0 ± 0.0 | 80.0 ± 5.0 |" in lines


def test_best_is_nobody_where_two_print_the_same(evaluation, tmp_path):
    rows = {**evaluation.perplexities, "btx": _row(94.04, 80), "dume": _row(93.96, 80.04)}
    tie = replace(evaluation, perplexities=rows)
    assert best_row(tie, "law") is None
    assert best_row(tie, "code") == "dume_ood"
    write_report(tie, tmp_path, model="demo")
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert "| DUME | 94.0 | 80.0 | 87.0 |" in lines
    assert "| btx | 94.0 | 80.0 | 87.0 |" in lines
    assert "| DUME OOD | 93.0 | **88.0** | **90.5** |" in lines


def test_the_terminal_table_is_aligned(evaluation):
    lines = terminal_table(score_table(evaluation)).splitlines()
    assert len(lines) == 2 + 9
    ends = [line.index("Average") + len("Average") for line in lines[:1]]
    assert all(len(line) in (ends[0], ends[0] - 1) for line in lines[2:])
    assert lines[0].split() == ["Method", "law", "code", "Average"]
    assert lines[-3].split() == ["DUME", "94.0*", "91.0", "92.5*"]


def test_every_picture_has_the_numbers_behind_it(report):
    pictures = sorted(path.stem for path in report.glob("*.png"))
    assert pictures == ["routing", "scores", "sweep_ridge_lambda", "sweep_top_k", "sweep_window"]
    assert all((report / f"{name}.csv").exists() for name in pictures)
    cell = _read(report / "routing.csv")[2]
    assert cell == {"domain": "law", "layer": "1", "expert": "law", "tokens": "1", "share": "0.25"}
    assert [float(p["normalised_average"]) for p in _read(report / "sweep_window.csv")] == [
        pytest.approx(85),
        pytest.approx(92.5),
    ]


@pytest.mark.parametrize("values", [(0.0, 0.01, 100.0), (0.01, 100.0), (0.0,)])
def test_a_lambda_of_0_stands_apart_on_a_logarithmic_axis(values, monkeypatch):
    figures = []
    monkeypatch.setattr(canvas, "save", lambda figure, path: figures.append(figure))
    plots.draw_sweep(
        "ridge_lambda", {"DUME": [(value, 90.0) for value in values]}, {}, Path("x.png")
    )
    ax = figures[0].axes[0]
    ax.figure.canvas.draw()
    assert [tick.get_text() for tick in ax.get_xticklabels()] == [f"{value:g}" for value in values]
    if any(values):
        assert ax.get_xscale() == "log"
        places = [ax.transData.transform((x, 90.0))[0] for x in ax.lines[0].get_xdata()]
        gaps = [right - left for left, right in pairwise(places)]
        assert min(gaps) > 0.15 * ax.get_window_extent().width


def test_the_page_is_whole_in_itself(report):
    class Page(HTMLParser):
        images: tuple[str, ...] = ()
        linked: tuple[str, ...] = ()

        def handle_starttag(self, tag, attributes):
            values = dict(attributes)
            if tag == "img":
                self.images += (values["src"],)
            self.linked += tuple(values[k] for k in values if k in ("href", "srcset"))

    text = (report / "report.html").read_text()
    parser = Page()
    parser.feed(text)
    assert len(parser.images) == 5
    assert all(image.startswith("data:image/png;base64,") for image in parser.images)
    assert not parser.linked
    assert "<script" not in text
    assert '<td class="best">94.0</td>' in text
    assert "<th>Method</th><th>law</th><th>code</th><th>Average</th>" in text


def test_names_are_escaped_on_the_page(evaluation, tmp_path):
    def renamed(values):
        return {"<b>": values["law"], "code": values["code"]}

    rows = {row: renamed(values) for row, values in evaluation.perplexities.items()}
    rows[expert_row("<b>")] = rows.pop(expert_row("law"))
    evaluation = Evaluation(domains=("<b>", "code"), perplexities=rows)
    write_report(evaluation, tmp_path, model="<b>demo</b>")
    text = (tmp_path / "report.html").read_text()
    assert "<b>" not in text
    assert "&lt;b&gt;" in text


def test_the_same_evaluation_gives_the_same_bytes(evaluation, report, tmp_path):
    import matplotlib

    with matplotlib.rc_context({"lines.linewidth": 9.0, "figure.facecolor": "red"}):
        write_report(evaluation, tmp_path / "again", model="demo")
    first = {path.name: path.read_bytes() for path in report.iterdir()}
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert first == again


def test_pictures_leave_no_trace_in_matplotlib(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now fails
    with matplotlib.rc_context({"lines.linewidth": 9.0}):
        before = matplotlib.rcParams.copy()
        plots.draw_routing(COUNTS, tmp_path / "routing.png")
        assert matplotlib.rcParams.copy() == before


def test_every_layer_is_drawn_however_many(tmp_path, monkeypatch):
    counts = {domain: [[i + 1, 2] for i in range(plots.DEEP)] for domain in DOMAINS}
    drawn = []
    heat_map = canvas.heat_map

    def recording(ax, shares, **more):
        drawn.append((ax.get_title(), shares[0][0]))
        return heat_map(ax, shares, **more)

    monkeypatch.setattr(canvas, "heat_map", recording)
    plots.draw_routing(counts, tmp_path / "routing.png")
    assert drawn[1:] == [(f"layer {i}", (i + 1) / (i + 3)) for i in range(plots.DEEP)]
    assert drawn[0][0] == "all layers"
    assert (tmp_path / "routing.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("domains", "layers"), [(2, 12), (4, 4), (4, 11), (11, 4)])
def test_the_heat_maps_of_all_layers_are_shown_whole(domains, layers, tmp_path):
    counts = {f"documentation{i}": [[1] * domains] * layers for i in range(domains)}
    plots.draw_routing(counts, tmp_path / "routing.png")
    width = int.from_bytes((tmp_path / "routing.png").read_bytes()[16:20])
    assert width * SCALE < 76 * 16  # of the page; one row of five maps was not


def test_no_line_of_a_sweep_goes_through_its_legend(monkeypatch):
    figures = []
    monkeypatch.setattr(canvas, "save", lambda figure, path: figures.append(figure))
    curves = {label: [(k, 95.0 + k / 4) for k in (1, 2, 4)] for label in ("DUME", "DUME OOD")}
    plots.draw_sweep("top_k", curves, {"Oracle": 99.0, "Model averaging": 92.0}, Path("x.png"))
    figures[0].draw_without_rendering()
    ax = figures[0].axes[0]
    legend = next(own for own in (*figures[0].legends, ax.get_legend()) if own)
    assert not legend.get_window_extent().overlaps(ax.get_window_extent())


def test_a_deep_model_has_a_line_a_domain_over_its_layers(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    counts = {
        name: [[1, 3] if layer < 10 else [2, 2] for layer in range(30)] for name in ("law", "code")
    }
    lines = {}
    plot = Axes.plot

    def recording(ax, x, y, *style, label, **more):
        lines[label] = list(y)
        return plot(ax, x, y, *style, label=label, **more)

    monkeypatch.setattr(Axes, "plot", recording)
    plots.draw_routing(counts, tmp_path / "routing.png")
    assert lines == {"law": [25.0] * 10 + [50.0] * 20, "code": [75.0] * 10 + [50.0] * 20}
    width = int.from_bytes((tmp_path / "routing.png").read_bytes()[16:20])
    assert width < 1700  # the page shows it whole


def test_many_domains_share_one_heat_map_whatever_the_layers(tmp_path):
    names = [f"d{number:02}" for number in range(60)]
    counts = {name: [[1] * 60 for _ in range(8)] for name in names}
    plots.draw_routing(counts, tmp_path / "routing.png")
    size = (tmp_path / "routing.png").read_bytes()[16:24]
    assert int.from_bytes(size[:4]) < 4000
    assert int.from_bytes(size[4:]) < 3000


def test_a_report_needs_only_experts_and_one_row(evaluation, tmp_path):
    rows = {row: evaluation.perplexities[row] for row in ("dume", "expert_law", "expert_code")}
    write_report(Evaluation(domains=DOMAINS, perplexities=rows), tmp_path, model="demo")
    assert {path.name for path in tmp_path.iterdir()} == {
        "metrics.json",
        "table.md",
        "table.txt",
        "table.csv",
        "scores.png",
        "scores.csv",
        "report.html",
    }


def test_all_that_is_missing_is_named_and_nothing_is_written(evaluation, tmp_path):
    rows = dict(evaluation.perplexities)
    del rows[expert_row("code")]
    rows["dume"] = {"law": math.inf}
    broken = replace(
        evaluation,
        perplexities=rows,
        routing={"law": COUNTS["law"]},
        sweeps={"top_k": {"dume": {1: {"law": 3.0, "code": math.nan}}}},
    )
    with pytest.raises(InputError) as caught:
        write_report(broken, tmp_path / "report", model="demo")
    message = str(caught.value)
    for name in (
        "expert_code",
        "perplexities.dume.law",
        "perplexities.dume.code",
        "routing.code",
        "sweeps.top_k.dume.1.code",
    ):
        assert name in message
    assert not (tmp_path / "report").exists()
