"""Instruction data for training, with loss on the responses alone.

S tokens a row.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from upcycle_core.checkpoints.tokenizer import load_tokenizer, token_ids
from upcycle_core.corpora.batches import NO_LOSS
from upcycle_core.corpora.chat_template import SAID, ChatTemplate
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.conversations import (
    LISTS,
    THOUGHTS,
    Conversation,
    Message,
    is_learnt,
    read_conversations,
)
from upcycle_core.corpora.encoding import prefix_ids
from upcycle_core.corpora.plain_chat import is_plain, plain_template
from upcycle_core.corpora.seeded import permutation
from upcycle_core.errors import Fault, InputError

UNKNOWN_TASK = -1
STAND_IN = "x"
"""A response for a prompt that has none yet: how a prompt is written does not depend on it."""


class InstructionRows(Dataset):
    """Conversations as rows of S tokens, each a pure function of the seed and its index.

    Every epoch gives each conversation once, in an order of its own. A conversation that is too
    long loses tokens from the left, where the oldest of its prompt stands; if the last response
    with its end token does not fit behind one token of prompt, or if ``cuts`` is false, it is left
    out.

    A tokenizer with a chat template uses it. Without one, messages are joined by empty lines, no
    role is named, and each response ends with the tokenizer's end token: ``<bos>prompt``, a blank
    line, ``response<end>`` (see ``corpora.plain_chat``). A special token's name in a text stays
    ordinary text.

    Tokens are kept in a nameless temporary file, 4 bytes each. Pickling carries the arguments, not
    the tokens.

    Args:
        files: .jsonl, .json or .parquet, see ``corpora.conversations``.
        tokenizer: Directory of its files.
        sequence_length: S.
        count: Rows in all: steps x batch size x gradient accumulation.
        seed: Decides the order.
        tasks: Names of tasks: each row then says which of them its record's field ``task`` is.
        cuts: Whether a conversation that is too long loses its beginning, but for a
            beginning-of-sequence token; else it is left out.
        bos: Whether a beginning-of-sequence token stands before each, as for ``encoding.encoded``.

    Attributes:
        records: Conversations that are used.
        cut: How many of them lost tokens from the left of their prompts.
        left_out: Conversations whose last response, or without cuts all of it, is too long.

    Raises:
        InputError: As ``read_conversations``; the tokenizer has no end token; its chat template
            refuses a conversation, or does not tell where the response starts; or every
            conversation is too long.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Path,
        *,
        sequence_length: int,
        count: int,
        seed: int,
        tasks: Sequence[str] = (),
        cuts: bool = True,
        bos: Bos = "auto",
    ) -> None:
        self._made_from = partial(
            type(self),
            files,
            tokenizer,
            sequence_length=sequence_length,
            count=count,
            seed=seed,
            tasks=tasks,
            cuts=cuts,
            bos=bos,
        )
        self.sequence_length, self.count, self.seed = sequence_length, count, seed
        encoder = _Encoder(tokenizer, bos)
        pad_id = encoder.tokenizer.pad_token_id
        # One that its settings alone name is of no model: its id has no row in an embedding.
        is_known = pad_id in token_ids(Path(tokenizer)).ids.values()
        self.pad_id: int = pad_id if is_known else encoder.end_id
        conversations = read_conversations([Path(file) for file in files])
        fits: list[bool] = []
        self.cut = 0

        def kept() -> Iterator[_Encoded]:
            for conversation in conversations:
                row = encoder.encode(conversation)
                lead = encoder.lead(row.ids)
                needed = lead + 1 + _response_length(row) if cuts else len(row.ids)
                fits.append(needed <= sequence_length)
                if fits[-1]:
                    self.cut += len(row.ids) > sequence_length
                    yield _end_of(row, sequence_length, lead)

        lengths, self._tokens = _mapped(kept())
        if not lengths:
            what = "response" if cuts else "conversation"
            remedy = f"no {what} fits into {sequence_length} tokens; raise sequence_length"
            raise InputError(Fault("instructions", f"{len(conversations)} records", remedy))
        self.records, self.left_out = len(lengths), len(conversations) - len(lengths)
        known = {task: number for number, task in enumerate(tasks)}
        places = [known.get(one.task or "", UNKNOWN_TASK) for one in conversations]
        self._task_ids = torch.tensor(list(compress(places, fits))) if tasks else None
        self._ends = np.cumsum(lengths)
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.count

    @property
    def tokens(self) -> int:
        """Tokens of all rows, padding left out."""
        epochs, left = divmod(self.count, self.records)
        lengths, last = np.diff(self._ends, prepend=0), self._order_of(epochs)[:left]
        return int(epochs * self._ends[-1] + lengths[last].sum())

    def _order_of(self, epoch: int) -> np.ndarray:
        return permutation(self.records, self.seed, "instructions", epoch)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row: ``input_ids``, ``labels`` (-100 on prompt and padding) and ``attention_mask``.

        All are ``[S]`` int64, padded on the right. With tasks also ``task_ids``, a scalar int64:
        the task's place among them, -1 for another.
        """
        if not 0 <= index < self.count:
            raise IndexError(index)
        epoch, place = divmod(index, self.records)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._order_of(epoch))
        record = int(self._order[1][place])
        start, stop = self._ends[record - 1] if record else 0, self._ends[record]
        packed = torch.from_numpy(self._tokens[start:stop].astype(np.int64))
        row = {
            "input_ids": torch.full((self.sequence_length,), self.pad_id),
            "labels": torch.full((self.sequence_length,), NO_LOSS),
            "attention_mask": torch.zeros(self.sequence_length, dtype=torch.int64),
        }
        row["input_ids"][: len(packed)] = torch.where(packed < 0, ~packed, packed)
        row["labels"][: len(packed)] = torch.where(packed < 0, NO_LOSS, packed)
        row["attention_mask"][: len(packed)] = 1
        if self._task_ids is not None:
            row["task_ids"] = self._task_ids[record]
        return row

    def __reduce__(self):
        return self._made_from, ()


class Prompt(NamedTuple):
    """A prompt as a model is given it.

    Args:
        ids: Token ids, at least one.
        cut: How many were lost from the left.
    """

    ids: list[int]
    cut: int


def encode_prompt(
    tokenizer: Path | Any,
    prompt: str | Sequence[Message],
    *,
    max_tokens: int | None = None,
    bos: Bos = "auto",
) -> Prompt:
    """Exactly the tokens that stand before the response in a row of ``InstructionRows``.

    Args:
        tokenizer: Directory of its files, or what it has loaded.
        prompt: The record's: what a user says, or what all say before the response.
        max_tokens: A longer prompt loses tokens from the left, as in training; a
            beginning-of-sequence token stays.
        bos: As the rows'.

    Raises:
        InputError: As ``InstructionRows``, of the tokenizer.
    """
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    response = {"role": "assistant", "content": STAND_IN}
    chat = Conversation([*asked, response], asked[-1]["content"][:40])
    encoder = _Encoder(tokenizer, bos)
    row = encoder.encode(chat)
    ids = row.ids[: row.loss.index(True)]
    kept = ids if max_tokens is None else _end(ids, max_tokens, encoder.lead(ids))
    return Prompt(kept, len(ids) - len(kept))


def encode_conversation(
    tokenizer: Path | Any, messages: Sequence[Message], place: str, *, bos: Bos = "auto"
) -> list[int]:
    """All tokens of a conversation as a row of ``InstructionRows`` has them.

    Args:
        tokenizer: Directory of its files, or what it has loaded.
        messages: Up to the last response.
        place: What errors name.
        bos: As the rows'.

    Raises:
        InputError: As ``InstructionRows``, of the tokenizer.
    """
    return _Encoder(tokenizer, bos).encode(Conversation([*messages], place)).ids


def response_opening(tokenizer: Any) -> str:
    """What the chat template writes of a response before it says anything, as empty thoughts.

    Args:
        tokenizer: Loaded, with a chat template.
    """
    said = SAID.format(number=0)
    asked = {"role": "user", "content": said}
    chat = Conversation([asked, {"role": "assistant", "content": said}], "chat_template")
    row = _Encoder(tokenizer).encode(chat)
    ids = [index for index, loss in zip(row.ids, row.loss, strict=True) if loss]
    before, _, _ = tokenizer.decode(ids, skip_special_tokens=True).partition(said)
    return before.strip()


class _Encoded(NamedTuple):
    """Token ids, and on which of them there is loss; the last has it."""

    ids: list[int]
    loss: list[bool]


def _response_length(row: _Encoded) -> int:
    """Tokens of the last response, its end token included."""
    return next((i for i, loss in enumerate(reversed(row.loss)) if not loss), len(row.loss))


def _end(items: list[Any], length: int, lead: int) -> list[Any]:
    """The last of them, behind the ``lead`` that stay."""
    return items if len(items) <= length else items[:lead] + items[len(items) - length + lead :]


def _end_of(row: _Encoded, length: int, lead: int) -> _Encoded:
    """Its last tokens; what is left of a response whose prompt is gone has no loss."""
    ids, loss = _end(row.ids, length, lead), _end(row.loss, length, lead)
    if len(ids) < len(row.ids):
        gone = loss.index(False, lead)
        loss = [False] * gone + loss[gone:]
    return _Encoded(ids, loss)


def _mapped(rows: Iterable[_Encoded]) -> tuple[list[int], np.ndarray]:
    """Tokens of each row, and all of them in one memory-mapped array int32; ``~id`` where there is
    no loss. Of the rows one at a time is held."""
    lengths = []
    with tempfile.TemporaryFile() as file:  # the map outlives the name
        for row in rows:
            ids = np.array(row.ids, dtype=np.int32)
            file.write(np.where(row.loss, ids, ~ids).tobytes())
            lengths.append(len(ids))
        file.flush()
        if not lengths:
            return [], np.empty(0, dtype=np.int32)
        return lengths, np.memmap(file, dtype=np.int32, mode="r+", shape=(sum(lengths),))


class _Encoder:
    """Conversations to rows of a training.

    Args:
        tokenizer: Its directory, or the loaded one.
        bos: As for ``encoding.encoded``.
    """

    def __init__(self, tokenizer: Path | Any, bos: Bos = "auto") -> None:
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer)
        self.tokenizer: Any = tokenizer
        self.end_id: int = self.tokenizer.eos_token_id
        if self.end_id is None:
            remedy = "it has no end-of-sequence token to end responses with; set its eos_token"
            raise InputError(Fault("tokenizer", self.tokenizer.name_or_path, remedy))
        prefix = prefix_ids(self.tokenizer, bos) if bos == "always" else ()
        plain = None if self.tokenizer.chat_template else plain_template(self.tokenizer, bos)
        self.template = ChatTemplate(self.tokenizer, prefix=prefix, template=plain)

    def lead(self, ids: list[int]) -> int:
        """How many tokens the first position keeps: 1 where a sequence begins with its own token,
        on which attention rests."""
        begins = self.tokenizer.bos_token_id
        return int(begins is not None and ids[:1] == [begins])

    def encode(self, conversation: Conversation) -> _Encoded:
        """Tokens up to the end of the last response."""
        if is_plain(self.tokenizer):
            return self._joined(conversation)
        ids = self.template.ids(conversation)
        loss = self.template.responses(conversation, ids)
        if not any(loss):
            remedy = "the tokenizer's chat template shows no text of the assistant; mend it"
            raise InputError(Fault("instructions", conversation.place, remedy))
        size = len(loss) - loss[::-1].index(True)
        ids, loss = ids[:size], loss[:size]
        if ids[-1] not in self.template.special:
            ids, loss = [*ids, self.end_id], [*loss, True]
        before = self.template.before(ids)
        return _Encoded([*before, *ids], [*[False] * len(before), *loss])

    def _joined(self, conversation: Conversation) -> _Encoded:
        """Without a chat template: blank lines between messages, an end token after responses.

        What is asked first is written as servers write it, by the template that is published; what
        follows begins where a model's own tokens do.
        """
        messages = conversation.messages
        more = {name for message in messages for name in (*THOUGHTS, *LISTS) if message.get(name)}
        if more:
            remedy = f"holds {', '.join(sorted(more))}, and the tokenizer has no chat template to "
            remedy += "write that with; give it one, or leave it out"
            raise InputError(Fault("instructions", conversation.place, remedy))
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        ids = self.template.asked(messages[:first])
        loss = [False] * len(ids)
        for message in messages[first:]:
            is_response = message["role"] == "assistant"
            text = message["content"] if is_response else message["content"] + "\n\n"
            more = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            ids += [*more, self.end_id] if is_response else more
            loss += [is_learnt(message)] * (len(ids) - len(loss))
        return _Encoded(ids, loss)
