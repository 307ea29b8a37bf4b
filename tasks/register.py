"""The last step: judge the model beside the champion and register it.

It is no stage: what it does lies in the registry, not in the workspace.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.compute import Piece, run_pieces
from infra.recipe import recipe_digest, recipe_yaml, resolve
from infra.records import Registration, Version
from infra.registry import Registry
from infra.tracking import Run
from infra.versions import Versions, code_version
from tasks.evaluation import champion_piece
from tasks.gate import Decision, decide
from tasks.stage import CODE, Session
from upcycle_core.evaluation.results import expert_row

MODEL_TAG = "upcycle.model"
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


def register(session: Session, registry: Registry, versions: Versions, run: Run) -> Outcome:
    """Register the workspace's model, unless its bytes are the newest version already."""
    recipe, workspace = session.recipe, session.workspace
    name = recipe.registered_name
    digest = workspace.digest("model")
    assert digest is not None
    known = registry.versions(name)
    if known and known[-1].tags.get(MODEL_TAG) == digest:
        return Outcome(known[-1], False, known[-1].tags.get(DECISION_TAG, ""))
    metrics = json.loads((workspace.path("report") / "metrics.json").read_text())
    decision = _judge(session, registry, registry.find(name, "champion"), metrics)
    version = registry.register(
        name,
        workspace.path("model"),
        Registration(
            params=resolve(recipe),
            metrics=_scores(metrics),
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
    session: Session, registry: Registry, champion: Version | None, metrics: Mapping[str, Any]
) -> Decision:
    domains = list(session.recipe.domains)
    perplexity = metrics["perplexity"]
    return decide(
        session.recipe.registry.gate,
        challenger=perplexity["dume"],
        champion=None if champion is None else _evaluate(session, registry, champion, metrics),
        experts={domain: perplexity[expert_row(domain)][domain] for domain in domains},
    )


def _evaluate(
    session: Session, registry: Registry, champion: Version, metrics: Mapping[str, Any]
) -> dict[str, float]:
    """The champion's perplexity on this run's held-out text, per token of this run's tokenizer."""
    workspace, recipe = session.workspace, session.recipe
    directory = workspace.staging / "champion"
    shutil.rmtree(directory, ignore_errors=True)
    registry.download(champion.reference, directory)
    session.log(f"evaluating the champion, {champion.reference}, on the same text")
    pieces = workspace.pieces / f"champion-{champion.number}-{workspace.digest('report')}"
    try:
        done = run_pieces(
            [
                Piece(
                    name="champion",
                    function=champion_piece,
                    arguments={
                        "model": directory,
                        "tokenizer": workspace.path("tokenizer"),
                        "documents": {d: workspace.path(f"documents/{d}") for d in recipe.domains},
                        "corpora": {d: workspace.path(f"corpora/{d}") for d in recipe.domains},
                        "config": recipe.evaluation,
                        "reference": metrics["heldout"],
                    },
                )
            ],
            directory=pieces,
            resources=recipe.compute.evaluation,
            label="register",
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return done["champion"].result


def _scores(metrics: Mapping[str, Any]) -> dict[str, float]:
    rows = metrics["normalised_average"]
    scores = {f"normalised_average.{row}": value for row, value in rows.items()}
    for domain, value in metrics["perplexity"]["dume"].items():
        scores[f"perplexity.{domain}"] = value
    return scores


def _description(session: Session, decision: Decision) -> str:
    table = (session.workspace.path("report") / "table.md").read_text()
    domains = ", ".join(session.recipe.domains)
    return f"DUME Mixture-of-Experts of {domains}.\n\n{table}\n\nGate: {decision.reason}.\n"
