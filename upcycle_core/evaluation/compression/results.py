"""What a sweep over ways to store a model's deltas found, and the numbers derived from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upcycle_core.errors import Fault
from upcycle_core.evaluation.text import scores

Perplexities = Mapping[str, float]
"""{domain: perplexity}"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to store the deltas.

    Args:
        codec: The setting: values of ``ders.config.CodecConfig``; None and what is missing are the
            same.
        bytes: Weight files of the compressed checkpoint.
        perplexity: On the domains of the sweep; inf where the model is broken by it.
        formula_bytes: What the formula says ``bytes`` are; None where it was not asked.
        relative_error: |decoded delta - delta| / |delta|, Frobenius norms, mean over matrices.
    """

    codec: Mapping[str, Any]
    bytes: int
    perplexity: Perplexities
    formula_bytes: float | None = None
    relative_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Several ways to compress one model. Plain data: the same sweep gives the same files.

    Args:
        source: What people call the model.
        domains: The domains, in the order they are shown.
        experts: {domain: perplexity of its own dense expert}: what scores are normalised by.
        original: {domain: perplexity} of the model as it was.
        original_bytes: Its weight files.
        original_expert_bytes: What of them is FFN experts; the rest is not compressed.
        points: {name of the codec: what came out}.
    """

    source: str
    domains: tuple[str, ...]
    experts: Perplexities
    original: Perplexities
    original_bytes: int
    original_expert_bytes: int
    points: Mapping[str, Point]


def faults(sweep: Sweep) -> list[Fault]:
    """Everything that keeps a report from being made: domains, perplexities, sizes."""
    place, found = f"sweeps.{sweep.source}", []
    if not sweep.domains or not sweep.points:
        found.append(Fault(place, None, "give a domain and a codec at least"))
    tables = {"experts": sweep.experts, "original": sweep.original}
    tables |= {f"points.{name}.perplexity": p.perplexity for name, p in sweep.points.items()}
    for name, values in tables.items():
        if set(values) != set(sweep.domains):
            remedy = f"must be of these domains: {', '.join(sweep.domains)}"
            found.append(Fault(f"{place}.{name}", sorted(values), remedy))
        for domain, value in values.items():
            # A codec may break a model beyond every measure; what it is held against may not be.
            broken = name.startswith("points.") and value == math.inf
            if not broken and not (math.isfinite(value) and value > 0):
                remedy = "no finite positive perplexity"
                found.append(Fault(f"{place}.{name}.{domain}", value, remedy))
    sizes = {f"points.{name}.bytes": point.bytes for name, point in sweep.points.items()}
    sizes |= {
        "original_bytes": sweep.original_bytes,
        "original_expert_bytes": sweep.original_expert_bytes,
    }
    found += [
        Fault(f"{place}.{name}", size, "must be a positive number of bytes")
        for name, size in sizes.items()
        if size <= 0
    ]
    if sweep.original_expert_bytes > sweep.original_bytes:
        remedy = f"more than original_bytes, {sweep.original_bytes}"
        found.append(Fault(f"{place}.original_expert_bytes", sweep.original_expert_bytes, remedy))
    return found


def smallest_within(sweep: Sweep, tolerance: float) -> str | None:
    """The point of fewest bytes that is good enough, of equal sizes the better one.

    Args:
        sweep: What was measured.
        tolerance: Percent of the original's normalised average that may be lost.

    Returns:
        Its name; None where no point that is smaller than the original is good enough.
    """
    return metrics(sweep, tolerance)["chosen"]


def setting(codec: Mapping[str, Any]) -> str:
    """A codec's setting as a point's label: ``0.9``, ``4 bit``, ``r 16``, ``99 % energy``."""
    if codec["codec"] == "sparse":
        return f"{codec['drop_rate']:g}"
    if codec["codec"] == "quantised":
        return f"{codec['bits']} bit"
    if codec.get("rank") is not None:
        return f"r {codec['rank']}"
    return f"{100 * codec['energy']:g} % energy"


def series(codec: Mapping[str, Any]) -> str:
    """What the settings along one line share: the codec and how it goes about it."""
    if codec["codec"] == "sparse":
        kept = "largest kept" if codec.get("keep") == "magnitude" else "random drop"
        return f"sparse, {kept}" + (", not rescaled" if codec.get("rescale") is False else "")
    if codec["codec"] == "quantised":
        group = codec.get("group_size")
        return f"quantised, groups of {group}" if group else "quantised"
    return "low rank"


def by_series(sweep: Sweep) -> dict[str, list[str]]:
    """{series: names of its points, smallest file first}, in the order of the sweep."""
    lines: dict[str, list[str]] = {}
    for name, point in sweep.points.items():
        lines.setdefault(series(point.codec), []).append(name)
    return {
        line: sorted(names, key=lambda name: sweep.points[name].bytes)
        for line, names in lines.items()
    }


def metrics(sweep: Sweep, tolerance: float) -> dict[str, Any]:
    """Everything about a sweep as plain values for JSON; null for a perplexity of inf.

    Sizes and scores are in percent: of the original's bytes, those of its experts (base and deltas
    against the experts alone, what is not compressed left out), of each domain's dense expert.
    ``least_average`` is the least normalised average that is within ``tolerance``.
    """
    whole, experts = sweep.original_bytes, sweep.original_expert_bytes
    normalised = scores.normalised(sweep.original, sweep.experts)
    original = scores.average(normalised)
    least = original * (1 - tolerance / 100)
    points = {name: _point(sweep, point, original) for name, point in sweep.points.items()}
    good = [
        name
        for name, own in points.items()
        if own["normalised_average"] >= least and own["bytes"] < whole
    ]

    def rank(name: str) -> tuple[int, float]:
        return points[name]["bytes"], -points[name]["normalised_average"]

    return {
        "original": {
            "bytes": whole,
            "expert_bytes": experts,
            "perplexity": {domain: sweep.original[domain] for domain in sweep.domains},
            "normalised": normalised,
            "normalised_average": original,
        },
        "points": points,
        "tolerance": tolerance,
        "least_average": least,
        "chosen": min(good, key=rank, default=None),
    }


def _point(sweep: Sweep, point: Point, original: float) -> dict[str, Any]:
    whole, experts = sweep.original_bytes, sweep.original_expert_bytes
    values, formula = point.perplexity, point.formula_bytes
    # 0 where the perplexity is inf.
    normalised = {d: 100 * (sweep.experts[d] / values[d]) for d in sweep.domains}
    average = scores.average(normalised)
    return {
        "codec": {key: value for key, value in point.codec.items() if value is not None},
        "bytes": point.bytes,
        "percent_of_original": 100 * point.bytes / whole,
        "experts_percent_of_original": 100 * (point.bytes - (whole - experts)) / experts,
        "formula_bytes": formula,
        "percent_above_formula": None if formula is None else 100 * (point.bytes / formula - 1),
        "relative_error": point.relative_error,
        "perplexity": {d: values[d] if math.isfinite(values[d]) else None for d in sweep.domains},
        "normalised": normalised,
        "normalised_average": average,
        "change_percent": 100 * (average / original - 1),
    }
