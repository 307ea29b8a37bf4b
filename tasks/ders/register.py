"""The smallest compressed model that is good enough, registered beside the one it was made of."""

import json
from collections.abc import Mapping
from contextlib import suppress

from infra.tracking.copies import in_place
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
    newest,
    offered,
)
from upcycle_core.checkpoints.card import MODEL_CARD
from upcycle_core.checkpoints.hashing import tree_digest
from upcycle_core.errors import InputError


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
    weights = {file: digest for file, digest in files.items() if file != MODEL_CARD}
    bare, digest, name = fingerprint(weights), fingerprint(files), compressed_name(recipe)
    _tell_older(registrar, name, weights, bare)
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


def _tell_older(registrar: Registrar, name: str, weights: Mapping[str, str], bare: str) -> None:
    """Tag the newest version of an earlier release with ``bare``, if it is of these ``weights``.

    One whose files are on another machine is not looked at, and is registered once more.
    """
    registry, recipe = registrar.registry, registrar.session.recipe.name
    known = newest(registry.versions(name), recipe=recipe, compressed=True)
    if known is None or BARE_TAG in known.tags:
        return
    place, memory = None, registrar.session.workspace.known
    with suppress(InputError):  # its files are lost
        place = in_place(known, registry)
    if place is not None and all(
        (place / file).is_file() and memory.sha256(place / file) == digest
        for file, digest in weights.items()
    ):
        registry.set_tags(known, {BARE_TAG: bare})
