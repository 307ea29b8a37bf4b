"""Whether a model's tokenizer can write instructions, found before anything is trained on them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.conversations import EXTRAS, FAULTS_SHOWN
from upcycle_core.corpora.instructions import encode_conversation, encode_prompt
from upcycle_core.corpora.tuning.config import InstructionsConfig
from upcycle_core.corpora.tuning.records import Record
from upcycle_core.errors import Fault, InputError

TRIED = 3
"""Records of each source and shape that stand for all of them."""


def sample_faults(
    records: Mapping[str, Sequence[Record]], config: InstructionsConfig, tokenizer: Any, *, bos: Bos
) -> list[Fault]:
    """What the tokenizer refuses of some records of each source, one fault a shape.

    Records are of one shape where the same roles speak in the same order, and their messages hold
    the same beside what is said. Those of unseen categories are judged by and never trained on.

    Args:
        records: By source.
        config: Categories.
        tokenizer: Loaded.
        bos: As for ``encoding.encoded``.
    """
    found: dict[tuple[Any, ...], Fault] = {}
    tried: Counter[tuple[Any, ...]] = Counter()
    for name, own in records.items():
        for record in own:
            is_judged = record.category in config.unseen_categories
            trained = config.train_categories
            if not is_judged and trained is not None and record.category not in trained:
                continue
            shape = (name, is_judged, *_shape(record))
            tried[shape] += 1
            if tried[shape] > TRIED or shape in found:
                continue
            faults = [*_judged_faults(record, tokenizer, bos)]
            faults += [] if is_judged or faults else [*_trained_faults(record, tokenizer, bos)]
            for fault in faults[:1]:
                found[shape] = replace(fault, field=f"instructions.sources.{name}")
    return list(found.values())


def judged_faults(records: Iterable[Record], tokenizer: Any, *, bos: Bos) -> list[Fault]:
    """What the tokenizer refuses of records to judge by, the first few.

    Args:
        records: All of them.
        tokenizer: Loaded.
        bos: As for ``encoding.encoded``.
    """
    found = [fault for record in records for fault in _judged_faults(record, tokenizer, bos)]
    more = len(found) - FAULTS_SHOWN
    rest = [Fault("instructions", f"{more} more", "are refused too")] if more > 0 else []
    return [*found[:FAULTS_SHOWN], *rest]


def _shape(record: Record) -> Iterator[tuple[Any, ...]]:
    for message in record.messages:
        yield (
            message["role"],
            bool(message["content"]),
            *(name for name in EXTRAS if message.get(name)),
        )


def _judged_faults(record: Record, tokenizer: Any, bos: Bos) -> Iterator[Fault]:
    try:
        encode_prompt(tokenizer, record.asked or record.prompt, bos=bos)
    except InputError as error:
        yield from error.faults


def _trained_faults(record: Record, tokenizer: Any, bos: Bos) -> Iterator[Fault]:
    if not record.messages:
        return
    try:
        encode_conversation(tokenizer, record.messages, record.id or record.prompt[:40], bos=bos)
    except InputError as error:
        yield from error.faults
