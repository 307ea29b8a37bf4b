"""The report of an evaluation on held-out text: its tables, pictures and sentences."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from upcycle_core.errors import raise_faults
from upcycle_core.evaluation.report import files
from upcycle_core.evaluation.report.numbers import best, cells, number
from upcycle_core.evaluation.report.parts import (
    Block,
    Figure,
    Notes,
    Report,
    Section,
    Table,
    by_columns,
)
from upcycle_core.evaluation.text import plots, results, routing
from upcycle_core.evaluation.text.config import FEW
from upcycle_core.evaluation.text.results import Evaluation, Parameter, title_of

AVERAGE = "average"
CAPTION = (
    "Perplexity on held-out text, normalised: 100 is the domain's own dense expert, higher is "
    "better. Marked: the best of its column; the oracle, which is told the domain, and the "
    "domain's own expert are left out."
)
UNSCORED = (
    " A dash: dense experts are scored on their own domain and on some others here "
    "(evaluation.cross_scores), and have no average."
)
NO_AVERAGE = "Experts that were not scored on every domain have none."
DRAWN_ONCE = " Random routing is drawn once (evaluation.random_routing_seeds)."


def write_report(
    evaluation: Evaluation,
    out: Path,
    *,
    model: str,
    given: Mapping[str, str] | None = None,
    first: Sequence[Section] = (),
    more: Mapping[str, object] | None = None,
    tables: Mapping[str, Table] | None = None,
) -> None:
    """Write the whole report into the directory ``out``; the same evaluation gives the same bytes.

    What ``report.files.write_report`` writes, and ``table.csv``; pictures are ``scores``,
    ``routing`` and ``sweep_{parameter}``.

    Args:
        evaluation: What was measured.
        out: The directory.
        model: What people call what was evaluated.
        given: What a domain's expert was made from, where that was no checkpoint, and what was
            changed in it to fit the others.
        first: Sections that come before the evaluation's own.
        more: What else belongs into metrics.json.
        tables: {file name: further numbers, as CSV}.

    Raises:
        InputError: rows or numbers are missing; nothing is written.
    """
    raise_faults(results.faults(evaluation))
    forms = [Notes([f"{name}: {form}" for name, form in given.items()])] if given else []
    shown = [Section("Experts brought into one form", forms), *first, *sections(evaluation)]
    files.write_report(
        Report(f"{model}: evaluation on held-out text", shown),
        out,
        metrics={**results.metrics(evaluation), **(more or {})},
        tables={"table.csv": _numbers(evaluation), **(tables or {})},
    )


def sections(evaluation: Evaluation) -> list[Section]:
    """The scores, and for the page perplexities, pictures and how often routers agree."""
    shown: dict[str, Sequence[Block]] = {
        "Perplexity": [_perplexities(evaluation)],
        "Normalised average": [_averages(evaluation)],
    }
    for parameter, heading in plots.SWEEPS.items():
        if evaluation.sweeps.get(parameter):
            shown[heading] = [_sweep(evaluation, parameter, heading)]
    shown["Routing"] = [_routing(evaluation)] if evaluation.routing else []
    gaps = results.gaps(results.averages(evaluation))
    return [
        Section("Normalised perplexity", [score_table(evaluation), *gaps]),
        *(Section(heading, blocks, page_only=True) for heading, blocks in shown.items()),
    ]


def best_row(evaluation: Evaluation, domain: str | None = None) -> str | None:
    """The row whose normalised score on ``domain``, or on average, prints highest; None in a tie.

    Left out, as in Table 2: the oracle, which is told the domain, and in a domain's own column its
    expert, which is 100 by definition.
    """
    values = _columns(evaluation)[domain or AVERAGE]
    return best({row: own for row, own in values.items() if row not in _left_out(domain)})


def score_table(evaluation: Evaluation) -> Table:
    """Normalised scores by domain and their average, rows in the paper's order."""
    spread, columns = results.deviations(evaluation), {}
    for title, own in _columns(evaluation).items():
        values = {row: (score, spread.get(row, {}).get(title)) for row, score in own.items()}
        columns[title] = cells(values, left_out=_left_out(title))
    columns["Average"] = columns.pop(AVERAGE)
    return by_columns(_titles(evaluation), columns, _caption(evaluation), first="Method")


def _caption(evaluation: Evaluation) -> str:
    """What the table says, and what it leaves out of many domains."""
    drawn = len(evaluation.repeats.get("random_routing", ()))
    once = DRAWN_ONCE if drawn == 1 and len(evaluation.domains) > FEW else ""
    return CAPTION + (UNSCORED if _has_dashes(evaluation) else "") + once


def _has_dashes(evaluation: Evaluation) -> bool:
    return any(evaluation.domains_of(r) != evaluation.domains for r in evaluation.perplexities)


def _perplexities(evaluation: Evaluation) -> Table:
    table = results.perplexity_table(evaluation)
    columns = {
        domain: {r: number(own[domain], digits=2) for r, own in table.items() if domain in own}
        for domain in evaluation.domains
    }
    sizes = [f"{domain} {own['tokens']:,.0f}" for domain, own in evaluation.heldout.items()]
    caption = f"Scored tokens: {', '.join(sizes)}." if sizes else ""
    return by_columns(_titles(evaluation), columns, caption, first="Method")


def _numbers(evaluation: Evaluation) -> Table:
    """Unrounded: one normalised score a domain, the average, one perplexity a domain."""
    columns = {**_columns(evaluation)}
    table = results.perplexity_table(evaluation)
    for domain in evaluation.domains:
        own = {row: values[domain] for row, values in table.items() if domain in values}
        columns[f"perplexity_{domain}"] = own
    return by_columns({row: row for row in table}, columns, first="row")


def _averages(evaluation: Evaluation) -> Figure:
    titles, averages = _titles(evaluation), results.averages(evaluation)
    spread = {row: own["average"] for row, own in results.deviations(evaluation).items()}
    winner = best_row(evaluation)
    shown = {titles[row]: (average, spread.get(row)) for row, average in averages.items()}
    draw = partial(plots.draw_scores, shown, titles[winner] if winner else None)
    rows = [(row, average, spread.get(row)) for row, average in averages.items()]
    data = Table(["row", "normalised_average", "deviation"], rows)
    caption = NO_AVERAGE if _has_dashes(evaluation) else ""
    return Figure("scores", "Normalised average of every row", draw, data, caption)


def _sweep(evaluation: Evaluation, parameter: Parameter, title: str) -> Figure:
    titles, averages = _titles(evaluation), results.averages(evaluation)
    points = results.sweep_points(evaluation, parameter)
    references = [row for row in plots.REFERENCES if row in averages]
    draw = partial(
        plots.draw_sweep,
        parameter,
        {titles[row]: curve for row, curve in points.items()},
        {titles[row]: averages[row] for row in references},
    )
    rows = [(row, *point) for row, curve in points.items() for point in curve]
    data = Table(["row", parameter, "normalised_average"], rows)
    return Figure(f"sweep_{parameter}", title, draw, data)


def _routing(evaluation: Evaluation) -> Figure:
    counts, found = results.ordered_routing(evaluation), results.routing_summary(evaluation)
    layers = ", ".join(number(100 * share) for share in found["agreement_by_layer"])
    caption = (
        f"Routers agree with the domain label on {number(100 * found['agreement'])} % of tokens "
        f"(layer by layer: {layers}); chance is {number(100 / len(counts))} %."
    )
    data = Table(["domain", "layer", "expert", "tokens", "share"], list(routing.records(counts)))
    title = "Share of each domain's tokens sent to each expert"
    return Figure("routing", title, partial(plots.draw_routing, counts), data, caption)


def _columns(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """{domain or "average": {row: normalised score}}"""
    table = results.normalised_table(evaluation)
    by_domain = {
        d: {row: own[d] for row, own in table.items() if d in own} for d in evaluation.domains
    }
    return {**by_domain, AVERAGE: results.averages(evaluation)}


def _left_out(domain: str | None) -> tuple[str, ...]:
    return ("oracle", results.expert_row(domain)) if domain else ("oracle",)


def _titles(evaluation: Evaluation) -> dict[str, str]:
    table = results.perplexity_table(evaluation)
    return {row: title_of(row, evaluation.domains) for row in table}
