"""The card of a version whose experts are a shared base and light deltas."""

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.ders.compression import REPORT
from tasks.engine.stage import Session
from tasks.release.card import card

LIMITS = """Perplexity says how well text is continued, not whether an answer is true. The deltas
are lossy: what they lose on text of another kind than the held-out one was not measured."""
LOADING = """transformers loads it with the code beside its weights (`trust_remote_code=True`); for
readers that run no code of others, `upcycle_core.ders.expand` writes the experts out again."""


def compressed_card(session: Session, name: str, point: Mapping[str, Any], reason: str) -> str:
    """Markdown with the front matter that hubs read (``model-index``).

    Args:
        session: The recipe at work; its compression is up to date.
        name: The registered model.
        point: Of the sweep: the chosen way to store the deltas, as measured.
        reason: What was chosen and why.
    """
    report = session.workspace.path("compression") / REPORT
    sections = [
        f"Experts as one base and light deltas (DeRS), {reason}.",
        LOADING,
        (report / "table.md").read_text().strip(),
    ]
    tags, results = ("moe", "merge", "ders"), list(_results(point))
    return card(session, name, sections, results=results, limits=LIMITS, tags=tags)


def _results(point: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for domain, perplexity in point["perplexity"].items():
        yield {
            "task": {"type": "text-generation"},
            "dataset": {"name": f"{domain}, held out", "type": domain},
            "metrics": [{"type": "perplexity", "value": round(perplexity, 3)}],
        }
