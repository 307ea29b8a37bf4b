"""The card of a version: scores, data, what was lost and why it is champion or not.

The checkpoint's own README.md says how to load it, and depends on nothing that is measured later;
this one is kept with the version and holds what was.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from infra.recipe.schema import Recipe
from tasks.data.licences import FILE as LICENCES
from tasks.engine.stage import Session
from tasks.methods import METHODS
from tasks.release.gate import Decision
from upcycle_core.evaluation.report.numbers import number
from upcycle_core.evaluation.text.results import title_of
from upcycle_core.given.licence import Licence, asked, combined

PICTURE = "routing.png"
"""Beside the card, which shows it: which domain's tokens go to which expert."""
LIMITS = """Perplexity says how well text is continued, not whether an answer is true. A domain
that is not among these is answered by whichever expert its tokens resemble."""
TEXTS = """Text that was trained on here has terms of its own, of which nothing is known here."""
HELDOUT = """In percent of each domain's own dense expert. The intervals (95 %) are for other
documents of the same kind: model and expert are compared document by document. What another seed
would give is not in them."""
SHORT = 12


def version_card(session: Session, metrics: Mapping[str, Any], decision: Decision) -> str:
    """Markdown with the front matter that hubs read (``model-index``).

    Args:
        session: The recipe at work; its documents and report are up to date.
        metrics: The report's ``metrics.json``.
        decision: Of the gate.
    """
    recipe, row = session.recipe, session.recipe.method
    sections = [
        f"{of_experts(recipe)}. Gate: {decision.reason}.",
        (session.workspace.path("report") / "table.md").read_text().strip(),
        *_intervals(metrics, row),
        "## Data\n\n" + table(("domain", "split", "documents", "MB", "sha256"), _data(session)),
        *_routing(metrics, pictures(session)),
    ]
    results = list(_results(metrics, row))
    return card(session, recipe.registered_name, sections, results=results, limits=LIMITS)


def of_experts(recipe: Recipe) -> str:
    """What a model is made of: the method, and the domains whose experts it has."""
    experts = ", ".join(METHODS[recipe.method].experts(recipe))
    return f"{title_of(recipe.method, ())} Mixture-of-Experts of {experts}"


def card(
    session: Session,
    name: str,
    sections: Sequence[str],
    *,
    results: Sequence[Mapping[str, Any]],
    limits: str,
    tags: Sequence[str] = ("moe", "merge"),
) -> str:
    """Markdown of a card: front matter, what is said of this model, licence and limits.

    Args:
        session: The recipe at work.
        name: The registered model.
        sections: What was measured.
        results: Of ``model-index``.
        limits: What the scores do not say.
        tags: For hubs.
    """
    parts = stated_licences(session)
    licence = combined(parts)
    front = {
        "license": licence.identifier,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(tags),
        "model-index": [{"name": name, "results": list(results)}],
    }
    whole = [
        f"---\n{yaml.safe_dump(front, sort_keys=False).rstrip()}\n---",
        f"# {name}",
        *sections,
        "## Licence\n\n" + "\n\n".join(_licence(licence, parts)),
        f"## Limits\n\n{limits}",
    ]
    return "\n\n".join(whole) + "\n"


def pictures(session: Session) -> dict[str, bytes]:
    """What the card shows, by file name: it lies beside it."""
    path = session.workspace.path("report") / PICTURE
    return {PICTURE: path.read_bytes()} if path.is_file() else {}


def stated_licences(session: Session) -> dict[str, str | None]:
    """{part: the licence that it states}, as the stage ``sources`` has read them."""
    path: Path = session.workspace.path("sources") / LICENCES
    return json.loads(path.read_text()) if path.is_file() else {}


def _results(metrics: Mapping[str, Any], row: str) -> Iterator[dict[str, Any]]:
    """One a domain: perplexity, and in percent of the domain's own dense expert."""
    intervals = metrics.get("interval", {}).get(row, {})
    for domain, perplexity in metrics["perplexity"][row].items():
        heldout = metrics["heldout"][domain]
        share: dict[str, Any] = {
            "type": "percent of its own dense expert",
            "value": round(metrics["normalised"][row][domain], 1),
        }
        if domain in intervals:
            share["args"] = {"interval_95": [round(end, 1) for end in intervals[domain]]}
        yield {
            "task": {"type": "text-generation"},
            "dataset": {
                "name": f"{domain}, held out ({heldout['tokens']} tokens)",
                "type": domain,
            },
            "metrics": [{"type": "perplexity", "value": round(perplexity, 3)}, share],
        }


def _intervals(metrics: Mapping[str, Any], row: str) -> Iterator[str]:
    """The model's scores, each with where it would lie on other text of the same kind."""
    intervals = metrics.get("interval", {}).get(row)
    if not intervals:
        return
    scores = {**metrics["normalised"][row], "average": metrics["normalised_average"][row]}
    lines = (
        (name, number(scores[name]), f"{number(low)} to {number(high)}")
        for name, (low, high) in intervals.items()
    )
    own = table(("domain", "score", "interval"), lines)
    yield f"## How sure the scores are\n\n{own}\n\n{HELDOUT}"


def _licence(licence: Licence, parts: Mapping[str, str | None]) -> Iterator[str]:
    """What it may be passed on under, and of each part what it says."""
    yield f"`{licence.identifier}`: {licence.reason}"
    if parts:
        lines = (
            (part, own or "not stated", "; ".join(asked(own)) or "–") for part, own in parts.items()
        )
        yield table(("part", "licence", "asks"), lines)
    yield TEXTS


def _data(session: Session) -> Iterator[tuple[str, ...]]:
    """What each domain's texts were: how much, and their hash."""
    for domain in session.recipe.domains:
        manifest = session.workspace.path("documents") / domain / "manifest.json"
        if not manifest.is_file():
            continue
        for split, about in json.loads(manifest.read_text())["splits"].items():
            size, sha = f"{about['bytes'] / 1e6:.2f}", f"`{about['sha256'][:SHORT]}`"
            yield domain, split, str(about["documents"]), size, sha


def _routing(metrics: Mapping[str, Any], shown: Mapping[str, bytes]) -> Iterator[str]:
    routing = metrics.get("routing")
    if routing:
        own = f"{100 * routing['agreement']:.1f} %"
        said = f"{own} of held-out tokens go to the expert of their domain, over all layers."
        picture = f"\n\n![Share of tokens by domain and expert]({PICTURE})" if shown else ""
        yield f"## Routing\n\n{said}{picture}"


def table(head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Markdown of a table, all cells as text."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
