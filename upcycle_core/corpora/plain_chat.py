"""How instructions are written for a model whose tokenizer has no chat template.

A message and a blank line, without roles; a response and the tokenizer's end token. What stands
before a text stands before the first message.
"""

import json
from pathlib import Path
from typing import Any

from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.checkpoints.writer import write_text
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.encoding import prefix_ids

FILE = "chat_template.jinja"
MESSAGES = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n\\n' }}{% endif %}"
    "{% endfor %}"
)

TUNED = "It was tuned on instructions, and judged, as its chat template writes them: ask it so."
PLAIN = (
    " That is without roles: a message and a blank line, then the answer and the end token. A text "
    "that is given as it is, without the blank line, is asked in another form."
)


def plain_template(tokenizer: Any, bos: Bos) -> str:
    """The chat template that writes exactly this form.

    Args:
        tokenizer: Loaded; it has none.
        bos: As for ``encoding.encoded``.

    Raises:
        InputError: As ``encoding.prefix_ids``.
    """
    prefix = prefix_ids(tokenizer, bos)
    if prefix == [tokenizer.bos_token_id]:
        return "{{ bos_token }}" + MESSAGES
    tokens = "".join(tokenizer.convert_ids_to_tokens(prefix))
    return (f"{{{{ {json.dumps(tokens)} }}}}" if tokens else "") + MESSAGES


def is_plain(tokenizer: Any) -> bool:
    """Whether chats are written in this form: there is no template, or it is this one."""
    own = tokenizer.chat_template
    return not own or (isinstance(own, str) and own.endswith(MESSAGES))


def form_in_words(directory: Path) -> str:
    """How a model that was tuned on instructions wants to be asked, for its cards."""
    path = directory / FILE
    has_plain = path.is_file() and path.read_text(encoding="utf-8").endswith(MESSAGES)
    return TUNED + PLAIN if has_plain else TUNED


def name_plain_form(directory: Path, bos: Bos) -> None:
    """Put the template beside a model that was tuned in this form, for all who will ask it.

    Args:
        directory: A checkpoint with its tokenizer; one that has a template stays as it is.
        bos: As it was tuned.

    Raises:
        InputError: As ``plain_template``.
    """
    tokenizer = load_tokenizer(directory)
    if not tokenizer.chat_template:
        write_text(directory / FILE, plain_template(tokenizer, bos))
