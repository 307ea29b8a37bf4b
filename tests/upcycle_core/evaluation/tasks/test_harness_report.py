"""What people see of a task evaluation: files, tables, picture and page."""

import csv
import json
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pyarrow.parquet as parquet
import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.report.parts import Cell, mark_of
from upcycle_core.evaluation.tasks import plot
from upcycle_core.evaluation.tasks import report as task_report
from upcycle_core.evaluation.tasks.items import Item
from upcycle_core.evaluation.tasks.paired import Flip
from upcycle_core.evaluation.tasks.report import difference_table, score_table, write_task_report
from upcycle_core.evaluation.tasks.results import TaskEvaluation, metrics
from upcycle_core.evaluation.tasks.score import TaskScore

TITLES = {
    "expert_law": "law expert",
    "seed": "Seed",
    "dume": "DUME <new>",
    "champion": "Champion",
    "oracle": "Oracle",
}


def score(*values, **more):
    return TaskScore(
        **{"metric": "acc", "higher_is_better": True, "items": 4, **more}, values=values
    )


def bytes_score(value):
    return TaskScore(metric="bits_per_byte", higher_is_better=False, values=(value,), items=2)


def items(scores, *, task="quiz", metric="acc"):
    return [
        Item(
            task=task,
            subtask="",
            category="",
            id=str(name),
            seed=0,
            prompt=f"<script>{name}</script> " + "x" * 400 + " the end",
            target="yes\rno",
            response="yes" if value else "<b>no</b>",
            metric=metric,
            score=float(value),
        )
        for name, value in enumerate(scores)
    ]


@pytest.fixture
def evaluation():
    kinds = {"easy": 0.75, "hard": 0.25}
    rows = {
        "expert_law": {"quiz": score(0.9), "text": bytes_score(1.2)},
        "seed": {"quiz": score(0.45, categories={"easy": 0.0}), "text": bytes_score(2.4)},
        "dume": {"quiz": score(0.7, 0.8, categories=kinds, truncated=3), "text": bytes_score(1.5)},
        "champion": {"quiz": score(0.6)},
        "oracle": {"quiz": score(0.95), "text": bytes_score(1.0)},
    }
    return TaskEvaluation(
        tasks=("quiz", "text"),
        titles=TITLES,
        scores=rows,
        domains={"quiz": "law"},
        items={
            "dume": [*items([1, 1, 1, 1]), *items([2, 3], task="text", metric="bits_per_byte")],
            "champion": items([0, 0, 0, 0]),
            "seed": [*items([1, 0, 1, 1]), *items([1, 2], task="text", metric="bits_per_byte")],
        },
        subject="dume",
        rivals=("champion", "seed"),
    )


@pytest.fixture
def report(evaluation, tmp_path):
    write_task_report(evaluation, tmp_path / "report", model="demo")
    return tmp_path / "report"


def matched(evaluation):
    """The same with the scores that its items have."""
    scores = {row: dict(own) for row, own in evaluation.scores.items()}
    for row, own in evaluation.items.items():
        for task in {item.task for item in own}:
            values = [item.score for item in own if item.task == task]
            mean = sum(values) / len(values)
            scores[row][task] = replace(scores[row][task], values=(mean,))
    return replace(evaluation, scores=scores)


def cells(text, start):
    """The cells of the first line of a Markdown table that starts so."""
    line = next(line for line in text.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_scores_are_shown_in_percent_and_lower_is_better_as_they_are(report):
    text = (report / "table.md").read_text()
    assert cells(text, "| Model") == ["Model", "quiz", "text ↓"]
    assert cells(text, "| DUME") == ["DUME \\<new>", "**75.0 ± 7.1**", "1.50"]
    assert cells(text, "| Champion") == ["Champion", "60.0", "–"]


def test_points_of_a_hundred_are_shown_as_they_are(evaluation, tmp_path, monkeypatch):
    rows = {
        row: {"quiz": score(*(100 * value for value in own["quiz"].values), metric="bleu_max")}
        for row, own in evaluation.scores.items()
    }
    given = replace(evaluation, tasks=("quiz",), scores=rows, items={}, rivals=())
    write_task_report(given, tmp_path / "report", model="demo")
    text = (tmp_path / "report" / "table.md").read_text()
    assert cells(text, "| Model") == ["Model", "quiz ↑"]
    assert cells(text, "| DUME") == ["DUME \\<new>", "**75.00 ± 7.07**"]
    [panel] = drawn(metrics(given), tmp_path, monkeypatch)
    assert "bleu_max, higher is better" in [text.get_text() for text in panel.texts]


def test_best_leaves_out_the_oracle_and_the_domain_s_own_expert(report):
    text = (report / "table.md").read_text()
    assert cells(text, "| Oracle") == ["Oracle", "95.0", "1.00"]
    # The text is nobody's own: there an expert may be the best.
    assert cells(text, "| law expert") == ["law expert", "90.0", "**1.20**"]


def test_a_task_that_nobody_wins_marks_nobody(evaluation):
    rows = {row: {**own, "quiz": score(0.0)} for row, own in evaluation.scores.items()}
    rows["seed"]["text"] = bytes_score(1.204)  # prints as the expert's 1.20
    table = score_table(metrics(replace(evaluation, scores=rows)))
    assert {mark_of(cell) for row in table.rows for cell in row} == {None}


def test_an_interval_that_excludes_zero_shows_it(evaluation):
    found = metrics(evaluation)
    found["differences"]["seed"]["text"] |= {"mean": -0.011, "low": -0.018, "high": -0.004}
    assert difference_table(found).rows[1][2] == Cell("-0.011 [-0.018, -0.004] *", "better")


def test_normalised_scores_follow_with_their_average(report):
    text = (report / "table.md").read_text().split("## Normalised")[1]
    assert cells(text, "| Model") == ["Model", "quiz", "Average"]
    assert cells(text, "| law expert") == ["law expert", "100.0", "**100.0**"]
    assert cells(text, "| DUME") == ["DUME \\<new>", "**83.3 ± 7.9**", "83.3 ± 7.9"]


def test_differences_carry_their_interval_and_a_mark_when_it_excludes_zero(evaluation, tmp_path):
    write_task_report(matched(evaluation), tmp_path / "matched", model="demo")
    assert '<td class="better">+100.0 [+100.0, +100.0] *</td>' in (
        tmp_path / "matched" / "report.html"
    ).read_text(encoding="utf-8")
    text = (tmp_path / "matched" / "table.md").read_text().split("## Differences")[1]
    assert cells(text, "| Task") == ["Task", "Champion", "Seed"]
    assert cells(text, "| quiz") == [
        "quiz",
        "+100.0 [+100.0, +100.0] *",
        "+25.0 [+0.0, +75.0]",
    ]
    assert cells(text, "| text") == ["text", "–", "+1.00 [+1.00, +1.00] *"]
    assert "no mean over items" not in text
    rows = difference_table(metrics(matched(evaluation))).rows
    marks = {task: list(map(mark_of, cells)) for task, *cells in rows}
    assert marks == {"quiz": ["better", None], "text": [None, "worse"]}


def test_a_whole_text_s_score_has_no_difference_and_the_caption_says_so(evaluation):
    found = matched(evaluation)
    found.scores["dume"]["text"] = bytes_score(2.1)  # by bytes, not the items' 2.5
    table = difference_table(metrics(found))
    assert table.rows[1] == ["text", None, None]
    assert table.caption.endswith(
        "A score that is no mean over items, such as a whole text's, has none."
    )


def test_the_terminal_table_is_aligned_and_ends_in_notes(report):
    lines = (report / "table.txt").read_text().splitlines()
    assert lines[2].split() == ["Model", "quiz", "text", "↓"]
    assert lines[6].split() == ["DUME", "<new>", "75.0", "±", "7.1*", "1.50"]
    assert lines[4].split() == ["law", "expert", "90.0", "1.20*"]
    # Numbers end in one column; the star stands behind it.
    assert lines[4].index("1.20*") == lines[6].index("1.50") == lines[8].index("1.00")
    assert "DUME <new>, quiz: 3 of 4 prompts were cut to fit the model." in lines
    assert "Champion was not evaluated on text." in lines


def test_an_undefined_average_is_a_dash_with_its_reason(evaluation, tmp_path):
    rows = {**evaluation.scores, "expert_law": {"quiz": score(0.0)}}
    write_task_report(replace(evaluation, scores=rows), tmp_path, model="demo")
    text = (tmp_path / "table.md").read_text()
    assert cells(text.split("## Normalised")[1], "| DUME") == ["DUME \\<new>", "–", "–"]
    assert "quiz cannot be normalised: the law expert scores 0" in text
    assert "the law expert scores 0" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "metrics.json").read_text())["normalised_average"]["dume"] is None


def read(path):
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_numbers_behind_the_picture_are_unrounded(report):
    lines = read(report / "scores.csv")
    line = next(one for one in lines if (one["row"], one["task"]) == ("dume", "quiz"))
    assert float(line["mean"]) == pytest.approx(0.75, rel=1e-15)
    assert float(line["normalised"]) == pytest.approx(250 / 3, rel=1e-15)
    assert (line["seeds"], line["truncated"], line["higher_is_better"]) == ("2", "3", "True")
    assert len(lines) == 9


def test_every_item_and_every_flip_is_kept(evaluation, report):
    assert parquet.read_table(report / "items.parquet").to_pylist() == [
        {"model": model, **asdict(item)} for model, own in evaluation.items.items() for item in own
    ]
    lines = read(report / "won-and-lost.csv")
    assert [(one["rival"], one["task"], one["id"], float(one["gain"])) for one in lines] == [
        *(("champion", "quiz", str(name), 1.0) for name in range(4)),
        ("seed", "quiz", "1", 1.0),
        ("seed", "text", "0", -1.0),
        ("seed", "text", "1", -1.0),
    ]
    assert lines[0]["target"] == "yes\nno"
    assert len(lines[0]["prompt"]) > 400


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.images, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.images += [values["src"]] if tag == "img" else []
        self.links += [values[name] for name in values if name in ("href", "srcset")]


def test_the_page_is_whole_in_itself_and_escapes_what_models_say(report):
    text = (report / "report.html").read_text()
    found = Page(text)
    assert len(found.images) == 1
    assert found.images[0].startswith("data:image/png;base64,")
    assert not found.links
    assert not {"script", "b", "new"} & set(found.tags)
    assert "&lt;b&gt;no&lt;/b&gt;" in text
    assert '<td class="best">75.0 ± 7.1</td>' in text
    assert "<td>law expert</td>" in text


def test_the_page_shows_categories_counts_and_examples(report):
    text = (report / "report.html").read_text()
    assert "<td>easy</td><td>–</td><td>0.0</td><td>75.0</td><td>–</td><td>–</td>" in text
    assert "<td>quiz</td><td>4</td><td>0</td><td>0</td>" in text
    assert "<td>quiz</td><td>1</td><td>0</td><td>3</td>" in text
    assert text.count("<td>won 1 : 0</td>") == 5
    # What was won of a whole text is counted, not shown.
    assert "<td>text</td><td>0</td><td>2</td><td>0</td>" in text
    assert "<td>text/0</td>" not in text
    assert " […] " in text
    assert "x" * 160 not in text


def test_long_texts_are_cut_in_the_middle():
    text = "begin" + "x" * 1000 + "end"
    assert task_report.cut("y" * 300) == "y" * 300
    assert task_report.cut(text) == "begin" + "x" * 145 + " […] " + "x" * 147 + "end"


def flip(task, name, gain):
    texts = dict.fromkeys(("prompt", "target", "first_response", "second_response"), "")
    scores = {"first_score": max(gain, 0.0), "second_score": max(-gain, 0.0)}
    return Flip(task=task, subtask="", id=str(name), **texts, **scores, gain=gain)


def test_examples_are_wins_and_losses_of_every_task():
    many = [*(flip("a", n, 1.0) for n in range(50)), flip("b", 0, 0.5)]
    many += [*(flip("b", n, -n / 10) for n in range(1, 5)), flip("c", 0, -1.0)]
    assert [(one.task, one.gain) for one in task_report.examples(many)] == [
        *(("a", 1.0), ("b", 0.5), ("a", 1.0), ("a", 1.0), ("a", 1.0)),
        *(("b", -0.4), ("c", -1.0), ("b", -0.3), ("b", -0.2), ("b", -0.1)),
    ]


def test_examples_of_one_kind_fill_the_room_of_the_other():
    assert len(task_report.examples([flip("a", n, 1.0) for n in range(50)])) == 10
    losses = [flip("a", n, -1.0) for n in range(50)]
    assert len(task_report.examples([flip("a", 99, 1.0), *losses])) == 10
    assert task_report.examples([flip("a", 99, 1.0), *losses])[0].id == "99"


def drawn(found, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(canvas, "save", lambda figure, path: figures.append(figure))
    plot.draw_tasks(found, tmp_path / "scores.png")
    return [ax for ax in figures[0].axes if ax.axison]


def test_the_picture_has_a_panel_a_task_and_colours_what_matters(evaluation, tmp_path, monkeypatch):
    panels = drawn(metrics(evaluation), tmp_path, monkeypatch)
    assert [ax.get_title(loc="left") for ax in panels] == ["quiz", "text ↓"]
    bars = panels[0].patches
    assert [bar.get_width() for bar in bars] == pytest.approx([90, 45, 75, 60, 95])
    from matplotlib.colors import to_hex

    colours = [to_hex(bar.get_facecolor()) for bar in bars]
    assert colours == [
        *(canvas.NEUTRAL, canvas.FAINT, *canvas.ACCENTS[:2], canvas.NEUTRAL),
    ]
    assert [bar.get_width() for bar in panels[1].patches] == pytest.approx([1.2, 2.4, 1.5, 1.0])
    assert "–" in [text.get_text() for text in panels[1].texts]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == list(TITLES.values())


def test_a_bar_stands_beside_its_name_though_others_are_missing(evaluation, tmp_path, monkeypatch):
    panels = drawn(metrics(evaluation), tmp_path, monkeypatch)
    assert [ax.get_ylim() for ax in panels] == [(4.5, -0.5)] * 2
    rows = [round(bar.get_y() + bar.get_height() / 2) for bar in panels[1].patches]
    assert rows == [0, 1, 2, 4]


def test_every_task_is_drawn_however_many(evaluation, tmp_path, monkeypatch):
    tasks = tuple(f"task {n}" for n in range(7))
    rows = {"dume": {task: score(0.0) for task in tasks}}
    found = metrics(TaskEvaluation(tasks=tasks, titles={}, scores=rows, subject="dume"))
    assert len(drawn(found, tmp_path, monkeypatch)) == 7


def test_the_same_evaluation_gives_the_same_bytes(evaluation, report, tmp_path):
    import matplotlib

    with matplotlib.rc_context({"lines.linewidth": 9.0, "figure.facecolor": "red"}):
        write_task_report(evaluation, tmp_path / "again", model="demo")
    first = {path.name: path.read_bytes() for path in report.iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert sorted(first) == [
        "items.parquet",
        "metrics.json",
        "report.html",
        "scores.csv",
        "scores.png",
        "table.md",
        "table.txt",
        "won-and-lost.csv",
    ]


def test_the_picture_needs_no_pyplot(evaluation, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now fails
    plot.draw_tasks(metrics(evaluation), tmp_path / "scores.png")
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_needs_only_scores_of_one_row(tmp_path):
    rows = {"dume": {"quiz": score(0.5)}}
    one = TaskEvaluation(tasks=("quiz",), titles={}, scores=rows, subject="dume")
    write_task_report(one, tmp_path, model="demo")
    assert not (tmp_path / "items.parquet").exists()
    text = (tmp_path / "report.html").read_text()
    assert "Normalised scores" not in text
    assert "Won and lost" not in text
    assert "50.0" in text


def test_nothing_is_written_where_models_cannot_be_compared(evaluation, tmp_path):
    other = {**evaluation.items, "champion": items([0, 0])}
    with pytest.raises(InputError, match="quiz/2"):
        write_task_report(replace(evaluation, items=other), tmp_path / "report", model="demo")
    with pytest.raises(InputError, match="nobody"):
        write_task_report(replace(evaluation, subject="nobody"), tmp_path / "report", model="demo")
    assert not (tmp_path / "report").exists()


def test_a_sweep_has_a_table_and_where_all_is_normalised_a_picture(evaluation, tmp_path):
    points = {
        value: {"quiz": score(right), "text": bytes_score(1.5)}
        for value, right in ((1.0, 0.75), (2.0, 0.63))
    }
    swept = replace(evaluation, sweeps={"top_k": points})
    write_task_report(swept, tmp_path, model="pico")
    page = (tmp_path / "report.html").read_text()
    assert "Effect of k" in page
    with (tmp_path / "sweep_top_k.csv").open() as file:
        curve = [[float(value) for value in line] for line in list(csv.reader(file))[1:]]
    assert curve == [[1.0, pytest.approx(100 * 0.75 / 0.9)], [2.0, pytest.approx(70.0)]]
    assert (tmp_path / "sweep_top_k.png").stat().st_size > 5000
    plain = replace(swept, domains={})
    write_task_report(plain, tmp_path / "plain", model="pico")
    assert "63.0" in (tmp_path / "plain" / "report.html").read_text()
    assert not (tmp_path / "plain" / "sweep_top_k.png").exists()
