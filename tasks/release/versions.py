"""The registry's versions of a model: their aliases, and which was champion when.

``champion`` is the version to use, ``challenger`` the newest one.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from infra.recipe.schema import Recipe
from infra.tracking.records import Version
from infra.tracking.registry import Registry
from tasks.data.licences import CARD
from tasks.engine.stage import Session
from upcycle_core.errors import Fault, InputError

MODEL_TAG = "upcycle.model"
"""Of a version: the digest of its files."""
DECISION_TAG = "upcycle.decision"
OUTCOME_TAG = "outcome"
"""Of a version: the decision in a few words, under a name that lists show whole."""
PREVIOUS_TAG = "upcycle.previous_champion"
"""Of a version that became champion: the number of the one before it, or ``none``."""
ROLLED_BACK_TAG = "upcycle.rolled_back"
"""Of a version that was champion and should not have been: why."""
EXPERTS_TAG = "upcycle.experts"
"""Of a version: the digests of its experts, {domain: the beginning of one}."""
PENDING_TAG = "upcycle.pending"
"""Of a version: the highest alias it is to get; gone when it has it."""
IF_ARRIVED = "champion if it arrives"
"""In place of that alias: its certificate decides, see ``settled``."""
BESIDE_TAG = "upcycle.judged_beside"
"""Of a version that the gate let through: the number of the champion that it beat, or ``none``."""
FORMER_TAG = "upcycle.has_had_champion"
"""Of a registered model: the number of the version that was champion last, if it is one or not."""
WITHDRAWN_TAG = "upcycle.withdrawn."
"""Of a registered model, with ``DOMAIN.DIGEST`` behind it: an expert that was in a champion, but in
one that was rolled back alone; the number of that version."""
COMPRESSED_TAG = "upcycle.compressed"
"""Of a version that stores another model's experts as base and deltas: in which way."""


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
    if known is None or known.tags.get(MODEL_TAG) not in digests:
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
    remember(registry, version.name, registry.versions(version.name))
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
    if reason.endswith(full):  # a kill came before the last call
        registry.remove_tag(version, PENDING_TAG)
        return _current(registry, version)
    short, full = f"refused: {short}", f"{reason}; {full}"
    page = registry.description(version)
    page = page.replace(f"{outcome}. ", f"{short}. ", 1).replace(f"{reason}.", f"{full}.", 1)
    registry.describe(version, page)
    card = registry.text(version, CARD)
    if card is not None:
        registry.attach(version, {CARD: card.replace(f"{reason}.", f"{full}.", 1)})
    registry.set_tags(version, {OUTCOME_TAG: short, DECISION_TAG: full})
    registry.remove_tag(version, PENDING_TAG)
    return _current(registry, version)


def _current(registry: Registry, version: Version) -> Version:
    """The version as the registry holds it now."""
    [current] = [v for v in registry.versions(version.name) if v.number == version.number]
    return current


def roll_back(
    registry: Registry, name: str, reason: str, *, only: int | None = None
) -> tuple[Version, Version]:
    """Make the champion before the champion the champion again.

    Args:
        registry: The registry.
        name: The registered model.
        reason: Kept with the version that is taken back.
        only: The number of the version to take back; by default, whichever is champion.

    Returns:
        The version that is champion no more, and the one that is.

    Raises:
        InputError: There is no such model, no champion, or none before it, or another version than
            ``only`` is champion.
    """
    with registry.alone(name):
        champion, before = champions(registry, name)
        if only not in (None, champion.number):
            remedy = f"is champion by now, not version {only}; nothing was changed"
            raise InputError(Fault("champion", champion.reference, remedy))
        if registry.pointed(name, "champion") != champion.number:  # of another home
            remedy = "is champion no more since a moment ago; nothing was changed: run it again"
            raise InputError(Fault("champion", champion.reference, remedy))
        registry.set_tags(champion, {ROLLED_BACK_TAG: reason})
        if PENDING_TAG in champion.tags:  # or the flow that a kill stopped would promote it again
            registry.remove_tag(champion, PENDING_TAG)
        after = [
            replace(version, aliases=("champion",) if version.number == before.number else ())
            for version in registry.versions(name)
        ]
        remember(registry, name, after)  # before the alias moves: a kill would leave it unsaid
        registry.set_alias(before, "champion")
        return champion, before


def remember(registry: Registry, name: str, versions: Sequence[Version]) -> None:
    """Keep with the registered model what its versions say of champions and rollbacks.

    A version may be deleted: by hand in MLflow, or because others are newer. What it says must
    not be forgotten with it.

    Args:
        registry: The registry.
        name: The registered model.
        versions: All that it has.
    """
    if not versions:
        return
    kept, led = registry.model_tags(name), _led(versions)
    told = [v for v in versions if PREVIOUS_TAG in v.tags]
    been = [str(v.number) for v in told if PENDING_TAG not in v.tags]  # or a kill came before
    standing = [str(version.number) for version in versions if "champion" in version.aliases]
    facts = {
        f"{WITHDRAWN_TAG}{domain}.{digest}": str(number)
        for (domain, digest), number in _withdrawn(versions).items()
        if digest not in led.get(domain, ())
    }
    facts |= {FORMER_TAG: been[-1]} if been else {}
    facts |= kept
    facts |= {FORMER_TAG: standing[0]} if standing else {}
    registry.set_model_tags(name, {k: v for k, v in facts.items() if kept.get(k) != v})


def former_champion(registry: Registry, name: str) -> str | None:
    """The number of the version that was champion last; None where there never was one.

    Of versions that an earlier release made, ``remember`` has read it.
    """
    return registry.model_tags(name).get(FORMER_TAG)


def champions(registry: Registry, name: str) -> tuple[Version, Version]:
    """The champion of a registered model, and the one before it.

    Raises:
        InputError: There is no such model, no champion, or none before it, or the files of that
            one are lost.
    """
    versions = {version.number: version for version in registry.versions(name)}
    champion = next((v for v in versions.values() if "champion" in v.aliases), None)
    if champion is None:
        remedy = "is no registered model with a champion; see the names in MLflow (make up)"
        raise InputError(Fault("name", name, remedy))
    before = versions.get(_before(champion, versions.values()) or 0)
    if before is None:
        remedy = "has no champion before it that is still registered; nothing was changed. Set the "
        remedy += "alias in MLflow (make up) if another version is to be it"
        raise InputError(Fault("champion", champion.reference, remedy))
    before.need_files()
    return champion, before


def ways_back(versions: Sequence[Version]) -> set[int]:
    """The numbers of the versions that a rollback from any with an alias would lead to."""
    found = {_before(version, versions) for version in versions if version.aliases}
    return {number for number in found if number is not None}


def _before(champion: Version, versions: Collection[Version]) -> int | None:
    """The champion before: of one that a person made, the newest that has been one."""
    own = [version for version in versions if PREVIOUS_TAG in version.tags and not version.is_copy]
    if champion in own:
        tag = champion.tags[PREVIOUS_TAG]
        return int(tag) if tag.isdecimal() else None
    been = [version.number for version in own if ROLLED_BACK_TAG not in version.tags]
    return max(been, default=None)


def expert_digests(session: Session) -> dict[str, str]:
    """The beginning of the digest of every domain's expert that is in the workspace."""
    found = {d: session.workspace.digest(f"experts/{d}") for d in session.recipe.domains}
    return {domain: digest[:16] for domain, digest in found.items() if digest is not None}


def led_experts(registry: Registry, name: str) -> dict[str, set[str]] | None:
    """{domain: the beginnings of the digests of its experts that have been in a champion}.

    That of now counts, by whomever it was made champion; one that was rolled back does not. None
    where there is no version at all.
    """
    versions = registry.versions(name)
    return _led(versions) if versions else None


def withdrawn_experts(
    registry: Registry, name: str, experts: Mapping[str, Collection[str]]
) -> dict[str, int]:
    """Those of ``experts`` that were in a champion, but in one that was rolled back alone.

    Where the champion before it does not say what was in it, nobody can tell. What the registered
    model remembers counts as what its versions say.

    Args:
        registry: The registry.
        name: The registered model.
        experts: {domain: the digests by which its expert has been known}.

    Returns:
        {domain: the number of the newest version that was rolled back with it}.
    """
    versions = registry.versions(name)
    led = _led(versions)
    known = {**_remembered(registry.model_tags(name)), **_withdrawn(versions)}
    return {
        domain: number
        for (domain, digest), number in sorted(known.items(), key=lambda item: item[1])
        if _is_any(experts.get(domain, ()), (digest,))
        and not _is_any(experts[domain], led.get(domain, ()))
    }


def _withdrawn(versions: Sequence[Version]) -> dict[tuple[str, str], int]:
    """{(domain, digest): the newest version that was rolled back with that expert}."""
    telling = {str(version.number) for version in versions if EXPERTS_TAG in version.tags}
    return {
        (domain, digest): version.number
        for version in versions
        if ROLLED_BACK_TAG in version.tags and version.tags.get(PREVIOUS_TAG) in telling
        for domain, digest in _experts_of(version).items()
    }


def _remembered(tags: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """The same, as tags of the registered model say it."""
    found = {}
    for key, number in tags.items():
        domain, _, digest = key.removeprefix(WITHDRAWN_TAG).rpartition(".")
        if key.startswith(WITHDRAWN_TAG) and number.isdecimal():
            found[domain, digest] = int(number)
    return found


def _is_any(names: Collection[str], beginnings: Collection[str]) -> bool:
    """Whether an artifact that is known by these names is one of those."""
    return any(name.startswith(tuple(beginnings)) for name in names)


def _experts_of(version: Version) -> dict[str, str]:
    return json.loads(version.tags.get(EXPERTS_TAG, "{}"))


def _led(versions: Sequence[Version]) -> dict[str, set[str]]:
    led: dict[str, set[str]] = {}
    for version in versions:
        has_led = PREVIOUS_TAG in version.tags and ROLLED_BACK_TAG not in version.tags
        if has_led or "champion" in version.aliases:
            for domain, digest in _experts_of(version).items():
                led.setdefault(domain, set()).add(digest)
    return led


def compressed_name(recipe: Recipe) -> str:
    """The registered model whose experts are stored as base and deltas (DeRS)."""
    return f"{recipe.registered_name}-ders"


def newest(versions: Sequence[Version], *, recipe: str, compressed: bool = False) -> Version | None:
    """The newest version of either kind. (Compressed ones once had no name of their own.)

    Those of another recipe that registers under the same name are left out.
    """
    kind = [v for v in versions if (COMPRESSED_TAG in v.tags) == compressed]
    own = [version for version in kind if version.params.get("name", recipe) == recipe]
    return own[-1] if own else None
