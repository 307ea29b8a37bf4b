"""The smallest compressed model that is good enough, registered beside the one it was made of."""

import json

from tasks.data.licences import CARD
from tasks.ders.card import compressed_card
from tasks.ders.compression import MODEL, REPORT, row_title
from tasks.ders.section import section
from tasks.engine.workspace import fingerprint
from tasks.release.register import Registrar
from tasks.release.versions import (
    BARE_TAG,
    COMPRESSED_TAG,
    DECISION_TAG,
    MODEL_TAG,
    Outcome,
    compressed_name,
    offered,
)
from upcycle_core.checkpoints.card import MODEL_CARD
from upcycle_core.checkpoints.hashing import tree_digest


def register_compressed(registrar: Registrar) -> Outcome | None:
    """Register the smallest compressed model that is good enough, as ``challenger``.

    It has a registered name of its own, for it takes our code to load it. It never becomes champion
    by itself: what it gains is size, which the gate does not weigh.

    Returns:
        None if no way to store the deltas is within the tolerance.
    """
    recipe = registrar.session.recipe
    folder = registrar.session.workspace.path("compression")
    if not (folder / MODEL).exists():
        return None
    memory = registrar.session.workspace.known
    files = tree_digest(folder / MODEL, known=memory)
    # The tolerance, and what else is measured, changes the card alone.
    bare = fingerprint({file: digest for file, digest in files.items() if file != MODEL_CARD})
    digest, name = fingerprint(files), compressed_name(recipe)
    known = offered(registrar.registry, name, {digest, bare}, recipe=recipe.name, compressed=True)
    if known is not None:
        return registrar.certified(known)
    metrics = json.loads((folder / REPORT / "metrics.json").read_text())
    sweep = metrics["sweeps"][row_title(recipe, section(recipe).models[0])]
    point = sweep["points"][sweep["chosen"]]
    reason = (
        f"{sweep['chosen']}: {point['percent_of_original']:.0f} % of the original's bytes, "
        f"normalised average {point['normalised_average']:.2f} against "
        f"{sweep['original']['normalised_average']:.2f}"
    )
    table = (folder / REPORT / "table.md").read_text()
    return registrar.register(
        name,
        folder / MODEL,
        metrics=metrics,
        scores={
            "normalised_average": point["normalised_average"],
            "percent_of_original": point["percent_of_original"],
            **{f"perplexity/{d}": v for d, v in point["perplexity"].items()},
        },
        tags={
            MODEL_TAG: digest,
            BARE_TAG: bare,
            COMPRESSED_TAG: sweep["chosen"],
            DECISION_TAG: reason,
        },
        files={CARD: compressed_card(registrar.session, name, point, reason)},
        promoted=False,
        description=f"Experts as one base and light deltas (DeRS), {reason}.\n\n{table}",
    )
