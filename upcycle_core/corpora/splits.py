"""Which document stands in which split: never in two."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from upcycle_core.corpora.config import Split
from upcycle_core.corpora.conversations import complete_text
from upcycle_core.corpora.distinct import Document, apart_key, content_key, likeness
from upcycle_core.corpora.seeded import permutation, place
from upcycle_core.corpora.spool import Kept
from upcycle_core.errors import Fault, raise_faults

LEFT_OUT = {"short": "shorter than corpus.min_characters", "duplicate": "duplicates"}
"""How people call the reasons for which documents are left out."""
Texts = dict[bytes, Document | Kept]
"""Distinct documents by content key, in seeded order."""


@dataclass
class Selection:
    """The documents of each split, and how many were left out of it for what reason.

    Args:
        splits: The documents.
        left_out: {reason: count}.
        taken: The splits that were set aside from training text.
    """

    splits: dict[Split, Texts] = field(default_factory=dict)
    left_out: dict[Split, Counter[str]] = field(default_factory=dict)
    taken: list[Split] = field(default_factory=list)

    def add(
        self,
        split: Split,
        documents: Iterable[Document | Kept],
        *,
        max_bytes: int | None,
        min_characters: int,
    ) -> None:
        """Take distinct documents in the order given until ``max_bytes`` are reached."""
        texts: Texts = {}
        left_out: Counter[str] = Counter()
        size = 0
        for document in documents:
            messages = document.messages
            said = document.text
            text = said if messages is None else complete_text(messages)
            if len(said) < min_characters:
                left_out["short"] += 1
            elif (key := content_key(text)) in texts:
                left_out["duplicate"] += 1
            else:
                texts[key] = document
                size += document.size
            if max_bytes is not None and size >= max_bytes:
                break
        self.splits[split] = texts
        self.left_out[split] = left_out

    def separate(self, name: str) -> None:
        """Let no document stand in two splits that were named, nor another of its likeness.

        Training text yields to held-out and calibration text, text from elsewhere to all others.

        Args:
            name: What faults call the domain.

        Raises:
            InputError: Calibration text, ``elsewhere`` included, is also held-out text.
        """
        heldout = self.splits.get("heldout", {})
        raise_faults(
            fault
            for split in ("calibration", "elsewhere")
            for fault in _shared(self.splits.get(split, {}), heldout, f"{name}.{split}")
        )
        self._drop("train", "heldout")
        self._drop("train", "calibration")
        self._drop("elsewhere", "train")
        self._drop("elsewhere", "calibration")

    def set_aside(self, split: Split, target: float, *, by_file: bool, seed: int) -> None:
        """Move training documents into ``split`` until no other fits in ``target`` bytes.

        Args:
            split: The split that is made.
            target: Bytes it may have; one document is moved even if it is larger.
            by_file: Documents of one file stay together, and so does no file's text leak.
            seed: Decides which.
        """
        train = self.splits["train"]
        groups: dict[object, list[bytes]] = {}
        for key, document in train.items():
            groups.setdefault(document.file if by_file else key, []).append(key)
        sizes = {name: sum(train[key].size for key in groups[name]) for name in groups}
        names = list(groups)
        chosen: list[object] = []
        room = target
        for name in (names[i] for i in permutation(len(names), seed, "set aside", split)):
            if sizes[name] <= room:
                chosen.append(name)
                room -= sizes[name]
        if names and not chosen:
            chosen = [min(names, key=lambda name: sizes[name])]
        self._take(split, [key for name in chosen for key in groups[name]])

    def set_aside_for_good(self, split: Split, share: float, *, seed: int) -> None:
        """Move training documents into ``split``, each for its own text and whatever else is there.

        A document whose hash is in the lowest ``share`` of all hashes is moved: when text is added
        none comes from training to ``split``, where a model would be judged on what it has learnt.
        Few documents are an exception: one that is larger than ``share`` of all bytes stays in
        training as long as it is so, and where no hash is that low, the lowest is moved.

        Args:
            split: The split that is made; it gets ``share`` of the documents on average, and one
                of them at least: of those that fit if any does, or else the smallest.
            share: Of the documents, between 0 and 1.
            seed: Decides which.
        """
        train = self.splits["train"]
        alike: dict[bytes, list[bytes]] = {}
        for key, document in train.items():
            alike.setdefault(likeness(document.text), []).append(key)
        sizes = {own: sum(train[key].size for key in keys) for own, keys in alike.items()}
        room = share * sum(sizes.values())
        places = {own: place(own, seed, "set aside", split) for own in alike if sizes[own] <= room}
        chosen = [own for own, found in places.items() if found < share]
        if train and not chosen:
            chosen = [
                min(places, key=places.__getitem__) if places else min(sizes, key=sizes.__getitem__)
            ]
        self._take(split, [key for own in chosen for key in alike[own]])

    def empty_splits(self, name: str) -> list[Fault]:
        """A fault for each split without documents, saying what was left out of it.

        Training text that is too little for what is set aside from it is one fault.

        Args:
            name: The domain, as a recipe names it (``domains.law``).
        """
        parts: list[Split] = ["train", *self.taken] if self.taken else []
        together = [text for split in parts for text in self.splits[split].values()]
        found = []
        if together and not all(self.splits[split] for split in parts):
            found = [_too_few(together, name, self.taken, self.left_out["train"])]
        return found + [
            Fault(f"{name}.{split}", "no documents", _why_empty(self.left_out[split]))
            for split, texts in self.splits.items()
            if not texts and split not in (parts if together else self.taken)
        ]

    def _take(self, split: Split, keys: Iterable[bytes]) -> None:
        train = self.splits["train"]
        self.splits[split] = {key: train.pop(key) for key in keys}
        self.left_out[split] = Counter()
        self.taken.append(split)

    def _drop(self, split: Split, other: Split) -> None:
        self.leave_out(split, _alike(self.splits.get(other, {})), f"in {other}")

    def leave_out(self, split: Split, others: Container[bytes], reason: str) -> None:
        """Leave out of ``split`` the documents whose ``apart_key`` is among ``others``."""
        texts = self.splits.get(split, {})
        for key in [key for key, document in texts.items() if apart_key(document.text) in others]:
            del texts[key]
            self.left_out[split][reason] += 1


def _alike(texts: Texts) -> set[bytes]:
    return {apart_key(document.text) for document in texts.values()}


def _shared(texts: Texts, heldout: Texts, where: str) -> list[Fault]:
    held = _alike(heldout)
    shared = [document for document in texts.values() if apart_key(document.text) in held]
    if not shared:
        return []
    remedy = (
        f"{len(shared)} of them are also held-out text, for example {shared[0].text[:60]!r}; "
        "name other text for one of the two"
    )
    return [Fault(where, f"{len(texts)} documents", remedy)]


def _too_few(
    texts: Sequence[Document | Kept], name: str, taken: Sequence[Split], left_out: Counter[str]
) -> Fault:
    """What is wrong with training text that does not fill the splits that are made of it."""
    count = f"{len(texts)} document{'s' if len(texts) > 1 else ''}"
    remedy = f"too few to train on and to set {' and '.join(taken)} text aside from"
    remedy += f" (left out: {_counted(left_out)})" if left_out else ""
    fields = " and ".join(f"{name}.{split}" for split in taken)
    remedy += f"; name {fields}, or give it more documents"
    if any(text.file.endswith(".txt") for text in texts):
        remedy += " (in a .txt file, a line <|doc|> stands between two)"
    return Fault(f"{name}.train", count, remedy)


def _why_empty(left_out: Counter[str]) -> str:
    reasons = _counted(left_out) if left_out else "none"
    return f"nothing is left of it (left out: {reasons}); give it other text, or more"


def _counted(left_out: Counter[str]) -> str:
    return ", ".join(
        f"{n} {LEFT_OUT.get(reason, reason)}" for reason, n in sorted(left_out.items())
    )
