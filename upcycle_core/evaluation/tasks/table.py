"""Task scores as text: for the terminal, as Markdown, as CSV. All from ``results.metrics``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from upcycle_core.evaluation.tasks.paired import Flip
from upcycle_core.evaluation.text.results import expert_row
from upcycle_core.evaluation.text.table import align, csv_text

UNKNOWN = "–"
SCORES = (
    "In percent, higher is better; columns with ↓ are in their own unit, lower is better. Best of "
    "its column: marked; a domain's own expert and the oracle are left out."
)
NORMALISED = (
    "100 is the domain's own dense expert, higher is better. The average counts every domain the "
    "same. Marked as above."
)
DIFFERENCES = (
    "{subject} minus each other model over the same items, with the 95 % interval of a paired "
    "bootstrap, in the unit of the scores. * The interval excludes 0."
)

Mark = Literal["best", "better", "worse", ""]


@dataclass(frozen=True)
class Cell:
    """What is shown, and how it stands: best of a column; better or worse than another model."""

    text: str
    mark: Mark = ""


def number(value: float, *, higher: bool, signed: bool = False) -> str:
    """A score as it is shown: percent with one decimal, or as it is with two if lower is better."""
    sign = "+" if signed else ""
    return f"{100 * value:{sign}z.1f}" if higher else f"{value:{sign}z.2f}"


def header(found: Mapping[str, Any], tasks: Sequence[str]) -> list[str]:
    """Column titles: an arrow where lower is better."""
    higher = {task: found["tasks"][task]["higher_is_better"] for task in tasks}
    return ["Model", *(task if higher[task] else f"{task} ↓" for task in tasks)]


def score_cells(found: Mapping[str, Any]) -> dict[str, list[Cell]]:
    """{row: one score a task}, with deviations where there are several seeds."""
    table: dict[str, list[Cell]] = {row: [] for row in found["scores"]}
    for task, about in found["tasks"].items():
        higher = about["higher_is_better"]
        measured = {row: own[task] for row, own in found["scores"].items() if task in own}
        means = {row: score["mean"] for row, score in measured.items()}
        best = _best(means, about["domain"], higher=higher)
        for row, cells in table.items():
            cells.append(Cell(UNKNOWN))
            if row in measured:
                text = number(means[row], higher=higher)
                if len(measured[row]["values"]) > 1:
                    text += f" ± {number(measured[row]['deviation'], higher=higher)}"
                cells[-1] = Cell(text, "best" if row in best else "")
    return table


def normalised_cells(found: Mapping[str, Any]) -> dict[str, list[Cell]]:
    """{row: one normalised score a task that has a domain, then the average}."""
    columns = {task: found["tasks"][task]["domain"] for task in normalised_tasks(found)}
    table: dict[str, list[Cell]] = {row: [] for row in found["normalised"]}
    for column, domain in {**columns, "average": None}.items():
        values = {
            row: own[column] if domain else found["normalised_average"][row]
            for row, own in found["normalised"].items()
        }
        known = {row: value for row, value in values.items() if value is not None}
        best = _best(known, domain, higher=True)
        for row, cells in table.items():
            text = f"{known[row]:.1f}" if row in known else UNKNOWN
            deviation = found["deviation"].get(row, {}).get(column)
            text += f" ± {deviation:.1f}" if deviation is not None else ""
            cells.append(Cell(text, "best" if row in best else ""))
    return table


def normalised_tasks(found: Mapping[str, Any]) -> list[str]:
    """The tasks that are normalised."""
    return [task for task, about in found["tasks"].items() if about["domain"]]


def difference_cells(found: Mapping[str, Any]) -> dict[str, list[Cell]]:
    """{task: the subject's difference from each rival with its interval}, where items are known."""
    table = {}
    for task, about in found["tasks"].items():
        higher = about["higher_is_better"]
        measured = [found["differences"][rival].get(task) for rival in found["rivals"]]
        if any(measured):
            table[task] = [_difference(cell, higher=higher) for cell in measured]
    return table


def _difference(cell: Mapping[str, Any] | None, *, higher: bool) -> Cell:
    if cell is None:
        return Cell(UNKNOWN)
    mean, low, high = (
        number(cell[end], higher=higher, signed=True) for end in ("mean", "low", "high")
    )
    text = f"{mean} [{low}, {high}]"
    if not cell["excludes_zero"]:
        return Cell(text)
    return Cell(f"{text} *", "better" if (cell["mean"] > 0) == higher else "worse")


def about_lines(found: Mapping[str, Any]) -> list[list[str]]:
    """What each task is, its header first."""
    lines = [["Task", "Metric", "Items", "Seeds", "Normalised by"]]
    for task, about in found["tasks"].items():
        by = f"{about['domain']} expert" if about["domain"] else UNKNOWN
        lines.append([task, about["metric"], f"{about['items']:,}", str(about["seeds"]), by])
    return lines


def notes(found: Mapping[str, Any]) -> list[str]:
    """What a reader must know besides: cut prompts, what is not normalised, what is missing."""
    lines = [
        f"{task} cannot be normalised: {why}; averages that need it are left out."
        for task, why in found["undefined"].items()
    ]
    for row, own in found["scores"].items():
        title = found["titles"][row]
        lines += [
            f"{title}, {task}: {score['truncated']:,} of {score['items']:,} prompts were cut to "
            "fit the model."
            for task, score in own.items()
            if score["truncated"]
        ]
        missing = [task for task in found["tasks"] if task not in own]
        lines += [f"{title} was not evaluated on {', '.join(missing)}."] if missing else []
    return lines


def format_tasks(found: Mapping[str, Any]) -> str:
    """The tables and notes for a terminal; the best of a column has a star."""
    parts = []
    for title, lines, caption in _sections(found, best="{}*", other="{} "):
        parts += [title, "", align(lines), *([caption] if caption else []), ""]
    return "\n".join([*parts, *notes(found)]).rstrip() + "\n"


def markdown_tasks(found: Mapping[str, Any]) -> str:
    """The tables and notes in Markdown; the best of a column is bold."""
    parts = []
    for title, (head, *body), caption in _sections(found, best="**{}**", other="{}"):
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
        rows = ["| " + " | ".join(map(_escaped, line)) + " |" for line in lines]
        parts += [f"## {title}", "", *rows, "", *([caption, ""] if caption else [])]
    return "\n".join([*parts, *(f"- {note}" for note in notes(found))]).rstrip() + "\n"


def csv_scores(found: Mapping[str, Any]) -> str:
    """Unrounded: one line a row and task."""
    head = ["row", "task", "metric", "higher_is_better", "mean", "deviation", "seeds"]
    head += ["items", "truncated", "normalised"]
    lines = [
        [
            *(row, task, score["metric"], score["higher_is_better"]),
            *(score["mean"], score["deviation"], len(score["values"])),
            *(score["items"], score["truncated"]),
            found["normalised"].get(row, {}).get(task),
        ]
        for row, own in found["scores"].items()
        for task, score in own.items()
    ]
    return csv_text(head, lines)


def csv_flips(flips: Mapping[str, Sequence[Flip]]) -> str:
    """One line a rival and item that it and the subject score differently."""
    columns = [field.name for field in fields(Flip)]
    lines = [
        # A bare carriage return would end the line for readers of CSV.
        [rival, *(_one_line_end(value) for value in asdict(flip).values())]
        for rival, own in flips.items()
        for flip in own
    ]
    return csv_text(["rival", *columns], lines)


def _sections(
    found: Mapping[str, Any], *, best: str, other: str
) -> list[tuple[str, list[list[str]], str]]:
    """Title, lines and caption of each table that there is something to show in."""
    titles = found["titles"]

    def lines(head: list[str], rows: Mapping[str, Sequence[Cell]]) -> list[list[str]]:
        return [
            head,
            *(
                [titles[row], *((best if c.mark == "best" else other).format(c.text) for c in own)]
                for row, own in rows.items()
            ),
        ]

    sections = [
        ("Scores", lines(header(found, list(found["tasks"])), score_cells(found)), SCORES),
    ]
    if found["normalised"]:
        head = ["Model", *normalised_tasks(found), "Average"]
        sections.append(("Normalised", lines(head, normalised_cells(found)), NORMALISED))
    differences = difference_cells(found)
    if differences:
        head = ["Task", *(titles[rival] for rival in found["rivals"])]
        body = [[task, *(cell.text for cell in own)] for task, own in differences.items()]
        caption = DIFFERENCES.format(subject=titles[found["subject"]])
        sections.append(("Differences", [head, *body], caption))
    return [*sections, ("Tasks", about_lines(found), "")]


def _best(values: Mapping[str, float], domain: str | None, *, higher: bool) -> set[str]:
    """The rows with the best value; without the oracle and the domain's own expert, as in DUME."""
    left_out = {"oracle", expert_row(domain) if domain else ""}
    running = {row: value for row, value in values.items() if row not in left_out}
    if not running:
        return set()
    best = (max if higher else min)(running.values())
    return {row for row, value in running.items() if value == best}


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _one_line_end(value: Any) -> Any:
    return value.replace("\r\n", "\n").replace("\r", "\n") if isinstance(value, str) else value
