"""What ends a response, told to whoever generates: a model tuned on chats may name its seed's."""

import json
from pathlib import Path

from upcycle_core.checkpoints.writer import write_json
from upcycle_core.corpora.conversations import Conversation
from upcycle_core.errors import InputError

GENERATION_CONFIG = "generation_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def name_chat_end(directory: Path) -> None:
    """Put the id that ends a response of the chat template among those that end generation.

    ``transformers`` and vLLM stop at what generation_config.json names. A base model with a chat
    template, fine-tuned on chats, names the token that ends its texts alone, so that its answers
    run on into a conversation with itself. Nothing is written where the id is named already, where
    there is no template, or none that ends what the assistant says with a special token.

    Args:
        directory: A checkpoint with its tokenizer; changed in place.
    """
    if not _may_have_template(directory):
        return
    end = _end(directory)
    path = directory / GENERATION_CONFIG
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    own = told.get("eos_token_id")
    ends = [own] if isinstance(own, int) else list(own or ())
    if end is None or end in ends:
        return
    # Where config.json rules, transformers makes the file anew and forgets what it says.
    told.pop("_from_model_config", None)
    write_json(path, told | {"eos_token_id": [*ends, end]})


def _end(directory: Path) -> int | None:
    """The id with which the template ends what an assistant says; None where there is none."""
    from upcycle_core.corpora.chat_template import chat_template_of  # slow to import

    said = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    try:
        return chat_template_of(directory).end(Conversation(said, "chat_template"))
    except InputError:
        return None


def _may_have_template(directory: Path) -> bool:
    if any((directory / name).exists() for name in TEMPLATES):
        return True
    config = directory / "tokenizer_config.json"
    return config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
