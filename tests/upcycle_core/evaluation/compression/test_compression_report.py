"""Quality against size: arithmetic by hand, the choice against a slow search, the files."""

import itertools
import json
import math
from dataclasses import replace

import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.compression import results
from upcycle_core.evaluation.compression.report import (
    sections,
    verdict,
    write_compression_report,
)
from upcycle_core.evaluation.compression.results import Point, Sweep
from upcycle_core.evaluation.report.canvas import new_figure
from upcycle_core.evaluation.report.labels import Label, place_labels
from upcycle_core.evaluation.report.text import markdown

QUANTISED = {"codec": "quantised", "bits": 4}


def sweep(source: str = "DUME") -> Sweep:
    """Original: 80 and 100 percent of the experts, 90 on average; 1000 bytes, 600 of experts."""
    return Sweep(
        source=source,
        domains=("law", "code"),
        experts={"law": 20.0, "code": 10.0},
        original={"law": 25.0, "code": 10.0},
        original_bytes=1000,
        original_expert_bytes=600,
        points={
            # The first is larger than the original, the last is broken beyond measure.
            "all": point({"codec": "sparse", "drop_rate": 0.0}, 1600, 25.0, 10.0),
            "sp90": point({"codec": "sparse", "drop_rate": 0.9}, 700, 26.0, 10.0),
            "q4": point({**QUANTISED, "group_size": None}, 640, 25.0, 10.0, formula=639.0),
            "q1": point({"codec": "quantised", "bits": 1}, 540, 40.0, 20.0),
            "r4": point({"codec": "low_rank", "rank": 4}, 560, 25.0, 10.2),
            "e99": point({"codec": "low_rank", "energy": 0.99}, 800, 25.0, 10.0),
            "gone": point({"codec": "sparse", "drop_rate": 0.99}, 520, 80.0, math.inf),
        },
    )


def point(codec, size, law, code, formula=None) -> Point:
    perplexity = {"law": law, "code": code}
    return Point(codec=codec, bytes=size, perplexity=perplexity, formula_bytes=formula)


def cosines() -> dict:
    square = [[1.0, 0.999, 0.9991], [0.999, 1.0, 0.998], [0.9991, 0.998, 1.0]]
    layers = {str(layer): square for layer in range(3)}
    matrices = {layer: dict.fromkeys(("gate", "up", "down"), square) for layer in layers}
    return {"names": ["base", "E1", "E2"], "layers": layers, "matrices": matrices}


def test_every_number_by_hand():
    found = json.loads(json.dumps(results.metrics(sweep(), 1.0), allow_nan=False))
    assert found["original"]["normalised"] == {"law": 80.0, "code": 100.0}
    assert (found["original"]["normalised_average"], found["least_average"]) == (90.0, 89.1)
    q1, q4, gone = (found["points"][name] for name in ("q1", "q4", "gone"))
    assert q1["normalised"] == {"law": 50.0, "code": 50.0}
    assert q1["change_percent"] == pytest.approx(100 * (50 - 90) / 90)
    assert q1["percent_of_original"] == 54.0
    assert q1["experts_percent_of_original"] == pytest.approx(100 * (540 - 400) / 600)
    assert (q1["formula_bytes"], q1["percent_above_formula"]) == (None, None)
    assert q4["percent_above_formula"] == pytest.approx(100 / 639)
    assert q4["codec"] == QUANTISED
    assert gone["perplexity"] == {"law": 80.0, "code": None}
    assert gone["normalised"] == {"law": 25.0, "code": 0.0}
    assert gone["normalised_average"] == 12.5


def test_the_smallest_within_is_what_a_slow_search_finds():
    # r4 keeps (80 + 98.04) / 2 = 89.02: within 1.1 % of 90, not within 1 %.
    expected = {0.0: "q4", 1.0: "q4", 1.1: "r4", 44.0: "r4", 45.0: "q1", 90.0: "gone"}
    assert {t: results.smallest_within(sweep(), t) for t in expected} == expected
    for kept in itertools.combinations(sweep().points, 3):
        some = replace(sweep(), points={name: sweep().points[name] for name in kept})
        for tolerance in (0.0, 1.0, 1.1, 50.0):
            best = None
            for name in kept:
                p = some.points[name]
                score = (100 * 20 / p.perplexity["law"] + 100 * 10 / p.perplexity["code"]) / 2
                if score >= 90 * (1 - tolerance / 100) and p.bytes < min(
                    1000, some.points[best].bytes if best else 1000
                ):
                    best = name
            assert results.smallest_within(some, tolerance) == best


def test_of_equal_sizes_the_better_and_nothing_larger_than_the_original_is_chosen():
    tied = {"r": point(QUANTISED, 640, 25.0, 10.05), "s": point(QUANTISED, 640, 25.0, 10.0)}
    assert results.smallest_within(replace(sweep(), points=tied), 1.0) == "s"
    large = {"all": sweep().points["all"]}
    assert results.smallest_within(replace(sweep(), points=large), 1.0) is None
    assert "Nothing that is smaller" in verdict(replace(sweep(), points=large), 1.0)


def test_lines_of_the_plot_are_codecs_and_their_variants():
    largest = {"codec": "sparse", "drop_rate": 0.9, "keep": "magnitude", "rescale": False}
    groups = {"codec": "quantised", "bits": 2, "group_size": 32}
    more = {"m": point(largest, 1, 1, 1), "g": point(groups, 1, 1, 1)}
    found = results.by_series(replace(sweep(), points={**sweep().points, **more}))
    assert found == {
        "sparse, random drop": ["gone", "sp90", "all"],
        "quantised": ["q1", "q4"],
        "low rank": ["r4", "e99"],
        "sparse, largest kept, not rescaled": ["m"],
        "quantised, groups of 32": ["g"],
    }
    unsaid = {"codec": "sparse", "drop_rate": 0.5, "keep": None, "rescale": None}
    assert results.series(unsaid) == "sparse, random drop"  # as a recipe resolves it
    labels = [results.setting(p.codec) for p in sweep().points.values()]
    assert labels == ["0", "0.9", "4 bit", "1 bit", "r 4", "99 % energy", "0.99"]


def test_the_table_has_the_original_first_and_marks_the_chosen_one():
    text = markdown(sections([sweep()], {}, 1.0))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[2] == "| Original | – | 0.00 | 100.0 | 100.0 | 25.00 | 10.00 | 90.00 | – |  |"
    line = "| sparse, random drop | "
    assert rows[3].startswith(f"{line}0 | 0.00 | 160.0 | 200.0 |")
    assert rows[5] == f"{line}0.99 | 0.00 | 52.0 | 20.0 | 80.00 | ∞ | 12.50 | -86.11 |  |"
    marked = [row for row in rows if row.endswith("✓ |")]
    assert [row.split(" | ")[:2] for row in marked] == [["| quantised", "4 bit"]]
    assert "quantised, 4 bit (q4), 0.00 MB or 64.0 % of it, +0.00 %." in text


def test_a_report_is_whole_and_depends_on_its_numbers_alone(tmp_path):
    sweeps = [sweep("With prior finetuning"), sweep("Without <any>")]
    for name in ("first", "second"):
        write_compression_report(
            tmp_path / name, sweeps, {"DUME, 4": cosines()}, model="demo", tolerance=1.0
        )
    text = ["metrics.json", "report.html", "table.md", "table.txt"]
    text += ["sweep.csv", "cosine_dume-4.csv"]
    pictures = ["sweep.png", "cosine_dume-4.png"]
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert files == sorted([*text, *pictures])
    for file in files:
        content = (tmp_path / "first" / file).read_bytes()
        assert content == (tmp_path / "second" / file).read_bytes()
        assert file not in pictures or content.startswith(b"\x89PNG")
    page = (tmp_path / "first" / "report.html").read_text()
    assert page.count("data:image/png") == 2
    assert "Without &lt;any&gt;" in page
    assert "<script" not in page
    assert "http" not in page
    assert page.count('<td class="chosen">✓</td>') == 2
    lines = (tmp_path / "first" / "sweep.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * (1 + 7)
    assert lines[1] == "With prior finetuning,original,,,1000,100.0,90.0"
    assert lines[2].startswith(
        'With prior finetuning,gone,"sparse, random drop",0.99,520,52.0,12.5'
    )
    metrics = json.loads((tmp_path / "first" / "metrics.json").read_text())
    assert metrics["sweeps"]["Without <any>"]["chosen"] == "q4"
    assert metrics["cosines"]["DUME, 4"] == cosines()


def test_everything_that_is_wrong_is_said_at_once_and_nothing_is_written(tmp_path):
    bad = replace(
        sweep(),
        experts={"law": math.inf, "code": 10.0},
        original={"law": 25.0},
        original_expert_bytes=2000,
        points={"q": point(QUANTISED, 0, math.nan, 10.0)},
    )
    with pytest.raises(InputError) as refused:
        write_compression_report(tmp_path / "out", [bad, bad], {}, model="demo", tolerance=1.0)
    for words in (
        "sweeps.DUME.experts.law",
        "sweeps.DUME.original =",
        "original_expert_bytes",
        "points.q.bytes",
        "points.q.perplexity.law",
        "a name of its own",
    ):
        assert words in str(refused.value)
    with pytest.raises(InputError, match="nothing to report"):
        write_compression_report(tmp_path / "out", [], {}, model="demo", tolerance=1.0)
    assert not (tmp_path / "out").exists()


def test_labels_keep_clear_of_each_other_of_points_and_of_lines():
    # One unit is some 40 points high: each of these has something where its label would go first.
    points = [
        Label(2.0, 14.0, "first of two", "black"),
        Label(2.2, 14.0, "second of two", "black"),
        Label(1.0, 12.5, "below another", "black"),
        Label(1.0, 12.7, "chosen", "black", bold=True),
        Label(4.0, 12.0, "below a line", "black"),
        Label(3.0, 10.5, "on a steep line", "black"),
    ]
    steep, far = Label(3.0, 11.5, "its end", "black"), Label(2.0, 99.0, "not seen", "red")
    with new_figure(5.0, 4.0) as figure:
        ax = figure.subplots()
        ax.set_xlim(0, 5)
        ax.set_ylim(10, 15)
        figure.draw_without_rendering()
        curves = [*([point] for point in points[:-1]), [points[-1], steep], [far]]
        place_labels(ax, curves, heights=[12.2])
        boxes = {text.get_text(): text.get_tightbbox() for text in ax.texts}
        places = [ax.transData.transform((p.x, p.y)) for p in [*points, steep]]
        places += [ax.transData.transform((3.0, 10.5 + 0.05 * step)) for step in range(20)]
        line = ax.transData.transform((0, 12.2))[1]
    assert set(boxes) == {label.text for label in [*points, steep]}
    for one, other in itertools.combinations(boxes.values(), 2):
        assert not one.overlaps(other)
    for box, (x, y) in itertools.product(boxes.values(), places):
        assert not box.contains(x, y)
    for box in boxes.values():
        assert not box.y0 < line < box.y1
