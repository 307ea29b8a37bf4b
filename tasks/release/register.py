"""The last step: judge the model beside the champion and register it.

It is no stage: what it does lies in the registry, not in the workspace.
"""

import json
from collections.abc import Mapping
from typing import Any

from infra.recipe.schema import Recipe, recipe_digest, recipe_yaml, resolve
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Run
from infra.versioning.versions import Versions, code_version
from tasks.ders.compression import MODEL, REPORT, row_title
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.workspace import fingerprint
from tasks.release.champion import CHAMPION, Champion
from tasks.release.gate import Decision, decide, figures
from tasks.release.versions import (
    COMPRESSED_TAG,
    DECISION_TAG,
    EXPERTS_TAG,
    MODEL_TAG,
    PENDING_TAG,
    Outcome,
    compressed_name,
    expert_digests,
    offered,
    with_aliases,
)
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.evaluation.tasks.results import TaskEvaluation
from upcycle_core.evaluation.text.results import expert_row, title_of


def register(
    session: Session,
    registry: Registry,
    versions: Versions,
    run: Run,
    *,
    champion: Champion | None,
    tasks: TaskEvaluation | None,
) -> Outcome:
    """Register the workspace's model, unless its bytes are the newest version already.

    Args:
        session: The recipe at work.
        registry: Where to.
        versions: The workspace's DVC project.
        run: The flow's run.
        champion: Whom it has to beat.
        tasks: Scores on tasks of this model and of the champion; None without tasks.
    """
    recipe, workspace = session.recipe, session.workspace
    name = recipe.registered_name
    digest = workspace.digest("model")
    assert digest is not None
    known = offered(registry, name, workspace.digests("model"))
    if known is not None:
        return known
    metrics = json.loads((workspace.path("report") / "metrics.json").read_text())
    decision = _judge(session, champion, metrics, tasks)
    version = registry.register(
        name,
        workspace.path("model"),
        registration(
            recipe,
            versions,
            metrics=metrics,
            scores=_scores(metrics, recipe.method),
            tags={
                MODEL_TAG: digest,
                DECISION_TAG: decision.reason,
                EXPERTS_TAG: json.dumps(expert_digests(session)),
            },
            promoted=decision.promoted,
            description=_description(session, decision),
        ),
        run=run,
    )
    return Outcome(with_aliases(registry, version), True, decision.reason)


def register_compressed(
    session: Session, registry: Registry, versions: Versions, run: Run
) -> Outcome | None:
    """Register the smallest compressed model that is good enough, as ``challenger``.

    It has a registered name of its own, for it takes our code to load it. It never becomes champion
    by itself: what it gains is size, which the gate does not weigh.

    Args:
        session: The recipe at work; its stage ``compression`` is up to date.
        registry: Where to.
        versions: The workspace's DVC project.
        run: The flow's run.

    Returns:
        None if no way to store the deltas is within the tolerance.
    """
    recipe, workspace = session.recipe, session.workspace
    folder = workspace.path("compression")
    if not (folder / MODEL).exists():
        return None
    metrics = json.loads((folder / REPORT / "metrics.json").read_text())
    digest = fingerprint(tree_digest(folder / MODEL))
    name = compressed_name(recipe)
    known = offered(registry, name, {digest}, compressed=True)
    if known is not None:
        return known
    made = _compressed(session, versions, metrics, digest)
    version = registry.register(name, folder / MODEL, made, run=run)
    return Outcome(with_aliases(registry, version), True, made.tags[DECISION_TAG])


def registration(
    recipe: Recipe,
    versions: Versions,
    *,
    metrics: Mapping[str, Any],
    scores: Mapping[str, float],
    tags: Mapping[str, str],
    promoted: bool,
    description: str,
) -> Registration:
    """What is recorded with a version: scores and reason, and what it can be made from again.

    Args:
        recipe: It was made by.
        versions: The workspace's DVC project, its data and checkpoints.
        metrics: All that was measured, for ``metrics.json``.
        scores: Those the registry shows.
        tags: Beside the code's and the recipe's.
        promoted: Whether the version becomes champion.
        description: Markdown.
    """
    return Registration(
        params=resolve(recipe),
        metrics=scores,
        tags={
            "git.commit": code_version(CODE),
            "upcycle.recipe": recipe_digest(recipe),
            **tags,
        },
        marks={PENDING_TAG: "champion" if promoted else "challenger"},
        files={
            "recipe.yaml": recipe_yaml(recipe),
            "dvc.lock": versions.lock_text(),
            "metrics.json": json.dumps(metrics, indent=1),
        },
        description=description,
    )


def _compressed(
    session: Session, versions: Versions, metrics: Mapping[str, Any], digest: str
) -> Registration:
    """What is recorded with the compressed model."""
    recipe = session.recipe
    sweep = metrics["sweeps"][row_title(recipe, recipe.compressed[0])]
    point = sweep["points"][sweep["chosen"]]
    reason = (
        f"{sweep['chosen']}: {point['percent_of_original']:.0f} % of the original's bytes, "
        f"normalised average {point['normalised_average']:.2f} against "
        f"{sweep['original']['normalised_average']:.2f}"
    )
    table = (session.workspace.path("compression") / REPORT / "table.md").read_text()
    return registration(
        recipe,
        versions,
        metrics=metrics,
        scores={
            "normalised_average": point["normalised_average"],
            "percent_of_original": point["percent_of_original"],
            **{f"perplexity.{d}": v for d, v in point["perplexity"].items()},
        },
        tags={MODEL_TAG: digest, COMPRESSED_TAG: sweep["chosen"], DECISION_TAG: reason},
        promoted=False,
        description=f"Experts as one base and light deltas (DeRS), {reason}.\n\n{table}",
    )


def _judge(
    session: Session,
    champion: Champion | None,
    metrics: Mapping[str, Any],
    tasks: TaskEvaluation | None,
) -> Decision:
    gate, perplexity = session.recipe.registry.gate, metrics["perplexity"]
    experts = {d: perplexity[expert_row(d)][d] for d in session.recipe.domains}
    row = session.recipe.method
    mine = figures(gate, row, perplexities=perplexity[row], experts=experts, tasks=tasks)
    if champion is None:
        return decide(gate, challenger=mine, champion=None)
    if champion.is_own:
        return decide(gate, challenger=mine, champion=mine)
    found = champion.perplexities(metrics["heldout"])
    theirs = figures(gate, CHAMPION, perplexities=found, experts=experts, tasks=tasks)
    return decide(gate, challenger=mine, champion=theirs)


def _scores(metrics: Mapping[str, Any], row: str) -> dict[str, float]:
    rows = metrics["normalised_average"]
    scores = {f"normalised_average.{name}": value for name, value in rows.items()}
    for domain, value in metrics["perplexity"][row].items():
        scores[f"perplexity.{domain}"] = value
    return scores


def _description(session: Session, decision: Decision) -> str:
    table = (session.workspace.path("report") / "table.md").read_text()
    domains = ", ".join(session.recipe.domains)
    method = title_of(session.recipe.method, ())
    return f"{method} Mixture-of-Experts of {domains}.\n\n{table}\n\nGate: {decision.reason}.\n"
