"""What keeps the champion from being scored beside a new model, told before that is made."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from infra.tracking.registry import Registry
from tasks.engine.stage import Session
from tasks.methods import scored_models
from tasks.release.versions import MODEL_TAG
from upcycle_core.checkpoints.tokenizer import (
    check_tokenizer,
    load_tokenizer,
    vocabulary_fingerprint,
)
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.conversations import Conversation
from upcycle_core.corpora.encoding import bos_faults, encoded
from upcycle_core.corpora.reader import TokenCorpus, read_chats
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.text.perplexity import scored_text


def champion_faults(session: Session, registry: Registry) -> Iterator[Fault]:
    """What the champion's tokenizer lacks to read this run's held-out text and tasks.

    Of one whose files lie elsewhere, or cannot be read, it is told when it is scored.

    Args:
        session: Its tokenizer, documents and corpora are up to date.
        registry: Where the champion is.
    """
    recipe, workspace = session.recipe, session.workspace
    champion = registry.find(recipe.registered_name, "champion")
    if champion is None or champion.is_lost:
        return
    is_here = workspace.has_digest("model", champion.tags.get(MODEL_TAG))
    try:
        files = workspace.path("model") if is_here else registry.place(champion.reference)
        if files is None:
            return
        check_tokenizer(files)
    except InputError:
        return
    own = vocabulary_fingerprint(workspace.path("tokenizer"))
    is_stranger, tokenizer = vocabulary_fingerprint(files) != own, load_tokenizer(files)
    name, has_tasks = f"the champion, {champion.reference},", recipe.method in _scored(session)
    if has_tasks and recipe.task_evaluation.chat_template and tokenizer.chat_template is None:
        remedy = f"the tokenizer of {name} has no chat template; set it to false"
        yield Fault("task_evaluation.chat_template", True, remedy)
    if is_stranger or has_tasks:
        yield from bos_faults(tokenizer, recipe.corpus.bos, name=f"the tokenizer of {name}")
    if is_stranger and recipe.evaluation.loss == "responses":
        remedy = f"{name} has another tokenizer, and responses are compared in one alone; use all, "
        remedy += "or register under another name (registry.model)"
        yield Fault("evaluation.loss", "responses", remedy)
    elif is_stranger and tokenizer.chat_template:
        for fault in _refused_chats(session, tokenizer):
            remedy = f"{fault.remedy}; {name} is judged on this text, which its own template "
            remedy += "writes: change the text, or register under another name (registry.model)"
            yield Fault(fault.field, fault.value, remedy)


def _scored(session: Session) -> Mapping[str, Any]:
    """Rows that are scored on tasks."""
    return scored_models(session.recipe) if session.recipe.tasks else {}


def _refused_chats(session: Session, tokenizer: Any) -> Iterator[Fault]:
    """Chats of the held-out text that a model's template does not write, of those it is given."""
    recipe, workspace = session.recipe, session.workspace
    bos: Bos = "auto" if recipe.corpus.bos == "always" else recipe.corpus.bos  # told already
    for domain in recipe.domains:
        try:
            corpus = TokenCorpus(workspace.path(f"corpora/{domain}/heldout"))
            parts = scored_text(corpus, recipe.evaluation.measuring)
            chats = _chats(workspace.path(f"documents/{domain}/heldout.parquet"), parts)
            for _ in encoded(chats, tokenizer, bos=bos):
                pass
        except InputError as error:
            for fault in error.faults:
                yield Fault(f"domains.{domain}.heldout: {fault.field}", fault.value, fault.remedy)


def _chats(file: Path, parts: Mapping[int, int]) -> Iterator[Conversation]:
    """Those of a file's documents that are scored and are chats."""
    for place, document in enumerate(islice(read_chats(file), max(parts, default=-1) + 1)):
        if place in parts and isinstance(document, Conversation):
            yield document
