"""A version's certificate: what readers made of it, kept with it and shown on its page."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from infra.readers.reader import READERS
from infra.temporary import owned_folder
from infra.tracking.copies import in_place
from infra.tracking.records import Version
from infra.tracking.registry import Registry
from tasks.data.licences import CARD
from tasks.release.certify import SECONDS, certify
from tasks.release.history import roll_back
from tasks.release.verdict import TOLERANCES, Row, as_json, as_table, rows_of
from upcycle_core.errors import Fault, InputError

FILE = "certificate.json"
CERTIFICATE_TAG = "upcycle.certificate"
"""Of a version: what became of it in each reader, in a line."""
NOTHING = as_json([])
FRONT_MATTER = re.compile(r"---\n.*?^---\s*", re.M | re.S)
"""YAML above the title, for hubs; a page has none."""
TITLE = "Arrival certificate"
ABOUT = (
    "What each reader made of this version with its own loader, in fp32 unless said: tensors "
    "found where they belong, texts that its tokenizer reads as ours does, the largest difference "
    "of a logarithm of a probability from our own forward pass and greedy tokens and texts equal "
    "to ours, over prompts that each expert wrote; and how far its answers moved as two experts "
    "were exchanged and as routers became zeros, in nats."
)


def certify_version(
    registry: Registry,
    version: Version,
    files: Path,
    *,
    readers: Collection[str] = tuple(READERS),
    forms: Collection[str] = tuple(TOLERANCES),
    seconds: float = SECONDS,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """Ask readers for a version, and keep with it what they made of it.

    Args:
        registry: Where it is registered.
        version: The version.
        files: Its files, all of them, on this machine.
        readers: Who is asked.
        forms: Of those that they take.
        seconds: How long one reader may take for one form.
        say: Hears a line of each.

    Returns:
        A row of each reader and form that was asked. Rows of others, of an earlier certificate,
        stay beside them.
    """
    asked = certify(files, readers=readers, forms=forms, seconds=seconds, say=say)
    with registry.alone(version.name):
        rows = with_earlier(asked, registry.text(version, FILE))
        card = registry.text(version, CARD)  # a version that others registered has none
        own = {} if card is None else {CARD: with_certificate(card, f"## {TITLE}", rows)}
        registry.attach(version, {FILE: as_json(rows), **own})
        registry.set_tags(version, {CERTIFICATE_TAG: in_a_line(rows)})
        page = with_certificate(registry.description(version), f"### {TITLE}", rows)
        registry.describe(version, page)
    return asked


def _kept(certificate: str) -> list[Row]:
    """Its rows; none of one that was cut off while it was written."""
    try:
        return rows_of(certificate)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def with_earlier(asked: Sequence[Row], certificate: str | None) -> list[Row]:
    """Rows of the version, those of an earlier certificate that were not asked for again too.

    Args:
        asked: Rows of now.
        certificate: The earlier one, as it is kept with the version; None if there is none.
    """
    now = {row.name for row in asked}
    kept = [row for row in _kept(certificate or NOTHING) if row.name not in now]
    # A certificate of another release may name others, which come last.
    readers = {name: place for place, name in enumerate(READERS)}
    forms = {name: place for place, name in enumerate(TOLERANCES)}
    return sorted(
        [*kept, *asked],
        key=lambda row: (
            row.of,
            readers.get(row.reader, len(readers)),
            forms.get(row.form, len(forms)),
        ),
    )


def with_certificate(markdown: str, title: str, rows: Sequence[Row]) -> str:
    """Markdown with the certificate, in the place of one that it had.

    Else it ends the first part: a heading of the first level begins another.
    """
    own = re.search(rf"^{re.escape(title)}$", markdown, re.M)
    level = len(title) - len(title.lstrip("#")) if own else 1
    front = FRONT_MATTER.match(markdown)
    begin = own.end() if own else 1 + (front.end() if front else 0)  # below the title
    following = re.compile(rf"^#{{1,{level}}} ", re.M).search(markdown, begin)
    end = len(markdown) if following is None else following.start()
    before, rest = markdown[: own.start() if own else end].rstrip(), markdown[end:]
    certificate = f"{before}\n\n{title}\n\n{ABOUT}\n\n{as_table(rows)}\n"
    return f"{certificate}\n{rest}" if rest else certificate


@contextmanager
def version_files(registry: Registry, version: Version) -> Iterator[Path]:
    """All files of a version: where they lie, held from now on, or a copy for a while."""
    here = in_place(version, registry)
    if here is not None:
        yield here
        return
    with owned_folder("certificate") as folder:
        yield registry.download(version.reference, folder / "version")


def refusal(
    rows: Sequence[Row], absent: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, str] | None:
    """Why a version whose certificate is required is no champion, in a few words and in full.

    Args:
        rows: What readers said.
        absent: Readers that the recipe names and could not be asked, and why.

    Returns:
        None if it arrived: in one reader at least, and failed in none.
    """
    failed = [row for row in rows if row.verdict == "failed"]
    if failed:
        short = f"did not arrive in {', '.join(dict.fromkeys(row.name for row in failed))}"
        return short, f"{short} ({'; '.join(f'{row.name}: {row.why}' for row in failed)})"
    if absent:
        short = f"{', '.join(absent)} could not be asked"
        whys = "; ".join(f"{name}: {why}" for name, why in absent.items())
        return short, f"{short} ({whys}; or name other registry.readers)"
    if any(row.verdict == "arrived" for row in rows):
        return None
    whys = "; ".join(f"{row.name}: {row.why}" for row in rows) or "none is asked"
    return "no reader could be asked", f"no reader could be asked whether it arrives ({whys})"


def revoke(registry: Registry, version: Version, rows: Sequence[Row]) -> list[Fault]:
    """Take the alias ``champion`` from a version that was lost on the way to a reader.

    Only where the version's recipe requires a certificate, and of that reader if it names some, and
    it still is champion: readers take their time. A reader that crashed or gave no answer in time
    says nothing of the model, and takes nothing from who is champion. The experts of a version that
    did not arrive are none the worse for it: the next model may hold them.

    Returns:
        What became of the alias, for who asked.
    """
    asked = version.params.get("registry.readers", "None")  # a list as JSON; None is all
    named = READERS if asked == "None" else json.loads(asked)
    absent = [row.name for row in rows if row.is_lost and row.reader in named]
    required = version.params.get("registry.certificate") == "required"
    name, number = version.name, version.number
    if not (absent and required and registry.pointed(name, "champion") == number):
        return []
    try:
        reason = f"did not arrive in {', '.join(absent)}"
        _, before = roll_back(registry, name, reason, only=number, withdraws=False)
    except InputError as error:
        return list(error.faults)
    return [Fault("champion", version.reference, f"is none any more; {before.reference} is")]


def in_a_line(rows: Sequence[Row]) -> str:
    """Verdicts, and whose they are: ``arrived: transformers, mlflow; not tried: vllm``."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row.verdict, []).append(row.name)
    order = sorted(groups, key=["failed", "arrived", "not tried"].index)
    return "; ".join(f"{verdict}: {', '.join(groups[verdict])}" for verdict in order)
