"""The registry's versions of a model: how each gets its aliases, or is refused.

``champion`` is the version to use, ``challenger`` the newest one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from infra.recipe.schema import Recipe
from infra.tracking.records import Version
from infra.tracking.registry import Registry
from tasks.data.licences import CARD
from tasks.engine.stage import Session
from tasks.release.history import PENDING_TAG, PREVIOUS_TAG, heed_hands, of_recipe

MODEL_TAG = "upcycle.model"
"""Of a version: the digest of its files."""
DECISION_TAG = "upcycle.decision"
OUTCOME_TAG = "outcome"
"""Of a version: the decision in a few words, under a name that lists show whole."""
IF_ARRIVED = "champion if it arrives"
"""In place of that alias: its certificate decides, see ``settled``."""
BESIDE_TAG = "upcycle.judged_beside"
"""Of a version that the gate let through: the number of the champion that it beat, or ``none``."""
COMPRESSED_TAG = "upcycle.compressed"
"""Of a version that stores another model's experts as base and deltas: in which way."""

BARE_TAG = "upcycle.bare"
"""Of a compressed version: the digest of its files but the card, which says more of the recipe than
what decides the others."""


@dataclass(frozen=True)
class Outcome:
    """What became of the model.

    Args:
        version: Its version in the registry.
        is_new: Whether this run registered it.
        decision: What the gate said when it was registered, and why.
    """

    version: Version
    is_new: bool
    decision: str

    @property
    def verdict(self) -> str:
        """What a run says of it: a champion of today may be this very version.

        One that was refused is not judged again, though the gate or the champion may be another.
        """
        if self.is_new:
            return self.decision
        said = f"as it was registered: version {self.version.number} is this very model"
        outcome = self.version.tags.get(OUTCOME_TAG, "")
        if "champion" in self.version.aliases or not outcome.startswith("refused"):
            return said
        return f"{said}, {outcome}; set the alias in MLflow (make up) if it is to be champion now"


def offered(
    registry: Registry,
    name: str,
    digests: Collection[str],
    *,
    recipe: str,
    compressed: bool = False,
) -> Outcome | None:
    """What became of a model, named by any of ``digests``, if it is the newest version already.

    A version that a killed flow left without its aliases gets them now.

    Args:
        registry: The registry.
        name: The registered model.
        digests: By which the model has been known.
        recipe: The name of the recipe that made it; as in ``newest``.
        compressed: Which kind it is.
    """
    known = newest(registry.versions(name), recipe=recipe, compressed=compressed)
    if known is None or not {known.tags.get(tag) for tag in (MODEL_TAG, BARE_TAG)} & {*digests}:
        return None
    return Outcome(with_aliases(registry, known), False, known.tags.get(DECISION_TAG, ""))


def with_aliases(registry: Registry, version: Version) -> Version:
    """A new version as ``challenger``, and as ``champion`` if it was promoted.

    Every step may be done again: whoever was killed between them leaves what says how to go on.
    """
    if PENDING_TAG not in version.tags:
        return version
    with registry.alone(version.name):
        return _with_aliases(registry, _current(registry, version))


def _with_aliases(registry: Registry, version: Version) -> Version:
    """The same of a version as it is now, while nobody else of this home changes any."""
    if PENDING_TAG not in version.tags:  # a rollback came first
        return version
    registry.set_alias(version, "challenger")
    if version.tags[PENDING_TAG] == IF_ARRIVED:
        return _current(registry, version)
    if version.tags[PENDING_TAG] == "champion" and "champion" not in version.aliases:
        before = registry.pointed(version.name, "champion")
        tag = "none" if before is None else str(before)
        if version.tags.get(BESIDE_TAG, tag) != tag:
            return _refused(registry, version, *_of_another(before, version.tags[BESIDE_TAG]))
        registry.set_tags(version, {PREVIOUS_TAG: tag})
        registry.set_alias(version, "champion")
    heed_hands(registry, version.name)
    registry.remove_tag(version, PENDING_TAG)
    return _current(registry, version)


def settled(registry: Registry, version: Version, refusal: tuple[str, str] | None) -> Version:
    """A version that waited for its certificate, as champion or refused.

    What says that the gate let it through, its tags, page and card, says then that it is refused.

    Args:
        registry: The registry.
        version: ``PENDING_TAG`` is ``IF_ARRIVED``.
        refusal: In a few words and in full; None if it arrived.
    """
    with registry.alone(version.name):
        version = _current(registry, version)
        if version.tags.get(PENDING_TAG) != IF_ARRIVED:  # another flow was first
            return _with_aliases(registry, version)
        if refusal is not None:
            return _refused(registry, version, *refusal)
        registry.set_tags(version, {PENDING_TAG: "champion"})
        return _with_aliases(registry, _current(registry, version))


def _of_another(champion: int | None, beside: str) -> tuple[str, str]:
    """Why a version is refused that was judged before the champion changed, or was deleted."""
    than = "none" if beside == "none" else f"version {beside}"
    now = "none" if champion is None else f"version {champion}"
    why = f"{now} is champion now, and it was judged when {than} was"
    remedy = "set the alias in MLflow (make up) if it is to be champion all the same"
    return "the champion changed meanwhile", f"{why}; {remedy}"


def _refused(registry: Registry, version: Version, short: str, full: str) -> Version:
    """A version that the gate let through, and that is no champion all the same."""
    outcome, reason = version.tags.get(OUTCOME_TAG, ""), version.tags.get(DECISION_TAG, "")
    if not reason.endswith(full):  # else a kill came before the last calls
        short, full = f"refused: {short}", f"{reason}; {full}"
        page = registry.description(version)
        page = page.replace(f"{outcome}. ", f"{short}. ", 1).replace(f"{reason}.", f"{full}.", 1)
        registry.describe(version, page)
        card = registry.text(version, CARD)
        if card is not None:
            registry.attach(version, {CARD: card.replace(f"{reason}.", f"{full}.", 1)})
        registry.set_tags(version, {OUTCOME_TAG: short, DECISION_TAG: full})
    if PREVIOUS_TAG in version.tags:  # another kill came just before it was to be champion
        registry.remove_tag(version, PREVIOUS_TAG)
    registry.remove_tag(version, PENDING_TAG)
    return _current(registry, version)


def _current(registry: Registry, version: Version) -> Version:
    """The version as the registry holds it now."""
    [current] = [v for v in registry.versions(version.name) if v.number == version.number]
    return current


def expert_digests(session: Session) -> dict[str, str]:
    """The beginning of the digest of every domain's expert that is in the workspace."""
    found = {d: session.workspace.digest(f"experts/{d}") for d in session.recipe.domains}
    return {domain: digest[:16] for domain, digest in found.items() if digest is not None}


def compressed_name(recipe: Recipe) -> str:
    """The registered model whose experts are stored as base and deltas (DeRS)."""
    return f"{recipe.registered_name}-ders"


def newest(versions: Sequence[Version], *, recipe: str, compressed: bool = False) -> Version | None:
    """The newest version of either kind. (Compressed ones once had no name of their own.)

    Those of another recipe that registers under the same name are left out.
    """
    kind = [v for v in versions if (COMPRESSED_TAG in v.tags) == compressed]
    own = of_recipe(kind, recipe)
    return own[-1] if own else None
