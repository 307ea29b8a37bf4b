"""Who was champion when: the way back, and whose experts have led.

What versions say of it, the registered model remembers: a version may be deleted.
"""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from infra.tracking.records import Version
from infra.tracking.registry import Registry
from upcycle_core.errors import Fault, InputError

PREVIOUS_TAG = "upcycle.previous_champion"
"""Of a version that became champion: the number of the one before it, or ``none``."""
ROLLED_BACK_TAG = "upcycle.rolled_back"
"""Of a version that was champion and should not have been: why."""
BY_HAND = "alias moved by hand to version "
"""Begins that of one whose alias a person has moved back to an older version in MLflow."""
REVOKED_TAG = "upcycle.revoked"
"""Of a version that was champion and is none any more, for it did not arrive in a reader: why. Its
experts are none the worse for it."""
EXPERTS_TAG = "upcycle.experts"
"""Of a version: the digests of its experts, {domain: the beginning of one}."""
PENDING_TAG = "upcycle.pending"
"""Of a version: the highest alias it is to get; gone when it has it."""
FORMER_TAG = "upcycle.has_had_champion"
"""Of a registered model: the number of the version that was champion last, if it is one or not."""
WITHDRAWN_TAG = "upcycle.withdrawn."
"""Of a registered model, with ``DOMAIN.DIGEST`` behind it: an expert that was in a champion, but in
one that was rolled back alone; the number of that version."""
_logger = logging.getLogger(__name__)


def roll_back(
    registry: Registry, name: str, reason: str, *, only: int | None = None, withdraws: bool = True
) -> tuple[Version, Version]:
    """Make the champion before the champion the champion again.

    Args:
        registry: The registry.
        name: The registered model.
        reason: Kept with the version that is taken back.
        only: The number of the version to take back; by default, whichever is champion.
        withdraws: Whether its experts are taken back with it: not where a reader lost the model.

    Returns:
        The version that is champion no more, as it was before, and the one that is; the same where
        ``only`` was taken back already: nothing is changed then.

    Raises:
        InputError: There is no such model, no champion, or none before it, or another version than
            ``only`` is champion.
    """
    with registry.alone(name):
        heed_hands(registry, name)
        done = taken_back(registry, name, only)
        if done is not None:
            return done
        champion, before = champions(registry, name)
        if only not in (None, champion.number):
            remedy = f"is champion by now, not version {only}; nothing was changed"
            raise InputError(Fault("champion", champion.reference, remedy))
        if registry.pointed(name, "champion") != champion.number:  # of another home
            remedy = "is champion no more since a moment ago; nothing was changed: run it again"
            raise InputError(Fault("champion", champion.reference, remedy))
        _take_back(registry, champion, {ROLLED_BACK_TAG if withdraws else REVOKED_TAG: reason})
        after = [
            replace(version, aliases=("champion",) if version.number == before.number else ())
            for version in registry.versions(name)
        ]
        remember(registry, name, after)  # before the alias moves: a kill would leave it unsaid
        registry.set_alias(before, "champion")
        return champion, before


def _take_back(registry: Registry, version: Version, why: Mapping[str, str]) -> None:
    """Mark a version that was champion."""
    if PENDING_TAG in version.tags:  # or the flow that a kill stopped would promote it again
        registry.remove_tag(version, PENDING_TAG)
    registry.set_tags(version, why)


def taken_back(registry: Registry, name: str, number: int | None) -> tuple[Version, Version] | None:
    """A version that was rolled back and is champion no more, and who is; None of any other.

    Args:
        registry: The registry.
        name: The registered model.
        number: The version's.
    """
    versions = registry.versions(name)
    left = next((v for v in versions if v.number == number and ROLLED_BACK_TAG in v.tags), None)
    champion = next((v for v in versions if "champion" in v.aliases), None)
    return None if left is None or champion in (None, left) else (left, champion)


def catch_up(registry: Registry, name: str) -> list[Version]:
    """Heed what people did to the alias ``champion`` in MLflow, and remember what versions say.

    Where the alias was moved back to an older version, the champion that it was taken from counts
    as rolled back, until the alias is moved to that one again.

    Returns:
        All versions of the registered model, oldest first.
    """
    with registry.alone(name):
        return heed_hands(registry, name)


def heed_hands(registry: Registry, name: str) -> list[Version]:
    """As ``catch_up``, for who has the registered model alone already."""
    former = former_champion(registry, name)  # first: of another home, whose flow moves the alias
    versions = registry.versions(name)
    champion = next((v for v in versions if "champion" in v.aliases), None)
    if champion is not None:
        left = _left_by_hand(champion, versions, former)
        if left is not None:
            why = f"{BY_HAND}{champion.number}"
            said = "%s counts as rolled back: %s; move it there again if that version is good"
            _logger.warning(said, left.reference, why)
            _take_back(registry, left, {ROLLED_BACK_TAG: why})
        is_back = champion.tags.get(ROLLED_BACK_TAG, "").startswith(BY_HAND)
        if is_back:
            _lift(registry, champion)
        if left is not None or is_back:
            versions = registry.versions(name)
    remember(registry, name, versions)
    return versions


def _left_by_hand(
    champion: Version, versions: Sequence[Version], former: str | None
) -> Version | None:
    """Who was champion last, if a person has given its alias to an older version.

    What flows have taken back they have said, and whom they promote has a newer number, or names
    that one as the champion before it.
    """
    left = next((v for v in versions if str(v.number) == former), None)
    if left is None or left.number <= champion.number:
        return None
    is_said = bool({ROLLED_BACK_TAG, REVOKED_TAG} & left.tags.keys())
    return None if is_said or champion.tags.get(PREVIOUS_TAG) == former else left


def _lift(registry: Registry, version: Version) -> None:
    """Let a version, and its experts, count again as they did before its alias was moved."""
    for key, number in registry.model_tags(version.name).items():
        if key.startswith(WITHDRAWN_TAG) and number == str(version.number):
            registry.remove_model_tag(version.name, key)
    registry.remove_tag(version, ROLLED_BACK_TAG)


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
    been = [str(version.number) for version in versions if _has_been_champion(version)]
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
    """The champion before: of one that a person made, the newest that has been one.

    Whom the person took the alias from to give it to this one stood before it.
    """
    own = [version for version in versions if PREVIOUS_TAG in version.tags and not version.is_copy]
    if champion in own:
        tag = champion.tags[PREVIOUS_TAG]
        return int(tag) if tag.isdecimal() else None
    been = [v for v in own if _has_been_champion(v) and REVOKED_TAG not in v.tags]
    moved = f"{BY_HAND}{champion.number}"
    free = [v.number for v in been if v.tags.get(ROLLED_BACK_TAG, moved) == moved]
    return max(free, default=None)


def _has_been_champion(version: Version) -> bool:
    """Whether it got the alias: a kill may have come before, when the one before it was named."""
    return PREVIOUS_TAG in version.tags and PENDING_TAG not in version.tags


def of_recipe(versions: Sequence[Version], recipe: str) -> list[Version]:
    """The versions without those of another recipe that registers under the same name."""
    return [version for version in versions if version.params.get("name", recipe) == recipe]


def led_experts(registry: Registry, name: str, *, recipe: str) -> dict[str, set[str]] | None:
    """{domain: the beginnings of the digests of its experts that have been in a champion}.

    That of now counts, by whomever it was made champion; one that was rolled back does not, nor one
    of another recipe. None where there is no version at all.
    """
    versions = of_recipe(registry.versions(name), recipe)
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
        has_led = _has_been_champion(version) and ROLLED_BACK_TAG not in version.tags
        if has_led or "champion" in version.aliases:
            for domain, digest in _experts_of(version).items():
                led.setdefault(domain, set()).add(digest)
    return led
