"""Which documents say the same."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from upcycle_core.corpora.conversations import Message

NOT_LETTERS = re.compile(r"[\W_]+")
DOTTED = "i\N{COMBINING DOT ABOVE}"
"""What İ is in lower case: the one letter that gains a mark."""
SUBSTANTIAL = 20
"""Letters that a line needs before its return means anything."""


class Document(NamedTuple):
    """One text and where it stands."""

    text: str
    file: str
    """Label of the file that was read, the same on every machine; of a dataset, its name."""
    messages: list[Message] | None = None
    """Of a chat, whose text is what was said."""

    @property
    def size(self) -> int:
        """UTF-8 bytes of the text."""
        return len(self.text.encode())


def normalised(text: str) -> str:
    """``text`` without case, punctuation and white space; vowel signs and other marks stay, and a
    letter with one is the same whether it is written as one character or two (NFC)."""
    if text.isascii():
        return NOT_LETTERS.sub("", text.lower())
    return NOT_LETTERS.sub(_marks, composed(text).lower().replace(DOTTED, "i"))


def composed(text: str) -> str:
    """``text`` in Unicode's normal form C: what looks the same is the same."""
    return unicodedata.normalize("NFC", text)


def _marks(between: re.Match[str]) -> str:
    """Of what stands between letters, the marks that belong to one; those that choose between a
    sign's pictures do not."""
    return "".join(
        sign
        for sign in between[0]
        if unicodedata.category(sign) in ("Mn", "Mc", "Me") and not _chooses(sign)
    )


def _chooses(sign: str) -> bool:
    return "VARIATION SELECTOR" in unicodedata.name(sign, "")


def content_key(text: str) -> bytes:
    """The same 16 bytes for texts that differ in case, punctuation or white space only.

    Text that holds nothing else is all that it is.
    """
    return hashlib.sha256((normalised(text) or text).encode()).digest()[:16]


def likeness(text: str) -> bytes:
    """The same 16 bytes for texts of which one must not be held out where the other is trained on.

    Letters and digits alone count, without marks: coarser than ``content_key``. Documents are drawn
    by it, and what living models are judged on hangs on that: it must never change.
    """
    letters = NOT_LETTERS.sub("", text.lower())
    return hashlib.sha256((letters or text).encode()).digest()[:16]


def apart_key(text: str) -> bytes:
    """``likeness`` of texts that are held against each other and not drawn: whichever normal form
    of Unicode each is in."""
    return likeness(composed(text))


def mostly_new(documents: Iterable[Document]) -> Iterator[Document]:
    """Leave out documents of whose lines more than half (by letters) stood in earlier ones.

    An installation holds vendored copies, sister packages with one README, and files that are a
    licence and an import: exact comparison lets them pass, and held-out text would then be known
    from training. Lines of fewer than ``SUBSTANTIAL`` letters are not counted.
    """
    seen: set[str] = set()
    for document in documents:
        lines = {normalised(line) for line in document.text.splitlines()}
        lines = {line for line in lines if len(line) >= SUBSTANTIAL}
        known = sum(map(len, lines & seen))
        if 2 * known <= sum(map(len, lines)):
            seen |= lines
            yield document
