"""What an evaluation found, and the numbers derived from it. Nothing here is measured."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from upcycle_core.errors import Fault
from upcycle_core.evaluation.report.numbers import number
from upcycle_core.evaluation.text import routing, scores

Parameter = Literal["top_k", "ridge_lambda", "window"]
Perplexities = Mapping[str, float]
"""{domain: perplexity}"""

TITLES = {
    "seed": "Seed",
    "model_averaging": "Model averaging",
    "random_routing": "Random routing",
    "dume": "DUME",
    "dume_ood": "DUME OOD",
    "oracle": "Oracle",
    "harmonised": "Symphony, untrained",
    "symphony": "Symphony-MoE",
    "simoe": "SIMoE",
}
"""What people call rows that mean the same in every report."""
_BASELINES = ("seed", "model_averaging", "random_routing")
_METHODS = ("dume", "dume_ood", "oracle", "harmonised", "symphony")


def expert_row(domain: str) -> str:
    """The row of a domain's dense expert."""
    return f"expert_{domain}"


def title_of(row: str, domains: Iterable[str]) -> str:
    """What people call a row."""
    experts = {expert_row(domain): f"{domain} expert" for domain in domains}
    return experts.get(row) or TITLES.get(row, row.replace("_", " "))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Measurements of one pipeline run. Plain data: the same inputs give the same files.

    Args:
        domains: The domains, in the order of the MoE's experts.
        perplexities: {row: {domain: perplexity}}. Rows: ``expert_row(domain)`` for every domain
            (needed: they normalise all others), ``seed``, ``model_averaging``, ``dume``,
            ``dume_ood``, ``oracle`` and any others.
        repeats: {row: one {domain: perplexity} a seed} for rows that were measured several times
            (``random_routing``). Their mean is shown with its deviation.
        heldout: {domain: {"tokens": scored tokens, "bytes": bytes of them}}; adds bits per byte.
        routing: {domain: counts [L][D]}: the domain's tokens that each layer sent to each expert.
        sweeps: {parameter: {row: {value: {domain: perplexity}}}}: rows measured with one
            parameter set to other values than the table's.
        intervals: {row: {domain or "average": low and high}}: of normalised scores, for other
            documents of the same kind.
        scored_on: {row: domains, its own among them}: of dense experts that were not scored on
            all. Where they were not, nothing is shown, and they have no average.
    """

    domains: tuple[str, ...]
    perplexities: Mapping[str, Perplexities]
    repeats: Mapping[str, Sequence[Perplexities]] = field(default_factory=dict)
    heldout: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    routing: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    sweeps: Mapping[Parameter, Mapping[str, Mapping[float, Perplexities]]] = field(
        default_factory=dict
    )
    intervals: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    scored_on: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def experts(self) -> dict[str, float]:
        """Each domain's own dense expert's perplexity: what everything is normalised by."""
        return {domain: self.perplexities[expert_row(domain)][domain] for domain in self.domains}

    def domains_of(self, row: str) -> tuple[str, ...]:
        """The domains that a row has scores of."""
        chosen = self.scored_on.get(row, self.domains)
        return tuple(d for d in self.domains if d in chosen or row == expert_row(d))

    @property
    def whole_rows(self) -> list[str]:
        """Rows that were scored on every domain, in ``perplexity_table``'s order."""
        return [row for row in perplexity_table(self) if self.domains_of(row) == self.domains]


def faults(evaluation: Evaluation) -> list[Fault]:
    """Everything that keeps a report from being made: rows, domains or numbers that are missing."""
    tables = {f"perplexities.{row}": values for row, values in evaluation.perplexities.items()}
    for row, runs in evaluation.repeats.items():
        tables |= {f"repeats.{row}.{i}": run for i, run in enumerate(runs)}
    for parameter, rows in evaluation.sweeps.items():
        for row, points in rows.items():
            tables |= {f"sweeps.{parameter}.{row}.{v}": p for v, p in points.items()}
    found = [
        Fault("perplexities", expert_row(domain), "the row is missing; evaluate this dense expert")
        for domain in evaluation.domains
        if expert_row(domain) not in evaluation.perplexities
    ]
    dense = {expert_row(domain) for domain in evaluation.domains}
    found += [
        Fault("scored_on", row, "only dense experts may be scored on some domains alone")
        for row in evaluation.scored_on
        if row not in dense
    ]
    if evaluation.routing:
        found += [
            Fault(f"routing.{domain}", None, "no routing counts; record them for every domain")
            for domain in evaluation.domains
            if domain not in evaluation.routing
        ]
    for name, values in tables.items():
        for domain in evaluation.domains_of(name.removeprefix("perplexities.")):
            value = values.get(domain, math.nan)
            if not (math.isfinite(value) and value > 0):
                found.append(Fault(f"{name}.{domain}", value, "no finite positive perplexity"))
    return found


def perplexity_table(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """{row: {domain: perplexity}} in the order of the paper's Table 2; repeats as their mean.

    Dense experts, seed, model averaging, random routing, other methods, DUME, DUME OOD, oracle.
    Domains that an expert was not scored on are not there.
    """
    known = dict(evaluation.perplexities)
    known |= {row: scores.mean_perplexity(runs) for row, runs in evaluation.repeats.items()}
    first = [*(expert_row(domain) for domain in evaluation.domains), *_BASELINES]
    others = [row for row in known if row not in first and row not in _METHODS]
    return {
        row: {domain: known[row][domain] for domain in evaluation.domains_of(row)}
        for row in [*first, *others, *_METHODS]
        if row in known
    }


def normalised_table(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """{row: {domain: score}} in percent of the dense experts, in ``perplexity_table``'s order."""
    experts = evaluation.experts
    return {
        row: scores.normalised(values, {domain: experts[domain] for domain in values})
        for row, values in perplexity_table(evaluation).items()
    }


def averages(evaluation: Evaluation) -> dict[str, float]:
    """{row: mean of its normalised scores over domains}, in ``perplexity_table``'s order.

    Rows that were not scored on all domains have none.
    """
    table = normalised_table(evaluation)
    return {row: scores.average(table[row]) for row in evaluation.whole_rows}


def gaps(averages: Mapping[str, float]) -> list[str]:
    """A sentence on what the averaged backbone and the routers cost; none without both rows.

    Args:
        averages: {row: normalised average in percent}; ``oracle`` and ``dume`` are looked at.
    """
    if not {"oracle", "dume"} <= averages.keys():
        return []
    backbone, router = 100 - averages["oracle"], averages["oracle"] - averages["dume"]
    return [
        f"Backbone gap (100 - oracle) {number(backbone)}, "
        f"router gap (oracle - DUME) {number(router)}."
    ]


def deviations(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """{row: {domain or "average": standard deviation of the normalised score}} of repeated rows.

    A row that was measured once has none.
    """
    found = {}
    for row, runs in evaluation.repeats.items():
        if len(runs) < 2:
            continue
        tables = [scores.normalised(run, evaluation.experts) for run in runs]
        for table in tables:
            table["average"] = scores.average(table)
        [spread] = scores.across_runs([{row: table} for table in tables]).values()
        found[row] = {column: deviation for column, (_, deviation) in spread.items()}
    return found


def sweep_points(
    evaluation: Evaluation, parameter: Parameter
) -> dict[str, list[tuple[float, float]]]:
    """{row: [(value, normalised average)]} with ascending values."""
    return {
        row: [
            (value, scores.normalised_average(points[value], evaluation.experts))
            for value in sorted(points)
        ]
        for row, points in evaluation.sweeps[parameter].items()
    }


def ordered_routing(evaluation: Evaluation) -> dict[str, routing.Counts]:
    """The routing counts with domains in the order of the experts; empty if there are none."""
    if not evaluation.routing:
        return {}
    return {domain: evaluation.routing[domain] for domain in evaluation.domains}


def routing_summary(evaluation: Evaluation) -> dict[str, Any]:
    """Agreement with the domain label (mean and [L]) and shares {domain: [L][D]}, if counted."""
    counts = ordered_routing(evaluation)
    if not counts:
        return {}
    by_layer = routing.agreement(counts)
    return {
        "agreement": sum(by_layer) / len(by_layer),
        "agreement_by_layer": by_layer,
        "shares": {domain: routing.shares(layers) for domain, layers in counts.items()},
    }


def metrics(evaluation: Evaluation) -> dict[str, Any]:
    """Everything derived, as nested plain dicts: the content of metrics.json."""
    perplexities, table = perplexity_table(evaluation), normalised_table(evaluation)
    worst = {row: scores.worst_domain(table[row]) for row in evaluation.whole_rows}
    return {
        "normalised_average": averages(evaluation),
        "normalised": table,
        "deviation": deviations(evaluation),
        "interval": {row: dict(own) for row, own in evaluation.intervals.items()},
        "worst_domain": {row: {"domain": d, "normalised": s} for row, (d, s) in worst.items()},
        "perplexity": perplexities,
        "bits_per_byte": _bits_per_byte(perplexities, evaluation.heldout),
        "heldout": {domain: dict(values) for domain, values in evaluation.heldout.items()},
        "routing": routing_summary(evaluation),
        "sweeps": {
            parameter: {
                row: [{"value": value, "normalised_average": score} for value, score in points]
                for row, points in sweep_points(evaluation, parameter).items()
            }
            for parameter in evaluation.sweeps
        },
    }


def _bits_per_byte(
    perplexities: Mapping[str, Perplexities], heldout: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    if not heldout:
        return {}
    return {
        row: {
            domain: math.log2(value) * heldout[domain]["tokens"] / heldout[domain]["bytes"]
            for domain, value in values.items()
        }
        for row, values in perplexities.items()
    }
