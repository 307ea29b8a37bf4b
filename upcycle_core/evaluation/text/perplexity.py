"""Perplexity of a causal language model on held-out text.

Shapes: B paragraphs, S positions, N scored tokens, H hidden size, V vocabulary.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from upcycle_core.corpora.batches import (
    PAD_ID,
    Batch,
    Paragraphs,
    paragraph_batches,
    paragraphs,
    scored_tokens,
)
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.scores import Score
from upcycle_core.progress import Progress, Silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_AT_ONCE = 512
"""Tokens whose logits [N, V] exist at one time: 0.25 GB in fp32 where V is 128 k."""


def score_model(
    model: "PreTrainedModel",
    corpus: TokenCorpus,
    *,
    config: EvaluationConfig,
    pad_id: int = PAD_ID,
    progress: Progress | None = None,
    what: str = "evaluating",
) -> Score:
    """Score every token of the text, cut into paragraphs, but each paragraph's first.

    The result depends neither on the batch size nor on what stands in the padding, beyond the
    rounding of the forward pass: losses are summed in fp64 and padding is left out.

    Args:
        model: In evaluation mode, with a head that ``check_plain_head`` accepts; runs in the type
            of its weights, on the device they are on.
        corpus: The text, tokenised for this model.
        config: How the text is cut and how much of it is scored.
        pad_id: A token id to fill shorter paragraphs with.
        progress: Told of tokens as they are scored.
        what: How progress names this.

    Raises:
        InputError: No token to score, or a loss that is not finite.
    """
    pieces = scored_paragraphs(corpus, config)
    losses = token_losses(
        model, corpus, pieces, config=config, pad_id=pad_id, progress=progress, what=what
    )
    return summed(losses, corpus, pieces, config)


def summed(
    losses: Iterable[tuple[Batch, Tensor]],
    corpus: TokenCorpus,
    pieces: Paragraphs,
    config: EvaluationConfig,
) -> Score:
    """The score that ``token_losses`` of all batches of ``pieces`` add up to."""
    nll, by_document = 0.0, np.zeros(len(corpus))
    for batch, losses_N in losses:
        nll += losses_N.sum().item()
        counts_B = batch.counted[:, 1:].sum(1)
        document_N = batch.documents.repeat_interleave(counts_B).numpy()
        np.add.at(by_document, document_N, losses_N.cpu().numpy())
    tokens = np.zeros(len(corpus), dtype=np.int64)
    np.add.at(tokens, pieces.rows[:, 0], scored_tokens(corpus, pieces, config.loss))
    known = tokens > 0
    return replace(
        score_of(nll, corpus, pieces, config),
        document_nll=tuple(by_document[known].tolist()),
        document_tokens=tuple(tokens[known].tolist()),
        document_indices=tuple(np.flatnonzero(known).tolist()),
    )


def scored_paragraphs(corpus: TokenCorpus, config: EvaluationConfig) -> Paragraphs:
    """The paragraphs that are scored, each but for its first token, which nothing predicts.

    Raises:
        InputError: No token to score, or a split that does not tell its responses.
    """
    pieces = paragraphs(corpus, sequence_length=config.sequence_length, max_tokens=config.tokens)
    if not scored_tokens(corpus, pieces, config.loss).sum():
        raise InputError(Fault("corpus", str(corpus.directory), "no token to score; add text"))
    return pieces


def scored_text(corpus: TokenCorpus, config: EvaluationConfig) -> dict[int, int]:
    """The documents of ``scored_paragraphs``, and the UTF-8 bytes of each: what to score elsewhere.

    A document that ``config.tokens`` cuts has its bytes times the share of its tokens before.

    Raises:
        InputError: As ``scored_paragraphs``.
    """
    pieces = scored_paragraphs(corpus, config)
    sizes = np.diff(corpus.byte_offsets)
    text = {int(document): int(sizes[document]) for document in pieces.rows[:, 0]}
    last, start, length = pieces[-1]
    tokens = len(corpus.document(last)) - corpus.prefix
    if config.tokens is not None and pieces.tokens >= config.tokens:
        text[last] = round(text[last] * (start + length - corpus.prefix) / tokens)
    return text


def token_losses(
    model: "PreTrainedModel",
    corpus: TokenCorpus,
    pieces: Paragraphs,
    *,
    config: EvaluationConfig,
    pad_id: int = PAD_ID,
    progress: Progress | None = None,
    what: str = "evaluating",
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield each batch with the losses of its scored tokens, [N] fp64 in nats.

    Tokens stand paragraph after paragraph: of each what is counted behind its first token. Batches
    and their order depend on text and configuration alone, not on the model. Arguments as
    ``score_model``.

    Raises:
        InputError: A loss that is not finite.
    """
    progress = progress or Silent()
    progress.start(what, int(scored_tokens(corpus, pieces, config.loss).sum()), "tokens")
    nll, done, began = 0.0, 0, time.monotonic()
    batches = paragraph_batches(corpus, pieces, config.batch_size, pad_id, count=config.loss)
    for batch in batches:
        losses_N = _batch_losses(model, batch)
        nll += finite_sum(losses_N, model.name_or_path)
        done += len(losses_N)
        rate = done / max(time.monotonic() - began, 1e-9)
        progress.advance(len(losses_N), loss=nll / max(done, 1), tokens_per_second=rate)
        yield batch, losses_N


def finite_sum(losses_N: Tensor, model: str | None) -> float:
    """The sum of losses, in nats.

    Raises:
        InputError: It is not finite; ``model`` is named.
    """
    nll = losses_N.sum().item()
    if not np.isfinite(nll):
        raise InputError(Fault("model", model, "its loss is not finite; it is broken"))
    return nll


def score_of(
    nll: float, corpus: TokenCorpus, pieces: Paragraphs, config: EvaluationConfig
) -> Score:
    """The score of a loss in nats over all scored tokens of ``pieces``.

    Its bytes are each document's, times the share of its text's tokens that are scored. What stands
    before the text, a beginning-of-sequence token, has no bytes.
    """
    scored = scored_tokens(corpus, pieces, config.loss)
    documents, starts, _ = pieces.rows.T
    tokens = np.maximum(np.diff(corpus.offsets)[documents] - corpus.prefix, 1)
    # The first id of a document is not scored anyway.
    before = np.where(starts == 0, max(corpus.prefix - 1, 0), 0)
    size = float(np.sum(np.diff(corpus.byte_offsets)[documents] / tokens * (scored - before)))
    return Score(nll=nll, tokens=int(scored.sum()), bytes=size)


def check_plain_head(model: "PreTrainedModel") -> None:
    """Refuse models that scale or cap their logits: the head alone would give another loss.

    Raises:
        InputError: The model's logits are not its head's product with the last hidden state.
    """
    input_BS = torch.arange(4, device=model.device)[None]
    mask_BS = torch.ones_like(input_BS)
    head = model.get_output_embeddings()
    with torch.inference_mode():
        if head is not None:
            plain = head(_hidden_states(model, input_BS, mask_BS))
            own = model(input_ids=input_BS, attention_mask=mask_BS, use_cache=False).logits
            if torch.allclose(plain.float(), own.float(), rtol=1e-2, atol=1e-2, equal_nan=True):
                return
    remedy = "its logits are not those of a plain linear head; such models are not supported"
    raise InputError(Fault("model", type(model).__name__, remedy))


@torch.inference_mode()
def _batch_losses(model: "PreTrainedModel", batch: Batch) -> Tensor:
    """Losses of a batch, [N] fp64."""
    input_BS = batch.input_ids.to(model.device)
    mask_BS = batch.attention_mask.to(model.device)
    hidden_BSH = _hidden_states(model, input_BS, mask_BS)
    return losses_of(hidden_BSH, batch, model.get_output_embeddings())


def losses_of(hidden_BSH: Tensor, batch: Batch, head: Callable[[Tensor], Tensor]) -> Tensor:
    """Losses of a batch's scored tokens, [N] fp64: t is predicted from the hidden state at t - 1.

    Args:
        hidden_BSH: Behind the final norm.
        batch: What was forwarded.
        head: Makes logits [N, V] of hidden states [N, H].
    """
    device = hidden_BSH.device
    input_BS = batch.input_ids.to(device)
    # padding is on the right: the predecessor of what is scored is real as well
    scored_BS = batch.counted.to(device)[:, 1:].bool()
    hidden_NH, target_N = hidden_BSH[:, :-1][scored_BS], input_BS[:, 1:][scored_BS]
    losses = [torch.zeros(0, dtype=torch.float64, device=device)]
    for h_NH, t_N in zip(
        hidden_NH.split(TOKENS_AT_ONCE), target_N.split(TOKENS_AT_ONCE), strict=True
    ):
        logits_NV = head(h_NH)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        losses.append(functional.cross_entropy(logits_NV, t_N, reduction="none").double())
    return torch.cat(losses)


def _hidden_states(model: "PreTrainedModel", input_BS: Tensor, mask_BS: Tensor) -> Tensor:
    decoder = model.base_model
    return decoder(input_ids=input_BS, attention_mask=mask_BS, use_cache=False).last_hidden_state
