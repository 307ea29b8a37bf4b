"""The last step: judge the model beside the champion and register it.

It is no stage: what it does lies in the registry, not in the workspace.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.readers.reader import READERS, at_hand
from infra.recipe.schema import recipe_digest, recipe_yaml, resolve
from infra.tracking.records import Registration, Version
from infra.tracking.registry import Registry
from infra.tracking.runs import Run
from infra.versioning.versions import Versions, code_version
from tasks.data.licences import CARD
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.release.card import of_experts, pictures, version_card
from tasks.release.certificate import CERTIFICATE_TAG, certify_version, refusal, version_files
from tasks.release.champion import CHAMPION, Champion
from tasks.release.gate import Decision, Figures, decide, figures, without
from tasks.release.history import EXPERTS_TAG, PENDING_TAG, former_champion, withdrawn_experts
from tasks.release.versions import (
    BESIDE_TAG,
    DECISION_TAG,
    IF_ARRIVED,
    MODEL_TAG,
    OUTCOME_TAG,
    Outcome,
    expert_digests,
    offered,
    settled,
    with_aliases,
)
from upcycle_core.evaluation.tasks.results import TaskEvaluation
from upcycle_core.evaluation.text.results import expert_row

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Registrar:
    """Registers what one flow has made.

    Args:
        session: The recipe at work; its report is up to date.
        registry: Where to.
        versions: The workspace's DVC project, its data and checkpoints.
        run: The flow's run.
    """

    session: Session
    registry: Registry
    versions: Versions
    run: Run

    def offered(self) -> Outcome | None:
        """What became of the workspace's model, if it is the newest version already.

        A flow that was stopped may have left it without its certificate.
        """
        recipe, digests = self.session.recipe, self.session.workspace.digests("model")
        known = offered(self.registry, recipe.registered_name, digests, recipe=recipe.name)
        return None if known is None else self.certified(known)

    def certified(self, known: Outcome) -> Outcome:
        """A registered version's outcome, with the certificate that a kill may have left out."""
        tags, asked = known.version.tags, self.session.recipe.registry.certificate
        if PENDING_TAG not in tags and (CERTIFICATE_TAG in tags or asked == "none"):
            return known
        version = self._certify(known.version)
        return Outcome(version, False, version.tags.get(DECISION_TAG, ""))

    def judge(self, *, mine: Figures, theirs: Figures | None) -> Decision:
        """Ask the recipe's gate; ``theirs`` are the champion's figures, None where there is none.

        Where there was one, and somebody deleted it, no other takes its place unjudged.
        """
        recipe, former = self.session.recipe, None
        if theirs is None:
            former = former_champion(self.registry, recipe.registered_name)
        return decide(recipe.registry.gate, challenger=mine, champion=theirs, former=former)

    def register_model(
        self,
        decision: Decision,
        *,
        champion: Champion | None,
        metrics: Mapping[str, Any],
        scores: Mapping[str, float],
        description: str,
        tags: Mapping[str, str] | None = None,
        files: Mapping[str, str | bytes] | None = None,
    ) -> Outcome:
        """Register the workspace's model, judged beside ``champion``; see ``register``."""
        digest = self.session.workspace.digest("model")
        assert digest is not None  # its stage is up to date
        return self.register(
            self.session.recipe.registered_name,
            self.session.workspace.path("model"),
            metrics=metrics,
            scores=scores,
            tags={
                OUTCOME_TAG: decision.outcome,
                MODEL_TAG: digest,
                DECISION_TAG: decision.reason,
                BESIDE_TAG: "none" if champion is None else str(champion.version.number),
                **(tags or {}),
            },
            files=files,
            promoted=decision.promoted,
            # Lists show the beginning alone.
            description=f"{decision.outcome}. {description}\n\nGate: {decision.reason}.\n",
        )

    def register(
        self,
        name: str,
        directory: Path,
        *,
        metrics: Mapping[str, Any],
        scores: Mapping[str, float],
        tags: Mapping[str, str],
        promoted: bool,
        description: str,
        files: Mapping[str, str | bytes] | None = None,
    ) -> Outcome:
        """Make a new version: with scores and reason, and what it can be made from again.

        Args:
            name: The registered model.
            directory: The checkpoint.
            metrics: All that was measured, for ``metrics.json``.
            scores: Those the registry shows.
            tags: Beside the code's and the recipe's; the decision is among them.
            promoted: Whether the version becomes champion; where the recipe requires a
                certificate, if it arrives.
            description: Markdown.
            files: What to keep beside the files that every version has, by name.
        """
        recipe = self.session.recipe
        highest = IF_ARRIVED if recipe.registry.certificate == "required" else "champion"
        made = Registration(
            params=resolve(recipe),
            metrics=scores,
            tags={
                "git.commit": code_version(CODE),
                "upcycle.recipe": recipe_digest(recipe),
                **tags,
            },
            marks={PENDING_TAG: highest if promoted else "challenger"},
            files={
                "recipe.yaml": recipe_yaml(recipe),
                "dvc.lock": self.versions.lock_text(),
                "metrics.json": json.dumps(metrics, indent=1),
                **(files or {}),
            },
            description=description,
            bos=recipe.corpus.bos,
        )
        with self.session.workspace.known.linking(directory.rglob("*")):
            version = self.registry.register(name, directory, made, run=self.run)
        named = with_aliases(self.registry, version)
        if recipe.registry.certificate != "none":
            named = self._certify(named)
        return Outcome(named, True, named.tags[DECISION_TAG])

    def _certify(self, version: Version) -> Version:
        """Ask the readers at hand, who decide of a version that waits for them.

        It stays registered, whatever they say of it.
        """
        waits = PENDING_TAG in version.tags
        if not waits and self.registry.place(version.reference) is None:
            _logger.info("no certificate of %s: its files are elsewhere", version.reference)
            return version
        named = self.session.recipe.registry.readers or ()
        readers = list(named or at_hand())
        with version_files(self.registry, version) as files:
            say = self.session.log
            rows = certify_version(self.registry, version, files, readers=readers, say=say)
        for row in rows:
            if row.verdict == "failed":
                _logger.error("%s did not arrive in %s: %s", version.reference, row.name, row.why)
        missing = ((str(name), READERS[name].missing) for name in named)
        absent = {name: why for name, why in missing if why is not None}
        tried = {row.reader for row in rows if row.verdict != "not tried"}
        absent |= {r.reader: r.why for r in rows if r.reader in named and r.reader not in tried}
        return settled(self.registry, version, refusal(rows, absent)) if waits else version


def register(
    registrar: Registrar, champion: Champion | None, tasks: TaskEvaluation | None
) -> Outcome:
    """Register the workspace's model, unless its bytes are the newest version already.

    Args:
        registrar: Of the flow.
        champion: Whom it has to beat.
        tasks: Scores on tasks of this model and of the champion; None without tasks.
    """
    known = registrar.offered()
    if known is not None:
        return known
    session = registrar.session
    report, method = session.workspace.path("report"), session.recipe.method
    metrics = json.loads((report / "metrics.json").read_text())
    decision = _judge(registrar, champion, metrics, tasks)
    names = {d: session.workspace.digests(f"experts/{d}") for d in session.recipe.domains}
    withdrawn = withdrawn_experts(registrar.registry, session.recipe.registered_name, names)
    decision = without(withdrawn, decision)
    return registrar.register_model(
        decision,
        champion=champion,
        metrics=metrics,
        scores=_scores(metrics, method),
        tags={EXPERTS_TAG: json.dumps(expert_digests(session))},
        files={CARD: version_card(session, metrics, decision), **pictures(session)},
        description=f"{of_experts(session.recipe)}.\n\n{(report / 'table.md').read_text()}",
    )


def _judge(
    registrar: Registrar,
    champion: Champion | None,
    metrics: Mapping[str, Any],
    tasks: TaskEvaluation | None,
) -> Decision:
    session, perplexity = registrar.session, metrics["perplexity"]
    gate = session.recipe.registry.gate
    experts = {d: perplexity[expert_row(d)][d] for d in session.recipe.domains}
    row = session.recipe.method
    mine = figures(gate, row, perplexities=perplexity[row], experts=experts, tasks=tasks)
    if champion is None:
        return registrar.judge(mine=mine, theirs=None)
    if champion.is_own:
        return registrar.judge(mine=mine, theirs=mine)
    found = champion.perplexities(metrics["heldout"])
    theirs = figures(gate, CHAMPION, perplexities=found, experts=experts, tasks=tasks)
    return registrar.judge(mine=mine, theirs=theirs)


def _scores(metrics: Mapping[str, Any], row: str) -> dict[str, float]:
    rows = metrics["normalised_average"]
    scores = {f"normalised_average/{name}": value for name, value in rows.items()}
    for domain, value in metrics["perplexity"][row].items():
        scores[f"perplexity/{domain}"] = value
    return scores
