"""The report on tasks as one self-contained HTML page: nothing fetched, no script."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from upcycle_core.evaluation.tasks import table
from upcycle_core.evaluation.tasks.paired import Flip
from upcycle_core.evaluation.tasks.plot import CHAMPION
from upcycle_core.evaluation.tasks.table import Cell
from upcycle_core.evaluation.text.page import STYLE, document, html_table, image

EXAMPLES = 10
"""Items that are shown of each rival, at most."""
SHOWN = 300
"""Characters of a text that are shown; longer ones are cut in the middle."""

_STYLE = (
    STYLE
    + """body { max-width: 76rem; } th, td { padding: .25rem .6rem; }
td { white-space: nowrap; } th { vertical-align: bottom; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
div.wide { overflow-x: auto; margin-bottom: .8rem; }
td:first-child, th:first-child { position: sticky; left: 0; background: #fff; white-space: nowrap; }
td.better { background: #e9f7ec; } td.worse { background: #fdeeee; }
table.items th, table.items td { text-align: left; }
table.items td { vertical-align: top; font-size: .85rem; }
table.items td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 8rem; }
"""
)


def render(found: Mapping[str, Any], flips: Mapping[str, Sequence[Flip]], picture: Path) -> str:
    """The page.

    Args:
        found: What ``results.metrics`` gave.
        flips: What ``results.flips`` gave.
        picture: The PNG of the scores.

    Returns:
        HTML with the picture embedded.
    """
    subject = found["titles"][found["subject"]]
    return document(
        "Task evaluation",
        [
            f"<h1>Task evaluation of {escape(subject)}</h1>",
            *_score_parts(found),
            _wide(image(picture, "Scores of every model on every task")),
            _note(_legend(found)),
            *_difference_parts(found),
            *_category_parts(found),
            *_flip_parts(found, flips),
            "<h2>Tasks</h2>",
            _about(found),
            *(_note(note) for note in table.notes(found)),
        ],
        style=_STYLE,
    )


def cut(text: str) -> str:
    """At most ``SHOWN`` characters of a text: its beginning and its end."""
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]} […] {text[-half:]}"


def examples(flips: Sequence[Flip]) -> list[Flip]:
    """The items that are shown: up to half of them won, clearest first, then up to half lost.

    Tasks take turns, so that one with many items does not hide the others.
    """
    won = _in_turns([flip for flip in flips if flip.gain > 0])
    lost = _in_turns([flip for flip in reversed(flips) if flip.gain < 0])
    half = EXAMPLES // 2
    won = won[: EXAMPLES - min(half, len(lost))]
    return won + lost[: EXAMPLES - len(won)]


def _in_turns(flips: Sequence[Flip]) -> list[Flip]:
    ranked = []
    for _, group in groupby(sorted(flips, key=lambda flip: flip.task), lambda flip: flip.task):
        ranked += list(enumerate(group))
    return [flip for _, flip in sorted(ranked, key=lambda pair: pair[0])]


def _score_parts(found: Mapping[str, Any]) -> list[str]:
    titles = found["titles"]
    parts = [
        "<h2>Scores</h2>",
        _cells(table.header(found, list(found["tasks"])), titles, table.score_cells(found)),
        _note(table.SCORES),
    ]
    if found["normalised"]:
        head = ["Model", *table.normalised_tasks(found), "Average"]
        cells = _cells(head, titles, table.normalised_cells(found))
        parts += ["<h2>Normalised scores</h2>", cells, _note(table.NORMALISED)]
    return parts


def _legend(found: Mapping[str, Any]) -> str:
    parts = [f"Blue: {found['titles'][found['subject']]}"]
    if CHAMPION in found["scores"] and found["subject"] != CHAMPION:
        parts.append("orange: the champion")
    if any(rival != CHAMPION for rival in found["rivals"]):
        parts.append("dark: what it is compared with item by item")
    if found["normalised"]:
        parts.append("dotted: the domain's own expert")
    return "; ".join(parts) + "."


def _difference_parts(found: Mapping[str, Any]) -> list[str]:
    cells = table.difference_cells(found)
    if not cells:
        return []
    titles = found["titles"]
    head = ["Task", *(titles[rival] for rival in found["rivals"])]
    return [
        "<h2>Differences item by item</h2>",
        _cells(head, {task: task for task in cells}, cells),
        _note(table.DIFFERENCES.format(subject=titles[found["subject"]])),
    ]


def _category_parts(found: Mapping[str, Any]) -> list[str]:
    parts = []
    for task, about in found["tasks"].items():
        measured = {
            row: own[task]["categories"] for row, own in found["scores"].items() if task in own
        }
        names = sorted({name for categories in measured.values() for name in categories})
        if not names:
            continue
        rows = {
            name: [
                _category(categories.get(name), higher=about["higher_is_better"])
                for categories in measured.values()
            ]
            for name in names
        }
        head = ["Category", *(found["titles"][row] for row in measured)]
        parts += [f"<h3>{escape(task)}</h3>", _cells(head, {name: name for name in names}, rows)]
    return ["<h2>By category</h2>", *parts] if parts else []


def _category(value: float | None, *, higher: bool) -> Cell:
    return Cell(table.UNKNOWN if value is None else table.number(value, higher=higher))


def _flip_parts(found: Mapping[str, Any], flips: Mapping[str, Sequence[Flip]]) -> list[str]:
    subject, parts = found["titles"][found["subject"]], []
    for rival, counts in found["differences"].items():
        if not counts:
            continue
        title = found["titles"][rival]
        rows = [
            (
                task,
                [
                    f"<td>{number:,}</td>"
                    for number in (
                        count["won"],
                        count["lost"],
                        count["items"] - count["won"] - count["lost"],
                    )
                ],
            )
            for task, count in counts.items()
        ]
        parts += [
            f"<h3>{escape(subject)} against {escape(title)}</h3>",
            _wide(html_table(["Task", "Won", "Lost", "Same score"], rows)),
            _examples(subject, title, examples(_readable(found, flips[rival]))),
        ]
    return ["<h2>Won and lost</h2>", *parts] if parts else []


def _readable(found: Mapping[str, Any], flips: Sequence[Flip]) -> list[Flip]:
    """Without the tasks whose score is of a whole text: nobody sees there what was won."""
    return [flip for flip in flips if found["tasks"][flip.task]["higher_is_better"]]


def _examples(subject: str, rival: str, flips: Sequence[Flip]) -> str:
    if not flips:
        return ""
    rows = []
    for flip in flips:
        name = "/".join(part for part in (flip.task, flip.subtask, flip.id) if part)
        verdict = (
            f"{'won' if flip.gain > 0 else 'lost'} {flip.first_score:g} : {flip.second_score:g}"
        )
        texts = (flip.prompt, flip.target, flip.first_response, flip.second_response)
        cells = [f"<td>{verdict}</td>", *(f'<td class="text">{escape(cut(t))}</td>' for t in texts)]
        rows.append((name, cells))
    head = ["Item", "Score", "Prompt", "Right answer", subject, rival]
    return _wide(html_table(head, rows).replace("<table>", '<table class="items">', 1))


def _about(found: Mapping[str, Any]) -> str:
    head, *lines = table.about_lines(found)
    return _wide(
        html_table(
            head, [(line[0], [f"<td>{escape(cell)}</td>" for cell in line[1:]]) for line in lines]
        )
    )


def _cells(
    head: Sequence[str], titles: Mapping[str, str], rows: Mapping[str, Iterable[Cell]]
) -> str:
    lines = [
        (
            titles[row],
            [
                f'<td class="{cell.mark}">{escape(cell.text)}</td>'
                if cell.mark
                else f"<td>{escape(cell.text)}</td>"
                for cell in cells
            ],
        )
        for row, cells in rows.items()
    ]
    opening, titles_line, rest = html_table(head, lines).split("\n", 2)
    # Long names may break behind an underscore: a dozen tasks fit beside each other.
    return _wide("\n".join([opening, titles_line.replace("_", "_<wbr>"), rest]))


def _wide(html: str) -> str:
    return f'<div class="wide">{html}</div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
