"""Texts and chats as token ids: one way for statistics, perplexity, training, tasks and answers."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from upcycle_core.corpora.chat_template import ChatTemplate, Encoded
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.conversations import FAULTS_SHOWN, Conversation
from upcycle_core.corpora.spool import in_groups
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.progress import Progress, Silent

DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE = 256, 1 << 20
"""Tokenised in one call: enough to keep all threads busy, and some 50 bytes a character."""
ROLES_SHOWN, LETTERS_SHOWN = 6, 60
"""Of a chat by which it can be found."""


def encoded(
    documents: Iterable[str | Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    bos: Bos = "auto",
    progress: Progress | None = None,
) -> Iterator[Encoded]:
    """Token ids of each document, as ``shards.write_split`` takes them.

    A special token's name in a text or a message stays ordinary text; those that the chat template
    writes are themselves.

    Args:
        documents: Texts and chats.
        tokenizer: Of the model that reads them.
        bos: Whether a beginning-of-sequence token stands before each.
        progress: Told of each document.

    Raises:
        InputError: ``always``, and the tokenizer has no such token; chats that cannot be written,
            see ``ChatTemplate``: the first few, after all others.
    """
    progress = progress or Silent()
    faults, refused, total = list[Fault](), 0, 0
    prefix = prefix_ids(tokenizer, bos)
    template = ChatTemplate(tokenizer, prefix=prefix if bos == "always" else ())
    for batch in in_groups(
        documents,
        lambda document: len(document) if isinstance(document, str) else 0,
        count=DOCUMENTS_AT_ONCE,
        limit=CHARACTERS_AT_ONCE,
    ):
        texts = [document for document in batch if isinstance(document, str)]
        plain = iter(_plain(tokenizer, texts) if texts else [])
        total += len(batch)
        for document in batch:
            progress.advance()
            if isinstance(document, str):
                ids = [*prefix, *next(plain)]
                yield Encoded(ids, len(document.encode()), prefix=len(prefix))
                continue
            try:
                written = template.document(document)
            except InputError as error:
                refused += 1
                faults += _as_it_begins(document, error) if refused <= FAULTS_SHOWN else []
            else:
                yield written
    if refused > FAULTS_SHOWN:
        more = f"{refused - FAULTS_SHOWN} more of {total} documents"
        faults.append(Fault("chat_template", more, "they are refused too; change or remove them"))
    raise_faults(faults)


def _as_it_begins(chat: Conversation, error: InputError) -> list[Fault]:
    """What is wrong with a chat, by which it is found in files whose places it does not tell.

    Raises:
        InputError: It is wrong with the tokenizer, whatever the chat.
    """
    if any(fault.value != chat.place for fault in error.faults):
        raise error
    roles = [message["role"] for message in chat.messages]
    more = ["..."] if len(roles) > ROLES_SHOWN else []
    said = next((m["content"] for m in chat.messages if m["role"] != "system"), "")
    begins = f'({", ".join(roles[:ROLES_SHOWN] + more)}) that begins "{said[:LETTERS_SHOWN]}"'
    return [replace(fault, value=f"{chat.place} {begins}") for fault in error.faults]


def _plain(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


def prefix_ids(tokenizer: PreTrainedTokenizerBase, bos: Bos) -> list[int]:
    """What stands before a text: no or one id, or whatever the tokenizer itself puts there.

    Raises:
        InputError: ``always``, and the tokenizer has no beginning-of-sequence token.
    """
    if bos == "never":
        return []
    if bos == "auto":
        whole, (plain,) = tokenizer("a", verbose=False)["input_ids"], _plain(tokenizer, ["a"])
        starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return list(whole[: next(starts, 0)])
    raise_faults(bos_faults(tokenizer, bos))
    return [tokenizer.bos_token_id]


def bos_faults(tokenizer: Any, bos: Bos, *, name: str = "the tokenizer") -> list[Fault]:
    """What keeps a loaded tokenizer from beginning texts so; ``name`` is what people call it."""
    if bos != "always" or tokenizer.bos_token_id is not None:
        return []
    remedy = f"{name} has no beginning-of-sequence token; use auto or never"
    return [Fault("corpus.bos", bos, remedy)]


def asked(tokenizer: Any, prompt: str, *, bos: Bos = "auto", chat: bool = False) -> list[int]:
    """Token ids of what a model is asked.

    Args:
        tokenizer: Of the model.
        prompt: A text to continue; with ``chat`` what a user says, to be answered.
        bos: As for ``encoded``.
        chat: Whether the chat template writes it.

    Raises:
        InputError: As ``encoded``.
    """
    if not chat:
        return list(next(encoded([prompt], tokenizer, bos=bos)).ids)
    prefix = prefix_ids(tokenizer, bos) if bos == "always" else ()
    return ChatTemplate(tokenizer, prefix=prefix).asked([{"role": "user", "content": prompt}])


def with_prefix(tokenizer: Any, bos: Bos) -> Any:
    """The tokenizer, itself putting before a text what ``bos`` asks for, for who calls it as it is.

    Args:
        tokenizer: Changed in place, unless it does just this; it also may put something behind.
        bos: As for ``encoded``.

    Raises:
        InputError: As ``prefix_ids``.
    """
    prefix = prefix_ids(tokenizer, bos)
    if tokenizer("a", verbose=False)["input_ids"] != [*prefix, *_plain(tokenizer, ["a"])[0]]:
        tokens = tokenizer.convert_ids_to_tokens(prefix)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[*tokens, "$A"],
            special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens],
        )
    return tokenizer


def answer_ends(tokenizer: Any, model: Any, *, chat: bool) -> list[int]:
    """Ids that end an answer: the tokenizer's end token first, then those that the model names.

    Of a chat any special token: the template says which of them ends a response, and a model that
    was tuned on chats may name the one of its seed alone.
    """
    own = model.generation_config.eos_token_id
    ends = [tokenizer.eos_token_id, *([own] if isinstance(own, int) else own or ())]
    if chat:
        ends += [index for index, t in tokenizer.added_tokens_decoder.items() if t.special]
    return [end for end in dict.fromkeys(ends) if end is not None]
