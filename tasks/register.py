"""The last step: judge the model beside the champion and register it.

It is no stage: what it does lies in the registry, not in the workspace.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.recipe import recipe_digest, recipe_yaml, resolve
from infra.records import Registration, Version
from infra.registry import Registry
from infra.tracking import Run
from infra.versions import Versions, code_version
from tasks.champion import CHAMPION, MODEL_TAG, Champion
from tasks.gate import Decision, decide, figures
from tasks.stage import CODE, Session
from upcycle_core.evaluation.harness.results import TaskEvaluation
from upcycle_core.evaluation.results import expert_row
from upcycle_core.evaluation.table import title

DECISION_TAG = "upcycle.decision"


@dataclass(frozen=True)
class Outcome:
    """What became of the model.

    Args:
        version: Its version in the registry.
        is_new: Whether this run registered it.
        decision: What the gate said, and why.
    """

    version: Version
    is_new: bool
    decision: str


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
    known = registry.versions(name)
    if known and known[-1].tags.get(MODEL_TAG) == digest:
        return Outcome(known[-1], False, known[-1].tags.get(DECISION_TAG, ""))
    metrics = json.loads((workspace.path("report") / "metrics.json").read_text())
    decision = _judge(session, champion, metrics, tasks)
    version = registry.register(
        name,
        workspace.path("model"),
        Registration(
            params=resolve(recipe),
            metrics=_scores(metrics, recipe.method),
            tags={
                MODEL_TAG: digest,
                "git.commit": code_version(CODE),
                "upcycle.recipe": recipe_digest(recipe),
                DECISION_TAG: decision.reason,
            },
            files={
                "recipe.yaml": recipe_yaml(recipe),
                "dvc.lock": versions.lock_text(),
                "metrics.json": json.dumps(metrics, indent=1),
            },
            description=_description(session, decision),
        ),
        run=run,
    )
    registry.set_alias(version, "challenger")
    if decision.promoted:
        registry.set_alias(version, "champion")
    [current] = [v for v in registry.versions(name) if v.number == version.number]
    return Outcome(current, True, decision.reason)


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
    method = title(session.recipe.method, ())
    return f"{method} Mixture-of-Experts of {domains}.\n\n{table}\n\nGate: {decision.reason}.\n"
