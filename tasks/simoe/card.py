"""The card of a version that was tuned on instructions."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from infra.recipe.schema import recipe_yaml
from tasks.engine.stage import Session
from tasks.release.card import SHORT, card, table
from tasks.release.gate import Decision
from tasks.simoe.rows import SIMOE
from upcycle_core.checkpoints.card import fenced
from upcycle_core.corpora.plain_chat import form_in_words

LIMITS = """Exact match and ROUGE-L compare an answer with references: neither says whether another
answer is as good. Categories that were not tuned on are answered by experts found for others."""
SURE = """The intervals (95 %) are for other questions of the same categories. What another seed, or
other categories, would give is not in them."""
RECIPE = ("name", "seed", "domains", "instructions", "tokenizer", "seed_model", "simoe", "tuning")
"""Keys of the recipe that say how the model was made and asked."""
PICTURES = ("activations.png", "structure_simoe.png", "overlap.png")
NORMAL = 1.96


def tuned_card(session: Session, metrics: Mapping[str, Any], decision: Decision) -> str:
    """Markdown with the front matter that hubs read (``model-index``).

    Args:
        session: The recipe at work; its instructions and report are up to date.
        metrics: The report's ``metrics.json``.
        decision: Of the gate.
    """
    own = metrics["rows"][SIMOE]
    models = (session.workspace.path("report") / "table.md").read_text()
    sections = [
        "One dense model in which instruction tuning found sparse experts (SIMoE). Gate: "
        f"{decision.reason}.",
        models.partition("\n## Unseen categories")[0].strip(),
        f"## How to ask\n\n{form_in_words(session.workspace.path('model'))}",
        *_experts(own, pictures(session)),
        f"## How sure the scores are\n\n{_sure(own)}\n\n{SURE}",
        "## Data\n\n" + table(("instructions", "questions", "sha256"), _data(session)),
        f"## Recipe\n\n{fenced('yaml', recipe_yaml(session.recipe, RECIPE).strip())}",
    ]
    name = session.recipe.registered_name
    results = list(_results(own))
    return card(session, name, sections, results=results, limits=LIMITS, tags=("moe", "simoe"))


def pictures(session: Session) -> dict[str, bytes]:
    """What the card shows, by file name: it lies beside it."""
    report = session.workspace.path("report")
    return {name: (report / name).read_bytes() for name in PICTURES if (report / name).is_file()}


def asked_splits(own: Mapping[str, Any]) -> list[str]:
    """Splits that a row was asked: tasks of one instance each leave none to hold out."""
    return [split for split in ("seen", "unseen") if own[split] is not None]


def interval(split: Mapping[str, Any]) -> tuple[float, float]:
    """Where exact match would lie on other questions, in percent, of one split of a row.

    Categories count the same, so the variance of their mean is that of the shares, each
    ``q (1 - q) / (n + 4)`` with ``q = (n p + 2) / (n + 4)``, summed and divided by their number
    squared: Agresti and Coull's two right and two wrong answers more, without which a category
    that is all right or all wrong would be sure (The American Statistician 52, 1998).
    """
    shares = [(c["exact_match"]["mean"], c["count"]) for c in split["categories"].values()]
    likely = [((n * p + 2) / (n + 4), n + 4) for p, n in shares]
    variance = sum(q * (1 - q) / n for q, n in likely) / len(shares) ** 2
    mean, reach = split["exact_match"]["mean"], NORMAL * math.sqrt(variance)
    return 100 * max(mean - reach, 0.0), 100 * min(mean + reach, 1.0)


def _results(own: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for split in asked_splits(own):
        scores, ends = own[split], interval(own[split])
        exact = {
            "type": "exact_match",
            "value": round(100 * scores["exact_match"]["mean"], 1),
            "args": {"interval_95": [round(end, 1) for end in ends]},
        }
        rouge = {"type": "rouge_l", "value": round(100 * scores["rouge_l"]["mean"], 1)}
        name = f"{split} categories ({scores['count']} questions)"
        yield {
            "task": {"type": "text-generation"},
            "dataset": {"name": name, "type": f"instructions-{split}"},
            "metrics": [exact, rouge],
        }


def _sure(own: Mapping[str, Any]) -> str:
    lines = []
    for split in asked_splits(own):
        low, high = interval(own[split])
        score = 100 * own[split]["exact_match"]["mean"]
        lines.append((split, f"{score:.1f}", f"{low:.1f} to {high:.1f}"))
    return table(("categories", "exact match", "interval"), lines)


def _experts(own: Mapping[str, Any], shown: Mapping[str, bytes]) -> Iterator[str]:
    used = own.get("effective_experts")
    said = f"{used['mean']:.1f} experts are in effect." if used else ""
    figures = [f"![{name.removesuffix('.png')}]({name})" for name in shown]
    if said or figures:
        yield "\n\n".join(["## Experts", *([said] if said else []), *figures])


def _data(session: Session) -> Iterator[tuple[str, ...]]:
    path = session.workspace.path("instructions") / "manifest.json"
    for name, about in json.loads(path.read_text())["files"].items():
        yield name, str(about["instances"]), f"`{about['sha256'][:SHORT]}`"
