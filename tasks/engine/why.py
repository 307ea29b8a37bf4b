"""Why a stage runs: what is not as it was when its artifact was made, in words."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from tasks.engine.params import recorded_setting
from tasks.engine.workspace import Workspace, enclosing

SHOWN = 3
"""Differences that one line tells."""
OUTSIDE = "sources/"
"""Inputs that stand for what settings name outside: where these are the same, code alone decides
whether they are read."""


def differences(record: Mapping[str, Any], made_from: Mapping[str, Any]) -> list[str]:
    """What differs between a published artifact and what would be made now.

    Args:
        record: What the artifact's ``provenance.json`` says.
        made_from: What ``Stage.made_from`` says.

    Returns:
        Inputs first, then settings, packages, and code; empty if nothing differs.
    """
    return [
        *_inputs(record, made_from),
        *_settings(record.get("params", {}), made_from["params"]),
        *_exchanged(record.get("params", {}), made_from["params"]),
        *upgrades(record, made_from),
    ]


def upgrades(record: Mapping[str, Any], made_from: Mapping[str, Any]) -> list[str]:
    """What of ``differences`` is packages and code alone, and what that code reads."""
    before, now = record.get("params", {}).keys(), made_from["params"].keys()
    read = record.get("inputs", {}).keys() - made_from["inputs"].keys()
    return [
        *(f"{name} is read no more" for name in sorted(read) if name.startswith(OUTSIDE)),
        *(f"{key} decides as well now" for key in sorted(now - before)),
        *(f"{key} decides no more" for key in sorted(before - now)),
        *_versions(record["packages"], made_from["packages"]),
        *_code(record.get("sources", {}), made_from["sources"]),
    ]


def as_recorded_now(
    record: Mapping[str, Any], made_from: Mapping[str, Any], workspace: Workspace
) -> Mapping[str, Any]:
    """A record of an earlier version in the words of this one.

    Where that read all of an artifact and this reads a part, the part is as it was if all of it is;
    where that named a section of the recipe and this a key in it, that section says its value.
    Before packages were recorded the list of modules was typed. What it did not write down counts
    as unchanged: packages, and modules beside those that both lists name; none in common is as good
    as all changed.

    Args:
        record: What the artifact's ``provenance.json`` says.
        made_from: What would make it now.
        workspace: Knows by which digests its artifacts have been called.
    """
    if "packages" in record:
        inputs = dict(_narrowed(record.get("inputs", {}), made_from["inputs"], workspace))
        params = record.get("params", {})
        own = dict(_known(params, made_from["params"]))
        return {**record, "inputs": inputs, "params": {**params, **own}}
    sources, listed = made_from["sources"], record.get("sources", {})
    common = sources.keys() & listed.keys()
    return {
        "inputs": dict(_had(record.get("inputs", {}), made_from["inputs"], workspace)),
        "params": dict(_known(record.get("params", {}), made_from["params"])),
        "packages": made_from["packages"],
        "sources": {**sources, **{name: listed[name] for name in common}} if common else {},
    }


def _narrowed(
    inputs: Mapping[str, str], made_from: Mapping[str, str], workspace: Workspace
) -> Iterator[tuple[str, str]]:
    """Recorded inputs; in the place of one that is read no more, what is read of it now."""
    for name, digest in inputs.items():
        parts = [part for part in made_from if part not in inputs and name in enclosing(part)]
        if name in made_from or not parts:
            yield name, digest
            continue
        same = workspace.has_digest(name, digest)
        yield from ((part, made_from[part] if same else digest) for part in parts)


def _known(params: Mapping[str, Any], keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What recorded ``params`` say at those ``keys`` that they know."""
    for key in keys:
        with suppress(KeyError):
            yield key, recorded_setting(params, key)


def _had(
    inputs: Mapping[str, str], made_from: Mapping[str, str], workspace: Workspace
) -> Iterator[tuple[str, str]]:
    """Inputs of now that an earlier version read too, or the artifacts that hold them."""
    for name, digest in made_from.items():
        known = next((within for within in enclosing(name) if within in inputs), None)
        if known is not None:
            same = workspace.has_digest(known, inputs[known])
            yield name, digest if same else inputs[known]


def in_one_line(reasons: list[str]) -> str:
    """The first of them, and how many there are beside."""
    more = len(reasons) - SHOWN
    return "; ".join(reasons[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _inputs(record: Mapping[str, Any], made_from: Mapping[str, Any]) -> Iterator[str]:
    """Inputs that are others, but for those of ``upgrades``."""
    before, now = record.get("inputs", {}), made_from["inputs"]
    for name in sorted({*before, *now}):
        if name not in before:
            yield f"{name} is read as well now"
        elif name not in now:
            if not name.startswith(OUTSIDE):
                yield f"{name} is read no more"
        elif before[name] != now[name]:
            yield f"{name} changed"


def _settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(before.keys() & now.keys()):
        yield from _changed(key, before[key], now[key])


def _exchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Sections whose other values stand in for another's: a recipe's doing, and not the code's."""
    gone = {tuple(key.split(".")[:2]) for key in before.keys() - now.keys() if "." in key}
    found = set()
    for key in now.keys() - before.keys():
        root, _, rest = key.partition(".")
        section, _, name = rest.partition(".")
        for other in (other for of, other in gone if of == root and other != section):
            with suppress(KeyError):
                if recorded_setting(before, f"{root}.{other}.{name}") != now[key]:
                    found.add(f"{root}.{section} decides in the place of {root}.{other}")
    yield from sorted(found)


def _changed(key: str, before: Any, now: Any) -> Iterator[str]:
    """Both values of every setting that differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted({*before, *now}):
            yield from _changed(f"{key}.{name}", before.get(name), now.get(name))
    elif before != now:
        yield f"{key} {before} -> {now}"


def _versions(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for package in sorted({*before, *now}):
        if before.get(package) != now.get(package):
            yield f"{package} {before.get(package)} -> {now.get(package)}"


def _code(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed:
        others = f" and {len(changed) - 1} other modules" if len(changed) > 1 else ""
        yield f"its code changed: {changed[0]}{others}"
