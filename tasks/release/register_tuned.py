"""The last step of instruction tuning: judge the model beside the champion and register it."""

import json
from collections.abc import Mapping
from typing import Any

from infra.recipe.schema import SIMOE
from infra.tracking.registry import Registry
from infra.tracking.runs import Run
from infra.versioning.versions import Versions
from tasks.engine.artifacts import ANSWERS
from tasks.engine.stage import Session
from tasks.release.champion import Champion
from tasks.release.gate import Decision, decide
from tasks.release.register import registration
from tasks.release.versions import DECISION_TAG, MODEL_TAG, Outcome, offered, with_aliases
from tasks.simoe.answers import answer_arguments, answers_piece
from tasks.simoe.report import figures


def register_tuned(
    session: Session,
    registry: Registry,
    versions: Versions,
    run: Run,
    *,
    champion: Champion | None,
) -> Outcome:
    """Register the workspace's tuned model, unless its bytes are the newest version already.

    Args:
        session: The recipe at work; its report is up to date.
        registry: Where to.
        versions: The workspace's DVC project.
        run: The flow's run.
        champion: Whom it has to beat, on the same instructions.
    """
    recipe, workspace = session.recipe, session.workspace
    digest = workspace.digest("model")
    assert digest is not None
    known = offered(registry, recipe.registered_name, workspace.digests("model"))
    if known is not None:
        return known
    metrics = json.loads((workspace.path("report") / "metrics.json").read_text())
    mine = figures(metrics, SIMOE)
    decision = _judge(session, champion, mine)
    tables = (workspace.path("report") / "table.md").read_text()
    models = tables.partition("\n## Unseen categories")[0]  # all of them would be a page of numbers
    version = registry.register(
        recipe.registered_name,
        workspace.path("model"),
        registration(
            recipe,
            versions,
            metrics=metrics,
            scores=mine,
            tags={MODEL_TAG: digest, DECISION_TAG: decision.reason},
            promoted=decision.promoted,
            description=f"Sparse interpolated experts (SIMoE), found by instruction tuning.\n\n"
            f"{models}\n\nGate: {decision.reason}.\n",
        ),
        run=run,
    )
    return Outcome(with_aliases(registry, version), True, decision.reason)


def _judge(session: Session, champion: Champion | None, mine: Mapping[str, Any]) -> Decision:
    """Figures of both models on this run's instructions."""
    recipe = session.recipe
    theirs = None
    if champion is not None:
        theirs = mine if champion.is_own else _figures_of(session, champion)
    return decide(recipe.registry.gate, challenger=mine, champion=theirs)


def _figures_of(session: Session, champion: Champion) -> Mapping[str, Any]:
    arguments = answer_arguments(session.recipe, session.workspace.path)
    mark = session.workspace.digest("report")
    done = champion.run(
        "champion", answers_piece, {**arguments, "model": champion.directory}, f"{mark}"
    )
    return json.loads((done.path / ANSWERS).read_text())["figures"]
