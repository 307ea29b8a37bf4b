"""The report on tasks: scores, differences item by item, what was won and lost."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from upcycle_core.errors import raise_faults
from upcycle_core.evaluation.report import files
from upcycle_core.evaluation.report.numbers import cells, interval, number
from upcycle_core.evaluation.report.parts import (
    DASH,
    Cell,
    Figure,
    Notes,
    Report,
    Section,
    Table,
    by_columns,
)
from upcycle_core.evaluation.tasks import plot, results
from upcycle_core.evaluation.tasks.items import write_models
from upcycle_core.evaluation.tasks.paired import Flip
from upcycle_core.evaluation.tasks.results import TaskEvaluation
from upcycle_core.evaluation.text import plots
from upcycle_core.evaluation.text.results import expert_row

Metrics = Mapping[str, Any]
"""What ``results.metrics`` gives."""
SCORES = (
    "In percent, higher is better; columns with ↓ or ↑ are in their own unit, lower or higher is "
    "better. Marked: the best of its column; a domain's own expert and the oracle are left out."
)
NORMALISED = (
    "100 is the domain's own dense expert, higher is better. The average counts every domain the "
    "same. Marked as above."
)
DIFFERENCES = (
    "{subject} minus each other model over the same items, with the 95 % interval of a paired "
    "bootstrap, in the unit of the scores. * The interval excludes 0."
)
NO_MEAN = f" {DASH} A score that is no mean over items, such as a whole text's, has none."
EXAMPLES = 10
"""Items that are shown of each rival, at most."""
SHOWN = 300
"""Characters of a text that are shown; longer ones are cut in the middle."""


def write_task_report(evaluation: TaskEvaluation, out: Path, *, model: str) -> None:
    """Write the whole report into the directory ``out``; the same evaluation gives the same bytes.

    What ``report.files.write_report`` writes, with ``scores.png`` and ``scores.csv``. Where items
    are known: ``items.parquet`` with all of them, and ``won-and-lost.csv`` where there are rivals.

    Args:
        evaluation: What was measured.
        out: The directory.
        model: What people call what was evaluated.

    Raises:
        InputError: Rows or numbers are missing, or the subject and a rival were not asked the same;
            nothing is written.
    """
    raise_faults(results.faults(evaluation))
    metrics, flips = results.metrics(evaluation), results.flips(evaluation)
    subject, tables = metrics["titles"][evaluation.subject], {}
    if any(evaluation.items.values()):
        out.mkdir(parents=True, exist_ok=True)
        write_models(evaluation.items, out / "items.parquet")
        if evaluation.rivals:
            tables["won-and-lost.csv"] = _flip_table(flips)
    report = Report(f"{model}: task evaluation of {subject}", sections(metrics, flips))
    files.write_report(report, out, metrics=metrics, tables=tables)


def sections(metrics: Metrics, flips: Mapping[str, Sequence[Flip]]) -> list[Section]:
    """Scores, differences and what the tasks are; for the page bars, categories and examples.

    Args:
        metrics: What ``results.metrics`` gave.
        flips: What ``results.flips`` gave.
    """
    draw = partial(plot.draw_tasks, metrics)
    title = "Scores of every model on every task"
    bars = Figure("scores", title, draw, _score_numbers(metrics), _legend(metrics))
    differences = difference_table(metrics)
    return [
        Section("Scores", [score_table(metrics)]),
        Section("Normalised scores", [normalised_table(metrics)] if metrics["normalised"] else []),
        Section("", [bars], page_only=True),
        *_sweep_sections(metrics),
        Section("Differences item by item", [differences] if differences.rows else []),
        Section("By category", list(_category_sections(metrics)), page_only=True),
        Section("Won and lost", list(_flip_sections(metrics, flips)), page_only=True),
        Section("Tasks", [_about(metrics), Notes(_notes(metrics))]),
    ]


def score_table(metrics: Metrics) -> Table:
    """One score a model and task, with deviations where there are several seeds."""
    columns = {}
    for task, about in metrics["tasks"].items():
        scale, digits = _unit(about)
        measured = {row: own[task] for row, own in metrics["scores"].items() if task in own}
        spread = {
            row: scale * own["deviation"] for row, own in measured.items() if len(own["values"]) > 1
        }
        columns[plot.title_of(task, about)] = cells(
            {row: (scale * own["mean"], spread.get(row)) for row, own in measured.items()},
            digits=digits,
            higher=about["higher_is_better"],
            left_out=_left_out(about["domain"]),
        )
    return by_columns(metrics["titles"], columns, SCORES)


def normalised_table(metrics: Metrics) -> Table:
    """One normalised score a model and task that has a domain, then the average."""
    domains = {task: about["domain"] for task, about in metrics["tasks"].items() if about["domain"]}
    columns = {}
    for task in [*domains, "average"]:
        spread = {row: own.get(task) for row, own in metrics["deviation"].items()}
        shown = {
            row: own[task] if task in domains else metrics["normalised_average"][row]
            for row, own in metrics["normalised"].items()
        }
        known = {row: (mean, spread.get(row)) for row, mean in shown.items() if mean is not None}
        title = task if task in domains else "Average"
        columns[title] = cells(known, left_out=_left_out(domains.get(task)))
    return by_columns(metrics["titles"], columns, NORMALISED)


def difference_table(metrics: Metrics) -> Table:
    """The subject's difference from each rival with its interval, where items are known."""
    titles, rivals, rows = metrics["titles"], metrics["rivals"], []
    for task, about in metrics["tasks"].items():
        measured = [metrics["differences"][rival].get(task) for rival in rivals]
        if any(measured):
            rows.append([task, *(own and _difference(own, about) for own in measured)])
    caption = DIFFERENCES.format(subject=titles[metrics["subject"]])
    if any(own["mean"] is None for of in metrics["differences"].values() for own in of.values()):
        caption += NO_MEAN
    return Table(["Task", *(titles[rival] for rival in rivals)], rows, caption)


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


def _sweep_sections(metrics: Metrics) -> Iterator[Section]:
    """Scores against each parameter that was swept; drawn where all averages are defined."""
    averages = metrics["normalised_average"]
    for parameter, title in plots.SWEEPS.items():
        points = metrics.get("sweeps", {}).get(parameter, [])
        if not points:
            continue
        shown = sweep_table(metrics, parameter, points)
        curve = [(point["value"], point["normalised_average"]) for point in points]
        if any(average is None for _, average in curve):
            yield Section(title, [shown])
            continue
        subject = metrics["titles"][metrics["subject"]]
        known = {row: averages.get(row) for row in plots.REFERENCES}
        lines = {metrics["titles"][row]: own for row, own in known.items() if own is not None}
        draw = partial(plots.draw_sweep, parameter, {subject: curve}, lines)
        data = Table([parameter, "normalised_average"], curve)
        yield Section(title, [shown, Figure(f"sweep_{parameter}", title, draw, data)])


def sweep_table(metrics: Metrics, parameter: str, points: Sequence[Metrics]) -> Table:
    """The subject's scores and their normalised average with each value of a parameter."""
    units = {task: _unit(about) for task, about in metrics["tasks"].items()}
    rows = []
    for point in points:
        own = [number(s * point["scores"][t], digits=d) for t, (s, d) in units.items()]
        average = point["normalised_average"]
        rows.append([f"{point['value']:g}", *own, None if average is None else number(average)])
    caption = "Scores as above, and the normalised average."
    return Table([parameter, *units, "Average"], rows, caption)


def _unit(about: Mapping[str, Any]) -> tuple[int, int]:
    """Factor and decimals: rates are shown in percent, and what is none as it is."""
    return (100, 1) if about["is_share"] else (1, 2)


def _left_out(domain: str | None) -> tuple[str, ...]:
    """Rows that are no winners, as in DUME: the oracle, and the domain's own expert."""
    return ("oracle", expert_row(domain)) if domain else ("oracle",)


def _difference(own: Mapping[str, Any], about: Mapping[str, Any]) -> Cell | None:
    if own["mean"] is None:
        return None
    scale, digits = _unit(about)
    mean, low, high = (scale * own[end] for end in ("mean", "low", "high"))
    text, excludes = interval(mean, low, high, digits=digits)
    is_better = (mean > 0) == about["higher_is_better"]
    return Cell(f"{text} *", "better" if is_better else "worse") if excludes else Cell(text)


def _legend(metrics: Metrics) -> str:
    parts = [f"Blue: {metrics['titles'][metrics['subject']]}"]
    if plot.CHAMPION in metrics["scores"] and metrics["subject"] != plot.CHAMPION:
        parts.append("orange: the champion")
    if any(rival != plot.CHAMPION for rival in metrics["rivals"]):
        parts.append("dark: what it is compared with item by item")
    if metrics["normalised"]:
        parts.append("dotted: the domain's own expert")
    return "; ".join(parts) + "."


def _category_sections(metrics: Metrics) -> Iterator[Section]:
    for task, about in metrics["tasks"].items():
        measured = {
            row: own[task]["categories"] for row, own in metrics["scores"].items() if task in own
        }
        scale, digits = _unit(about)
        rows = []
        for name in sorted({name for own in measured.values() for name in own}):
            shares = [own.get(name) for own in measured.values()]
            rows.append([name, *(number(s and scale * s, digits=digits) for s in shares)])
        header = ["Category", *(metrics["titles"][row] for row in measured)]
        if rows:
            yield Section(task, [Table(header, rows)])


def _flip_sections(metrics: Metrics, flips: Mapping[str, Sequence[Flip]]) -> Iterator[Section]:
    subject = metrics["titles"][metrics["subject"]]
    for rival, tasks in metrics["differences"].items():
        if not tasks:
            continue
        title = metrics["titles"][rival]
        counts = [
            [task, own["won"], own["lost"], own["items"] - own["won"] - own["lost"]]
            for task, own in tasks.items()
        ]
        # Where the score is of a whole text, nobody sees in an item what was won.
        readable = [f for f in flips[rival] if metrics["tasks"][f.task]["higher_is_better"]]
        header = ["Item", "Score", "Prompt", "Right answer", subject, title]
        items = Table(header, [_example(flip) for flip in examples(readable)])
        shown = [Table(["Task", "Won", "Lost", "Same score"], counts)]
        yield Section(f"{subject} against {title}", [*shown, items] if items.rows else shown)


def _example(flip: Flip) -> list[str]:
    name = "/".join(part for part in (flip.task, flip.subtask, flip.id) if part)
    verdict = "won" if flip.gain > 0 else "lost"
    texts = (flip.prompt, flip.target, flip.first_response, flip.second_response)
    score = f"{verdict} {flip.first_score:g} : {flip.second_score:g}"
    return [name, score, *map(cut, texts)]


def _about(metrics: Metrics) -> Table:
    rows = [
        [
            *(task, about["metric"], f"{about['items']:,}", about["seeds"]),
            f"{about['domain']} expert" if about["domain"] else None,
        ]
        for task, about in metrics["tasks"].items()
    ]
    return Table(["Task", "Metric", "Items", "Seeds", "Normalised by"], rows)


def _notes(metrics: Metrics) -> list[str]:
    """What a reader must know besides: cut prompts, what is not normalised, what is missing."""
    lines = [
        f"{task} cannot be normalised: {why}; averages that need it are left out."
        for task, why in metrics["undefined"].items()
    ]
    for row, own in metrics["scores"].items():
        title = metrics["titles"][row]
        lines += [
            f"{title}, {task}: {score['truncated']:,} of {score['items']:,} prompts were cut to "
            "fit the model."
            for task, score in own.items()
            if score["truncated"]
        ]
        missing = [task for task in metrics["tasks"] if task not in own]
        lines += [f"{title} was not evaluated on {', '.join(missing)}."] if missing else []
    return lines


def _score_numbers(metrics: Metrics) -> Table:
    """Unrounded: one line a row and task."""
    header = ["row", "task", "metric", "higher_is_better", "mean", "deviation", "seeds"]
    rows = [
        [
            *(row, task, score["metric"], score["higher_is_better"]),
            *(score["mean"], score["deviation"], len(score["values"])),
            *(score["items"], score["truncated"]),
            metrics["normalised"].get(row, {}).get(task),
        ]
        for row, own in metrics["scores"].items()
        for task, score in own.items()
    ]
    return Table([*header, "items", "truncated", "normalised"], rows)


def _flip_table(flips: Mapping[str, Sequence[Flip]]) -> Table:
    """One line a rival and item that it and the subject score differently."""
    rows = [[rival, *asdict(flip).values()] for rival, own in flips.items() for flip in own]
    return Table(["rival", *(field.name for field in fields(Flip))], rows)
