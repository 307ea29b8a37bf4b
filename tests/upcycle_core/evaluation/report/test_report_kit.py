"""The report kit: one report in every format, what is escaped, and what may be said of numbers."""

import csv
import io
import json
import math
import re
from html.parser import HTMLParser

import pytest

from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.report.files import to_csv, write_markdown_page, write_report
from upcycle_core.evaluation.report.numbers import amount, best, interval, number, signed, slug
from upcycle_core.evaluation.report.page import STYLE, html_page, stamped
from upcycle_core.evaluation.report.parts import (
    Cell,
    Code,
    Figure,
    Notes,
    Report,
    Section,
    Table,
)
from upcycle_core.evaluation.report.text import markdown, markdown_page, terminal, terminal_table

SCORES = Table(
    ["Model", "law", "code"],
    [["Seed", Cell("80.0"), Cell("100.0", "best")], ["DUME", Cell("91.5", "best"), None]],
    "Higher is better.",
)


def draw(path):
    with canvas.new_figure(2.0, 1.0) as figure:
        figure.subplots().plot([0, 1])
        canvas.save(figure, path)


def report():
    data = Table(["step", "loss"], [[1, 0.1], [2, 1 / 3]])
    curve = Figure("curves/loss", "Loss by step", draw, data, "Falls.")
    return Report(
        "demo: scores",
        [
            Section("Scores", [SCORES, Notes(["Two models.", "One seed."])]),
            Section("", ["A sentence.", Section("Inside", [curve])]),
            Section("Long", [Table(["Item"], [["one"]])], page_only=True),
            Section("The recipe", [Code("name: demo\n", "yaml")]),
        ],
        "python -m flows.dume demo.yaml",
    )


@pytest.mark.parametrize("name", ["$_$", "from $5 to $10"])
def test_a_picture_shows_a_name_as_it_is_written(tmp_path, name):
    """Between dollar signs matplotlib reads formulas, and `$_$` is none."""
    with canvas.new_figure(3.0, 2.0) as figure:
        ax = figure.subplots()
        ax.plot([4, 400], [0, 1])
        canvas.log_axis(ax)
        ax.set_title(name)
        canvas.save(figure, tmp_path / "one.png")
        shown = [label.get_text() for label in ax.get_xticklabels()]
    assert not ax.title.get_parse_math()
    assert {"10", "100"} <= set(shown)


def test_a_terminal_shows_aligned_tables_stars_and_sentences():
    assert terminal(report().sections) == (
        "Scores\n\n"
        "Model    law    code\n"
        "-----  -----  ------\n"
        "Seed   80.0   100.0*\n"
        "DUME   91.5*      –\n\n"
        "Higher is better.\n\n"
        "Two models.\nOne seed.\n\n"
        "A sentence.\n\n"
        "Inside\n\n"
        "The recipe\n\n"
        "name: demo\n"
    )


def test_sentences_of_a_terminal_are_wrapped_and_tables_are_not():
    text = terminal([Section("", ["word " * 40, Table(["x"], [["y" * 200]])])])
    assert max(map(len, text.splitlines()[:2])) <= 100
    assert "y" * 200 in text


def test_markdown_is_a_page_with_the_command_that_made_it():
    assert markdown_page(report()) == (
        "# demo: scores\n\n"
        "Made by\n\n```\npython -m flows.dume demo.yaml\n```\n\n"
        "## Scores\n\n"
        "| Model | law | code |\n"
        "| --- | ---: | ---: |\n"
        "| Seed | 80.0 | **100.0** |\n"
        "| DUME | **91.5** | – |\n\n"
        "Higher is better.\n\n"
        "- Two models.\n- One seed.\n\n"
        "A sentence.\n\n"
        "### Inside\n\n"
        "![Loss by step](curves/loss.png)\n\n"
        "Falls.\n\n"
        "## The recipe\n\n"
        "```yaml\nname: demo\n```\n"
    )


class Page(HTMLParser):
    """What a browser would make of a page: tags, their attributes, ancestors and texts."""

    VOID = ("meta", "img", "wbr")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes), [name for name, _ in self.open]))
        if tag not in self.VOID:
            self.open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1][0], data))

    def of(self, tag):
        return [(attributes, within) for name, attributes, within in self.tags if name == tag]


@pytest.fixture
def page(tmp_path):
    write_report(report(), tmp_path, metrics={})
    return (tmp_path / "report.html").read_text()


def test_the_page_holds_everything_and_refers_to_nothing_outside(page):
    found = Page(page)
    assert found.open == []
    assert ("title", "demo: scores") in found.texts
    assert [(tag, text) for tag, text in found.texts if tag in ("h1", "h2", "h3")] == [
        *(("h1", "demo: scores"), ("h2", "Scores"), ("h3", "Inside"), ("h2", "Long")),
        ("h2", "The recipe"),
    ]
    assert ("pre", "python -m flows.dume demo.yaml") in found.texts
    assert [own["src"][:22] for own, _ in found.of("img")] == ["data:image/png;base64,"]
    assert found.of("img")[0][0]["alt"] == "Loss by step"
    allowed = {"lang", "charset", "name", "content", "class", "alt", "src", "width"}
    assert {name for _, attributes, _ in found.tags for name in attributes} <= allowed
    assert not {tag for tag, _, _ in found.tags} & {"script", "link", "iframe", "a"}
    assert "http" not in page
    assert "url(" not in page
    assert '<td class="best">91.5</td><td>–</td>' in page


def scrolls(tag):
    """Whether the page's style lets a tag scroll what does not fit into it."""
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", re.sub(r"/\*.*?\*/", "", STYLE))
    scrolling = [names for names, rule in rules if "overflow-x: auto" in rule]
    return any(tag in names.strip().split(", ") for names in scrolling)


def test_on_a_narrow_screen_what_is_wide_scrolls_by_itself(page):
    found = Page(page)
    (view,) = [own["content"] for own, _ in found.of("meta") if own.get("name") == "viewport"]
    assert "width=device-width" in view
    assert len(found.of("table")) == 2
    for tag in ("table", "img"):
        for _, within in found.of(tag):
            assert within[-1] in ("div", "figure")
    assert {own["class"] for own, _ in found.of("div")} == {"table"}
    assert scrolls("div.table")
    assert scrolls("figure")
    assert scrolls("pre")


def test_long_texts_wrap_and_the_columns_beside_them_do_not(tmp_path):
    rows = [["name " * 20, "word " * 20, "a\nb", "1"], ["two", "", "c", "2"]]
    table = Table(["Item", "Answer", "Lines", "n"], rows)
    text = html_page(Report("x", [Section("", [table])]), tmp_path)
    assert '<td class="text"></td><td class="text">c</td><td>2</td>' in text
    assert "<th>Item</th>" in text
    assert '<th class="text">Answer</th><th class="text">Lines</th><th>n</th>' in text
    assert re.search(r"td\.text \{[^}]*white-space: pre-wrap", STYLE)


def test_a_long_column_title_may_break_behind_an_underscore(tmp_path):
    table = Table(["Model", "law_and_order"], [["a_b", "1"]])
    text = html_page(Report("x", [Section("", [table])]), tmp_path)
    assert "<th>law_<wbr>and_<wbr>order</th>" in text
    assert "<td>a_b</td>" in text


def test_version_date_and_commit_stand_under_the_title_of_a_stamped_page(page):
    text = stamped(page, ("models:/demo/3", "22 November 2026", "commit <21c40f6>"))
    words = "models:/demo/3 · 22 November 2026 · commit &lt;21c40f6&gt;"
    assert f"<title>demo: scores · {words}</title>" in text
    assert f'<h1>demo: scores</h1>\n<p class="note">{words}</p>\n' in text
    assert len(text) == len(page) + len(f" · {words}") + len(f'\n<p class="note">{words}</p>')


def test_only_the_page_colours_what_is_better_or_worse(tmp_path):
    table = Table(["Task", "Champion"], [["a", Cell("+1", "better")], ["b", Cell("-1", "worse")]])
    section = Section("", [table])
    text = html_page(Report("x", [section]), tmp_path)
    assert '<td class="better">+1</td>' in text
    assert '<td class="worse">-1</td>' in text
    assert "| a | +1 |" in markdown([section])
    assert terminal([section]).splitlines()[2].split() == ["a", "+1"]


NASTY = "a|b <i>&amp; \\ x\ny"


def nasty():
    table = Table([NASTY, "n"], [[NASTY, Cell(NASTY, "best")]], NASTY)
    return Report(NASTY, [Section(NASTY, [table, Notes([NASTY])])])


def test_markdown_cells_keep_what_would_end_them_or_be_swallowed():
    text = markdown_page(nasty())
    safe = "a\\|b \\<i>\\&amp; \\\\ x y"
    assert f"| {safe} | **{safe}** |" in text.splitlines()
    assert text.startswith(f"# {safe}\n")
    assert f"- {safe}" in text.splitlines()
    # A table's line has as many bars as it has cells: those in the text are escaped.
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3


def test_html_shows_every_text_as_it_is(tmp_path):
    found = Page(html_page(nasty(), tmp_path))
    assert not {tag for tag, _, _ in found.tags} & {"i"}
    for tag in ("title", "h1", "h2", "th", "td", "p", "li"):
        assert (tag, NASTY) in found.texts


def test_a_terminal_cell_is_one_line():
    line = "a|b <i>&amp; \\ x y"
    assert terminal_table(Table(["A", "n"], [[NASTY, 1]])).splitlines()[2] == f"{line}  1"


def test_a_csv_comes_back_as_it_was():
    rows = [[NASTY, 0.1 + 0.2, None, True], ['"q", r', 1e-300, math.pi, 7]]
    table = Table(["name", "x", "y, unit", "z"], rows)
    head, *lines = csv.reader(io.StringIO(to_csv(table), newline=""))
    assert head == table.header
    assert [line[0] for line in lines] == [row[0] for row in rows]
    assert [float(line[1]) for line in lines] == [row[1] for row in rows]
    assert lines[0][2:] == ["", "True"]
    assert float(lines[1][2]) == math.pi


def test_a_csv_has_no_bare_carriage_return():
    text = to_csv(Table(["x"], [["yes\rno\r\nmaybe"], [Cell("1.0", "best")]]))
    assert text == 'x\n"yes\nno\nmaybe"\n1.0\n'


def test_best_is_the_best_as_it_is_printed():
    assert best({"a": 80.0, "b": 91.5, "c": None}) == "b"
    assert best({"a": 1.25, "b": 1.24}, digits=2, higher=False) == "b"
    assert best({"a": 80.04, "b": 80.01}, digits=2) == "a"


def test_a_tie_is_no_winner():
    assert best({"a": 80.04, "b": 80.01}) is None
    assert best({"a": 0.0, "b": 0.0, "c": 0.0}) is None
    assert best({"a": 80.0, "b": 80.0, "c": 79.0}) is None
    assert best({"a": 0.04, "b": -0.04}) is None  # both print as zero
    assert best({"a": 80.0, "b": None}) is None  # there is nobody to beat
    assert best({}) is None


def test_an_interval_excludes_zero_only_as_it_is_printed():
    assert interval(1.2, 0.3, 2.1) == ("+1.2 [+0.3, +2.1]", True)
    assert interval(-0.01, -0.02, 0.0) == ("+0.0 [+0.0, +0.0]", False)
    assert interval(0.5, -0.1, 1.1) == ("+0.5 [-0.1, +1.1]", False)
    assert interval(-0.0112, -0.0183, -0.0041, digits=2) == ("-0.011 [-0.018, -0.004]", True)
    # What no digit in reach shows is not said.
    assert interval(0.01, 0.00001, 0.02) == ("+0.0 [+0.0, +0.0]", False)


@pytest.mark.parametrize("power", range(1, 9))
def test_a_printed_interval_never_contradicts_what_is_said(power):
    low = 10.0**-power
    for ends in ((low, 2 * low), (-2 * low, -low), (0.0, low), (-low, low)):
        text, excludes = interval(sum(ends) / 2, *ends)
        left, right = (float(end) for end in re.search(r"\[(.+), (.+)\]", text).groups())
        assert excludes == (left > 0 or right < 0)
        assert not excludes or ends[0] > 0 or ends[1] < 0


def test_numbers_have_one_spelling():
    assert number(math.nan) == "nan"
    assert [number(91.44), number(91.4, 1.8), number(None), number(math.inf)] == [
        *("91.4", "91.4 ± 1.8", "–", "∞"),
    ]
    assert (number(-0.04), signed(-0.04), signed(1.0, digits=2)) == ("0.0", "+0.0", "+1.00")
    assert signed(None) == "–"
    assert [amount(n) for n in (0, 2560, 99_999, 500_000, 3_230_000, 7.2e9)] == [
        *("0", "2.6 k", "100.0 k", "0.50 M", "3.23 M", "7.20 B"),
    ]
    assert slug("--DUME, 4 (Test)") == "dume-4-test"


def test_the_files_are_whole_and_depend_on_the_report_alone(tmp_path):
    tables = {"more.csv": Table(["x"], [[1]])}
    for name in ("first", "second"):
        write_report(report(), tmp_path / name, metrics={"é": 1.5}, tables=tables)
    found = {
        str(path.relative_to(tmp_path / "first")): path.read_bytes()
        for path in (tmp_path / "first").rglob("*")
        if path.is_file()
    }
    assert set(found) == {
        *("metrics.json", "table.txt", "table.md", "report.html", "more.csv"),
        *("curves/loss.png", "curves/loss.csv"),
    }
    for name, content in found.items():
        assert (tmp_path / "second" / name).read_bytes() == content
    assert json.loads(found["metrics.json"]) == {"é": 1.5}
    assert found["curves/loss.csv"].decode() == f"step,loss\n1,0.1\n2,{1 / 3}\n"
    assert found["table.md"].decode() == markdown(report().sections)
    assert b"Long" in found["report.html"]
    assert b"Long" not in found["table.txt"]


def test_a_number_that_json_has_not_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_report(report(), tmp_path, metrics={"x": math.nan})


def test_a_markdown_page_has_its_figures_beside_it(tmp_path):
    write_markdown_page(report(), tmp_path / "out" / "demo.md")
    assert (tmp_path / "out" / "demo.md").read_text() == markdown_page(report())
    assert (tmp_path / "out" / "curves" / "loss.png").read_bytes().startswith(b"\x89PNG")
