"""The last step of instruction tuning: judge the model beside the champion and register it."""

import json
from collections.abc import Mapping
from typing import Any

from infra.cluster.pieces import Piece
from tasks.data.licences import CARD
from tasks.engine.artifacts import ANSWERS
from tasks.engine.stage import Session
from tasks.release.champion import Champion
from tasks.release.register import Registrar
from tasks.release.versions import Outcome
from tasks.simoe.answers import answer_arguments, champion_piece
from tasks.simoe.card import pictures, tuned_card
from tasks.simoe.prepared import prepared_faults
from tasks.simoe.report import figures
from tasks.simoe.rows import SIMOE
from upcycle_core.errors import raise_faults

TITLE = "Sparse interpolated experts (SIMoE), found by instruction tuning."


def register_tuned(registrar: Registrar, champion: Champion | None) -> Outcome:
    """Register the workspace's tuned model, unless its bytes are the newest version already.

    Args:
        registrar: Of the flow.
        champion: Whom it has to beat, on the same instructions.

    Raises:
        InputError: The gate names a figure that nothing was asked for.
    """
    known = registrar.offered()
    if known is not None:
        return known
    session = registrar.session
    raise_faults(prepared_faults(session.recipe, session.workspace.path("instructions")))
    report = session.workspace.path("report")
    metrics = json.loads((report / "metrics.json").read_text())
    mine, theirs = figures(metrics, SIMOE), None
    if champion is not None:
        theirs = mine if champion.is_own else _figures_of(session, champion)
    # All tables would be a page of numbers.
    models = (report / "table.md").read_text().partition("\n## Unseen categories")[0]
    decision = registrar.judge(mine=mine, theirs=theirs)
    return registrar.register_model(
        decision,
        champion=champion,
        metrics=metrics,
        scores=mine,
        files={CARD: tuned_card(session, metrics, decision), **pictures(session)},
        description=f"{TITLE}\n\n{models}",
    )


def _figures_of(session: Session, champion: Champion) -> Mapping[str, Any]:
    """The champion's, on this run's instructions."""
    arguments = answer_arguments(session.recipe, session.workspace.path)
    mark = session.workspace.digest("report")
    piece = Piece.of("champion", champion_piece, **arguments, model=champion.directory)
    done = champion.run(piece, f"{mark}")
    return json.loads((done.path / ANSWERS).read_text())["figures"]
