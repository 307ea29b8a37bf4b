"""Tasks that any held-out text gives: a base model of any size is scored without a benchmark."""

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, islice, zip_longest
from typing import Any, NamedTuple

from upcycle_core.corpora.seeded import permutation
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.tasks.config import HeldoutKind

_CHOICES = 4
_PASSAGE = 300  # characters at most; at least four fifths of it
_CONTINUATION = 60  # characters
_TEXT = 2000  # characters at most; at least a tenth of it
_WORD_TOKENS = 8  # of an answer at least; words of English have fewer

# A passage starts and ends with whole words. Its continuation starts with the white space, because
# tokenizers attach a space to the word that follows it.
_CONTINUED = re.compile(rf"(?<!\S)(\S.{{238,{_PASSAGE - 2}}}\S)(\s.{{{_CONTINUATION - 1}}})", re.S)
_WORD_START = re.compile(r"(?<!\S)\S")
_CHUNK = re.compile(rf"(?<!\S)\S.{{198,{_TEXT - 2}}}\S(?!\S)", re.S)

_UNBROKEN = 16
"""Characters a word on average, above which text has nearly no blanks: Chinese, Japanese, Thai."""
_UNSPACED = (
    "which needs words set apart by blanks, and here are few; use kind 'text', which needs a line "
    f"break every {_TEXT} characters, or a task of your own (definition)"
)
_UNLINED = (
    f"which is cut at blanks and line breaks, and here are few; break lines every {_TEXT} "
    "characters or more often, or use a task of your own (definition)"
)


class _Passage(NamedTuple):
    document: int
    start: int
    text: str
    following: str


def heldout_items(
    texts: Iterable[str], *, kind: HeldoutKind, count: int, seed: int
) -> list[dict[str, Any]]:
    """Questions about held-out text whose answers are the text itself.

    - ``continuation``: about 300 characters and four continuations of 60 characters, the true one
      and three from other documents. Chance is 25 %.
    - ``last_word``: about 300 characters and the word after them, which occurred in them before: it
      can be read off the context, as in LAMBADA (arXiv 1606.06031). It has 3 to 16 characters.
    - ``text``: up to 2000 characters, scored by their likelihood.

    Documents give items in turn, so that few come from each. Passages do not overlap, and none
    occurs twice.

    Args:
        texts: Documents. Those that are too short are passed over.
        kind: What is asked.
        count: Items to make.
        seed: Decides which passages are taken, and the order of choices.

    Returns:
        ``count`` items. All have ``id`` (document and offset, in order of ``texts``); then
        ``prompt``, ``choices`` (4 strings) and ``answer`` (an index), or ``prompt`` and ``answer``
        (a word), or ``text``.

    Raises:
        InputError: The text gives fewer items.
    """
    documents, characters, words = [], 0, 0
    for index, text in enumerate(texts):
        documents.append(list(_PASSAGES[kind](index, text)))
        characters, words = characters + len(text), words + len(text.split())
    passages = _in_turn(documents, kind, seed)
    made = (_item(kind, passage, passages, seed) for passage in passages)
    items = list(islice((item for item in made if item is not None), count))
    if len(items) < count:
        remedy = "; ask for fewer, or give more or longer documents"
        if characters > _UNBROKEN * words:
            remedy = f", {_UNLINED if kind == 'text' else _UNSPACED}"
        remedy = f"the held-out text gives {len(items)} items of kind {kind!r}{remedy}"
        raise InputError(Fault("items", count, remedy))
    return items


def heldout_definition(kind: HeldoutKind, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How lm-evaluation-harness asks and scores the items of a kind.

    Args:
        kind: What is asked.
        items: All of them; the longest word decides how much a model may write.

    Returns:
        Fields of its task configuration, without those that name the task and its data.
    """
    # Fields by name, never as templates: a template's result is read as a Python literal where it
    # looks like one ("[1, 2]", "7"), and source code often does.
    if kind == "continuation":
        return {
            "output_type": "multiple_choice",
            "doc_to_text": "prompt",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [_metric("acc"), _metric("acc_norm")],
            "num_fewshot": 0,
        }
    if kind == "last_word":
        words = [item["answer"] for item in items]
        is_plain = all(re.fullmatch(r"\w+", word) for word in words)
        pattern = r"^\s*(\w+)" if is_plain else rf"^\s*(\w[{_letters()}]*)"
        first_word = {"function": "regex", "regex_pattern": pattern}
        return {
            "output_type": "generate_until",
            "doc_to_text": "prompt",
            "doc_to_target": "answer",
            "target_delimiter": " ",
            "generation_kwargs": {
                "until": ["\n"],
                "max_gen_toks": _word_tokens(words),
                "do_sample": False,
            },
            "filter_list": [
                {"name": "first-word", "filter": [first_word, {"function": "take_first"}]}
            ],
            "metric_list": [_metric("exact_match")],
            "num_fewshot": 0,
        }
    return {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            _metric("bits_per_byte", "bits_per_byte", higher_is_better=False),
            _metric("byte_perplexity", "weighted_perplexity", higher_is_better=False),
        ],
        "num_fewshot": 0,
    }


def _word_tokens(words: Iterable[str]) -> int:
    """Tokens that hold each of ``words``: outside ASCII a byte may be one, and the blank before."""
    others = (word for word in words if not word.isascii())
    return max([_WORD_TOKENS, *(len(word.encode()) + 1 for word in others)])


def _metric(
    name: str, aggregation: str = "mean", *, higher_is_better: bool = True
) -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better}


def _in_turn(documents: list[list[_Passage]], kind: HeldoutKind, seed: int) -> list[_Passage]:
    """One passage of every document, then a second one of every document, and so on."""
    queues = []
    for index in permutation(len(documents), seed, kind, "documents"):
        order = permutation(len(documents[index]), seed, kind, int(index))
        queues.append([documents[index][i] for i in order])
    distinct: dict[str, _Passage] = {}
    for turn in zip_longest(*queues):
        for passage in turn:
            if passage is not None:
                distinct.setdefault(passage.text, passage)
    return list(distinct.values())


def _continued(document: int, text: str) -> Iterator[_Passage]:
    for match in _CONTINUED.finditer(text):
        following = match[2]
        # Rules, tables of numbers and blank lines tell nothing about what comes next.
        if 2 * sum(map(str.isalpha, following)) >= _CONTINUATION:
            yield _Passage(document, match.start(), match[1], following)


@cache
def _letters() -> str:
    """What words consist of, as a regular expression's class: ``\\w``, vowel signs and accents.

    What says how a symbol is drawn is no accent.
    """
    marks = [n for n in range(sys.maxunicode + 1) if unicodedata.category(chr(n)) in ("Mn", "Mc")]
    marks = [n for n in marks if "VARIATION SELECTOR" not in unicodedata.name(chr(n))]
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(marks), lambda place: place[1] - place[0])
    ]
    return r"\w" + "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in runs)


def _repeating(document: int, text: str) -> Iterator[_Passage]:
    end, letters = 0, _letters()
    for match in re.finditer(rf"(?<=\S) (\w[{letters}]{{2,15}})(?![{letters}])", text):
        first = _WORD_START.search(text, max(end, match.start() - _PASSAGE), match.start())
        if first is None or match.start() - first.start() < 4 * _PASSAGE // 5:
            continue
        passage = text[first.start() : match.start()]
        if match[1] in re.findall(rf"\w[{letters}]*", passage):
            yield _Passage(document, first.start(), passage, match[1])
            end = match.end()


def _chunks(document: int, text: str) -> Iterator[_Passage]:
    for match in _CHUNK.finditer(text):
        yield _Passage(document, match.start(), match[0], "")


def _item(
    kind: HeldoutKind, passage: _Passage, passages: list[_Passage], seed: int
) -> dict[str, Any] | None:
    """The item that a passage gives; None where other documents give too few choices."""
    name = f"{passage.document}-{passage.start}"
    if kind == "text":
        return {"id": name, "text": passage.text}
    if kind == "last_word":
        return {"id": name, "prompt": passage.text, "answer": passage.following}
    # Continuations in other documents, in an order of the passage's own.
    others = (passages[index] for index in permutation(len(passages), seed, "others", name))
    texts = (other.following for other in others if other.document != passage.document)
    choices = [passage.following]
    while len(choices) < _CHOICES:
        text = next((text for text in texts if text not in choices), None)
        if text is None:
            return None
        choices.append(text)
    order = permutation(_CHOICES, seed, "choices", name)
    shuffled = [choices[i] for i in order]
    return {
        "id": name,
        "prompt": passage.text,
        "choices": shuffled,
        "answer": order.tolist().index(0),
    }


_PASSAGES = {"continuation": _continued, "last_word": _repeating, "text": _chunks}
