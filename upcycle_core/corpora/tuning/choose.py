"""Which instance is trained on, and which ones models are judged by."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from upcycle_core.corpora.conversations import Message
from upcycle_core.corpora.tuning.config import InstructionsConfig
from upcycle_core.corpora.tuning.records import OVER, Record


@dataclass
class Choice:
    """Instances to train on and to be judged by, none of them in two places.

    Args:
        train: Of seen categories.
        seen: Held-out instances of the tasks that are trained on.
        unseen: Instances of categories that training never sees.
        left_out: How many were not used, by reason.
        known: Keys of prompts that are used, or never to be trained on.
    """

    train: list[Record] = field(default_factory=list)
    seen: list[Record] = field(default_factory=list)
    unseen: list[Record] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    known: set[bytes] = field(default_factory=set)

    def distinct(self, records: Iterable[Record]) -> list[Record]:
        """Those whose prompts are neither known nor said before; of these the answers are kept."""
        found: dict[bytes, Record] = {}
        for record in records:
            key = prompt_key(record.prompt)
            if key in self.known or key in found:
                self.left_out["the same prompt"] += 1
            if key in found:
                answers = (*found[key].references, *record.references)
                found[key] = found[key]._replace(references=tuple(dict.fromkeys(answers)))
            elif key not in self.known:
                found[key] = record
        return list(found.values())

    def taken(self, records: Sequence[Record], count: int | None) -> Sequence[Record]:
        """The first ``count``, whose prompts then are known."""
        taken = records[:count]
        self.left_out["more than asked for"] += len(records) - len(taken)
        self.known |= {prompt_key(record.prompt) for record in taken}
        return taken


def choose(
    records: Mapping[str, Sequence[Record]], config: InstructionsConfig, *, seed: int
) -> Choice:
    """Share instances out by task, in the order of their prompts' hashes with the seed.

    So a record keeps its place among others as data grows: what was trained on is not judged by
    later, unless its task had fewer than twice ``test_per_task``.

    Prompts that differ in case or white space only are one. Where one stands in several tasks,
    those of unseen categories have it before those of seen ones, and what models are judged by has
    it before what is trained on, where it may be any turn of a conversation. A user's question is
    the same whatever a system message says before it.

    Args:
        records: By source.
        config: Categories, and how many of each task.
        seed: Decides which instances.
    """
    choice, judged = Choice(), set[bytes]()
    unseen, seen = _tasks(records, config, choice.left_out, seed)
    for _, own in sorted(unseen.items()):
        choice.unseen += choice.taken(choice.distinct(own), config.unseen_questions)
        # Nothing of an unseen task is trained on under another name.
        choice.known |= {prompt_key(record.prompt) for record in own}
        judged |= {key for record in own for key in _questions(_before_response(record))}
    rest = []
    for _, own in sorted(seen.items()):
        distinct = choice.distinct(own)
        count = min(config.test_per_task, len(distinct) // 2)
        choice.seen += choice.taken(distinct[:count], count)
        rest.append(distinct[count:])
    judged |= {key for record in choice.seen for key in _questions(_before_response(record))}
    judged |= choice.known
    for own in rest:
        apart = [
            record
            for record in own
            if not {prompt_key(record.prompt), *_questions(record.messages)} & judged
        ]
        choice.left_out["the same prompt"] += len(own) - len(apart)
        choice.train += choice.taken(choice.distinct(apart), config.train_per_task)
    return choice


def _before_response(record: Record) -> Iterator[Message]:
    """What stands before the first response of a conversation, by which it is judged."""
    return takewhile(lambda message: message["role"] != "assistant", record.messages)


def _questions(messages: Iterable[Message]) -> Iterator[bytes]:
    """Keys of what users say."""
    yield from (prompt_key(m["content"]) for m in messages if m["role"] == "user")


def prompt_key(prompt: str) -> bytes:
    """The same 16 bytes for prompts that differ in case or white space only.

    Punctuation counts: ``3 + 4`` and ``3 * 4`` ask for different things.
    """
    return hashlib.sha256(" ".join(prompt.casefold().split()).encode()).digest()[:16]


def rank(prompt: str, seed: int) -> bytes:
    """A place of its own for each prompt, whatever else there is."""
    return hashlib.sha256(f"{seed}".encode() + prompt_key(prompt)).digest()


def _tasks(
    records: Mapping[str, Sequence[Record]],
    config: InstructionsConfig,
    left_out: Counter[str],
    seed: int,
) -> tuple[dict[tuple[str, str], list[Record]], dict[tuple[str, str], list[Record]]]:
    """Records of unseen and of seen tasks, by category and task, in order of their ranks."""
    unseen: dict[tuple[str, str], list[Record]] = {}
    seen: dict[tuple[str, str], list[Record]] = {}
    for name, own in records.items():
        tasks: dict[tuple[str, str], list[Record]] = {}
        for record in own:
            tasks.setdefault((record.category, record.task), []).append(record)
        for (category, task), found in tasks.items():
            most = config.most_per_task(config.sources[name], category)
            drawn = sorted(found, key=lambda record: rank(record.prompt, seed))[:most]
            left_out[OVER] += len(found) - len(drawn)
            if category in config.unseen_categories:
                unseen.setdefault((category, task), []).extend(drawn)
            elif config.train_categories is None or category in config.train_categories:
                seen.setdefault((category, task), []).extend(drawn)
            else:
                left_out["of other categories"] += len(drawn)
    for found in (*unseen.values(), *seen.values()):  # of several sources
        found.sort(key=lambda record: rank(record.prompt, seed))
    return unseen, seen
