"""Licences of models: what each says of itself, and what that makes of a model joined from them.

The rules are few, and no lawyer's: ``TERMS`` says what a licence asks of whoever passes on what is
made of the work. A licence that is not in the table has terms of its own, which people must read.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, metadata_load
from huggingface_hub.errors import EntryNotFoundError

from upcycle_core.errors import Fault, InputError
from upcycle_core.given.adapter import ADAPTER_CONFIG
from upcycle_core.given.resolve import GGUF

NOTICE, NON_COMMERCIAL = "keep its notice", "no commercial use"
SHARE_ALIKE = "pass it on under the same licence"
NO_DERIVATIVES, NO_SHARING = "no derivatives", "no passing on"
FORBIDDING = (NO_DERIVATIVES, NO_SHARING)
OWN = "terms of its own, which the licence's text has"
TERMS: Mapping[str, tuple[str, ...]] = {
    "CC0-1.0": (),
    "Unlicense": (),
    "0BSD": (),
    "MIT-0": (),
    "MIT": (NOTICE,),
    "ISC": (NOTICE,),
    "BSD-2-Clause": (NOTICE,),
    "BSD-3-Clause": (NOTICE,),
    "CDLA-Permissive-2.0": (NOTICE,),
    "CC-BY-3.0": (NOTICE,),
    "CC-BY-4.0": (NOTICE,),
    "Apache-2.0": (NOTICE,),
    "CC-BY-NC-3.0": (NOTICE, NON_COMMERCIAL),
    "CC-BY-NC-4.0": (NOTICE, NON_COMMERCIAL),
    "CC-BY-SA-4.0": (NOTICE, SHARE_ALIKE),
    "LGPL-3.0": (NOTICE, SHARE_ALIKE),
    "GPL-3.0": (NOTICE, SHARE_ALIKE),
    "AGPL-3.0": (NOTICE, SHARE_ALIKE),
    "CC-BY-NC-SA-4.0": (NOTICE, NON_COMMERCIAL, SHARE_ALIKE),
    "CC-BY-ND-4.0": (NOTICE, NO_DERIVATIVES),
    "CC-BY-NC-ND-4.0": (NOTICE, NON_COMMERCIAL, NO_DERIVATIVES),
    "NONE": (NO_SHARING,),
}
"""{SPDX identifier: what it asks}, the least demanding first. NONE: all rights are reserved."""
UNKNOWN, OTHER = "unknown", "other"
"""What hubs call a licence that nobody states, and one that is none of theirs."""
VARIANTS = ("-only", "-or-later")
"""SPDX's endings that the table leaves out."""
CARDS = "cards"
"""Folder of the models' cache for what hubs say of models, beside their files."""


@dataclass(frozen=True)
class Licence:
    """Under what a model that is made of parts may be passed on.

    Args:
        identifier: For hubs, lower case: ``apache-2.0``, ``unknown``, ``other``.
        reason: Why, in one sentence.
    """

    identifier: str
    reason: str


def asked(licence: str | None) -> tuple[str, ...]:
    """What a licence asks; nothing is known of one that nobody states."""
    if licence is None:
        return ()
    return _TERMS.get(_normal(licence), (OWN,))


def combined(parts: Mapping[str, str | None]) -> Licence:
    """The licence of a model that is made of all ``parts``.

    Args:
        parts: {part: its licence}; None where none is stated.
    """
    if not parts:
        return Licence(UNKNOWN, "No model was given: its licence is for its makers to choose.")
    if clash := _clash(parts):
        return Licence(OTHER, f"The licences do not go together: {clash}.")
    forbidding = [p for p, own in parts.items() if set(asked(own)) & set(FORBIDDING)]
    if forbidding:
        names = ", ".join(forbidding)
        reason = f"The licence of {names} forbids it; the recipe says that there is a leave to."
        return Licence(OTHER, reason)
    if silent := [part for part, own in parts.items() if own is None]:
        return Licence(UNKNOWN, f"Nothing says under which licence {', '.join(silent)} is.")
    stated = list(dict.fromkeys(_normal(own) for own in parts.values() if own is not None))
    if len(stated) == 1:
        return Licence(stated[0], "All parts are under it.")
    own_terms = [name for name in stated if name not in _TERMS]
    if len(own_terms) > 1 or (own_terms and any(NON_COMMERCIAL in asked(n) for n in stated)):
        return Licence(OTHER, f"All of these hold at once: {', '.join(stated)}.")
    most = own_terms[0] if own_terms else max(stated, key=list(_TERMS).index)
    return Licence(most, "Of the parts' licences it asks most, and the others allow it.")


def faults(parts: Mapping[str, str | None], accepted: tuple[str, ...]) -> Iterator[Fault]:
    """Parts whose licence forbids what is about to be made of them.

    Args:
        parts: {field of the recipe: licence}.
        accepted: Licences that the recipe accepts all the same.
    """
    taken = {_normal(name) for name in accepted}
    for field, licence in parts.items():
        forbidden = [words for words in asked(licence) if words in FORBIDDING]
        if licence is not None and forbidden and _normal(licence) not in taken:
            remedy = f"its licence says: {', '.join(forbidden)}; name another model, or, if you "
            remedy += f"have a leave of your own: registry.accept_licences: [{_normal(licence)}]"
            yield Fault(field, licence, remedy)


def licences_of(reference: str, cache_dir: Path) -> dict[str, str | None]:
    """{model: the licence that it states; None for none} of a model, and of an adapter's base.

    Read from ``license`` in the README.md or the config.json beside it, on the hub too, or in a
    GGUF file's ``general.license``.

    Args:
        reference: As ``resolve.resolve_model`` takes it.
        cache_dir: Where models are kept.
    """
    if reference.endswith(GGUF):
        path, repository = Path(reference).expanduser(), "/".join(reference.split("/")[:2])
        stated = _of_gguf(path) if path.is_file() else _of_folder(repository, cache_dir)
        return {reference: stated}
    found = {reference: _of_folder(reference, cache_dir)}
    base = _json(reference, ADAPTER_CONFIG, cache_dir).get("base_model_name_or_path")
    if isinstance(base, str) and base and base != reference:
        found[base] = _of_folder(base, cache_dir)
    return found


def _clash(parts: Mapping[str, str | None]) -> str:
    """A part that asks for its own licence, and one that asks for what that licence does not."""
    for part, licence in parts.items():
        own = asked(licence)
        for other, theirs in parts.items():
            if SHARE_ALIKE not in own or not licence or not theirs:
                continue
            fits = {*asked(theirs)} <= {*own} - {SHARE_ALIKE}
            if not fits and _normal(licence) != _normal(theirs):
                asks = "; ".join(asked(theirs))
                return f"{part} is {licence} and must stay it, {other} is {theirs} ({asks})"
    return ""


def _of_folder(reference: str, cache_dir: Path) -> str | None:
    card = _file(reference, "README.md", cache_dir)
    stated = _front_matter(card) if card is not None else {}
    licence = stated.get("license") or _json(reference, "config.json", cache_dir).get("license")
    if isinstance(licence, list):
        licence = ", ".join(map(str, licence))
    if licence == OTHER:
        licence = stated.get("license_name") or OTHER
    return str(licence) if licence and licence != UNKNOWN else None


def _of_gguf(path: Path) -> str | None:
    from upcycle_core.given.gguf_file import gguf_reader  # imports transformers

    try:
        field = gguf_reader(path).get_field("general.license")
    except (InputError, OSError, ValueError):  # said where it is opened
        return None
    return None if field is None else str(field.contents())


def _front_matter(card: Path) -> Mapping[str, Any]:
    try:
        return metadata_load(card) or {}
    except Exception:  # whatever somebody has written there: no YAML, no mapping, no text
        return {}


def _json(reference: str, name: str, cache_dir: Path) -> Mapping[str, Any]:
    path = _file(reference, name, cache_dir)
    try:
        values = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):  # said where it is opened
        return {}
    return values if isinstance(values, dict) else {}


def _file(reference: str, name: str, cache_dir: Path) -> Path | None:
    """A small file of a model; None where it has none, or the hub cannot be asked."""
    folder = Path(reference).expanduser()
    if folder.is_dir():
        path = folder / name
        return path if path.is_file() else None
    cards = cache_dir / CARDS
    for offline in (True, False):
        try:
            return Path(hf_hub_download(reference, name, cache_dir=cards, local_files_only=offline))
        except (EntryNotFoundError, OSError, ValueError):  # not there, not reached, no such name
            continue
    return None


def _normal(licence: str) -> str:
    """As hubs write it: ``apache-2.0``, ``gpl-3.0``."""
    name = licence.strip().lower()
    for ending in VARIANTS:
        name = name.removesuffix(ending)
    return name


_TERMS = {_normal(name): terms for name, terms in TERMS.items()}
