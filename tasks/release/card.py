"""The card of a version: scores, data, what was lost and why it is champion or not.

The checkpoint's own README.md says how to load it, and depends on nothing that is measured later;
this one is kept with the version and holds what was.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tasks.engine.stage import Session
from tasks.release.gate import Decision
from upcycle_core.evaluation.text.results import title_of

LIMITS = """Perplexity says how well text is continued, not whether an answer is true. A domain
that is not among these is answered by whichever expert its tokens resemble. It may be used as far
as the licences of all its parts allow."""
SHORT = 12


def version_card(session: Session, metrics: Mapping[str, Any], decision: Decision) -> str:
    """Markdown with the front matter that hubs read (``model-index``).

    Args:
        session: The recipe at work; its documents and report are up to date.
        metrics: The report's ``metrics.json``.
        decision: Of the gate.
    """
    recipe, row = session.recipe, session.recipe.method
    title = title_of(row, ())
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["moe", "merge"],
        "model-index": [{"name": recipe.registered_name, "results": list(_results(metrics, row))}],
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False).rstrip()}\n---",
        f"# {recipe.registered_name}",
        f"{title} Mixture-of-Experts of {', '.join(recipe.domains)}. Gate: {decision.reason}.",
        (session.workspace.path("report") / "table.md").read_text().strip(),
        "## Data\n\n" + _table(("domain", "split", "documents", "MB", "sha256"), _data(session)),
        *_routing(metrics),
        f"## Limits\n\n{LIMITS}",
    ]
    return "\n\n".join(parts) + "\n"


def _results(metrics: Mapping[str, Any], row: str) -> Iterator[dict[str, Any]]:
    """One a domain: perplexity, and in percent of the domain's own dense expert."""
    for domain, perplexity in metrics["perplexity"][row].items():
        heldout = metrics["heldout"][domain]
        share = metrics["normalised"][row][domain]
        yield {
            "task": {"type": "text-generation"},
            "dataset": {
                "name": f"{domain}, held out ({heldout['tokens']} tokens)",
                "type": domain,
            },
            "metrics": [
                {"type": "perplexity", "value": round(perplexity, 3)},
                {"type": "percent of its own dense expert", "value": round(share, 1)},
            ],
        }


def _data(session: Session) -> Iterator[tuple[str, ...]]:
    """What each domain's texts were: how much, and their hash."""
    for domain in session.recipe.domains:
        manifest = session.workspace.path("documents") / domain / "manifest.json"
        if not manifest.is_file():
            continue
        for split, about in json.loads(manifest.read_text())["splits"].items():
            size, sha = f"{about['bytes'] / 1e6:.2f}", f"`{about['sha256'][:SHORT]}`"
            yield domain, split, str(about["documents"]), size, sha


def _routing(metrics: Mapping[str, Any]) -> Iterator[str]:
    routing = metrics.get("routing")
    if routing:
        own = f"{100 * routing['agreement']:.1f} %"
        said = f"{own} of held-out tokens go to the expert of their domain, over all layers."
        yield f"## Routing\n\n{said}"


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
