"""The units of evaluation work: paths and numbers in, JSON-able numbers out.

Each call loads one model and scores it on every domain it is given; a MoE may be scored with other
routers and other k without loading it again. All of them are told

- ``corpora``: {domain: its held-out split's directory}, tokenised for the model;
- ``config``: what is scored, and in which arithmetic;
- ``device``: where the model runs;
- ``streamed``: where hidden states lie while texts go through the model layer by layer, of a dense
  model or a stock MoE; by default it is held whole;
- ``progress``: hears of tokens as they are scored;

and raise an InputError for a checkpoint, corpus or text that cannot be used.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.conversations import Conversation
from upcycle_core.corpora.encoding import encoded
from upcycle_core.corpora.reader import TokenCorpus, read_chats, read_documents
from upcycle_core.corpora.shards import write_split
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.perplexity import check_plain_head, score_model
from upcycle_core.evaluation.text.streamed import Scores, Streaming, Variant
from upcycle_core.moe.inspect import (
    force_expert,
    record_routing,
    routers_of,
    set_routers,
    set_top_k,
)
from upcycle_core.precision import chosen, weights_type
from upcycle_core.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def evaluate_checkpoint(
    directory: Path,
    corpora: Mapping[str, Path],
    *,
    config: EvaluationConfig,
    device: str = "cpu",
    streamed: Path | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score the checkpoint in ``directory``, dense or MoE, as it is."""
    if streamed is not None:
        streaming = Streaming.of(directory, config, device, streamed)
        return streaming.plain(corpora, config, progress)
    model = load_scored(directory, config, device)
    return _evaluate(model, corpora, config, progress)


def evaluate_stitched(
    backbone: Path,
    expert: Path,
    corpora: Mapping[str, Path],
    *,
    config: EvaluationConfig,
    device: str = "cpu",
    streamed: Path | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score the averaged backbone with one expert's FFNs: what the oracle runs on that domain.

    A MoE whose tokens all go to one expert computes this dense model (DUME's Oracle row).

    Args:
        backbone: The averaged backbone.
        expert: The dense expert whose FFNs are used.
        corpora: For the oracle, that of the expert's own domain alone.
    """
    if streamed is not None:
        return Streaming.of_stitched(backbone, expert, config, device, streamed).plain(
            corpora, config, progress
        )
    model = load_stitched(
        backbone, expert, dtype=weights_type(config.precision, device), device=device
    )
    return _evaluate(model, corpora, config, progress)


def evaluate_moe(
    directory: Path,
    variants: Mapping[str, Variant],
    corpora: Mapping[str, Path],
    *,
    config: EvaluationConfig,
    device: str = "cpu",
    streamed: Path | None = None,
    progress: Progress | None = None,
    finished: Callable[[str, dict[str, Any]], object] = lambda name, found: None,
) -> dict[str, dict[str, Any]]:
    """Score one MoE with several routers or several k, loading it once.

    Args:
        directory: The MoE's checkpoint.
        variants: What is scored, by name; each starts from the checkpoint's own routers and k.
        finished: Given each variant and what is returned of it, as soon as it is known: of a MoE
            that is held, before the next is scored.

    Returns:
        {variant: {"scores": {domain: score}, "routing": {domain: counts [L][D]}}}. All tokens of
        the paragraphs are counted, k times each; padding is not.

    Raises:
        InputError: A router or a k cannot be used either.
    """
    if streamed is not None:
        found = Streaming.of(directory, config, device, streamed).variants(
            variants, corpora, config, progress
        )
        for name, own in found.items():
            finished(name, own)
        return found
    model = load_scored(directory, config, device)
    k = model.config.num_experts_per_tok
    saved = {
        layer: router.weight.detach().T.clone() for layer, router in enumerate(routers_of(model))
    }
    found = {}
    for name, variant in variants.items():
        set_routers(model, {**saved, **variant.routers})
        set_top_k(model, variant.top_k or k)
        scores: Scores = {}
        routing: dict[str, list[list[int]]] = {}
        for domain, corpus in corpora.items():
            with record_routing(model.base_model) as counts_LD:
                scores |= _evaluate(model, {domain: corpus}, config, progress, f"{name} on ")
            routing[domain] = counts_LD.tolist()
        found[name] = {"scores": scores, "routing": routing}
        finished(name, found[name])
    return found


def evaluate_own_experts(
    directory: Path,
    experts: Mapping[str, int],
    corpora: Mapping[str, Path],
    *,
    config: EvaluationConfig,
    device: str = "cpu",
    streamed: Path | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score each domain with all its tokens sent to one expert: no router has a part in it.

    Args:
        directory: The MoE's checkpoint.
        experts: {domain: index of its expert}.
        corpora: Of those domains at least.

    Raises:
        InputError: An index cannot be used either.
    """
    if streamed is not None:
        return Streaming.of(directory, config, device, streamed).own_experts(
            experts, corpora, config, progress
        )
    model = load_scored(directory, config, device)
    scores: Scores = {}
    for domain, index in experts.items():
        text = {domain: corpora[domain]}
        with force_expert(model.base_model, index):
            scores |= _evaluate(model, text, config, progress, "own expert on ")
    return scores


def evaluate_text(
    directory: Path,
    documents: Mapping[str, Path],
    *,
    config: EvaluationConfig,
    bos: Bos = "auto",
    parts: Mapping[str, Mapping[int, int]] | None = None,
    device: str = "cpu",
    streamed: Path | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score a checkpoint with its own tokenizer, for models that do not share the corpus's.

    Make the result comparable with ``scores.perplexity_per_reference_token``.

    Args:
        directory: The checkpoint and its tokenizer.
        documents: {domain: Parquet file of held-out documents}. Chats are written by this
            tokenizer's template; without one, what is said in them is read.
        config: What is scored; ``tokens`` is left aside, for it counts another tokenizer's.
        bos: Whether a beginning-of-sequence token stands before each document.
        parts: {domain: {place of a document: UTF-8 bytes of it to read}}; all by default. A text is
            cut between characters, a chat is not.

    Returns:
        {domain: score}; its documents have their places in the Parquet file.
    """
    tokenizer = load_tokenizer(directory)
    whole = replace(config, tokens=None)
    with tempfile.TemporaryDirectory() as folder:
        corpora, places = {}, {}
        for index, (domain, path) in enumerate(documents.items()):
            texts = read_chats(path) if tokenizer.chat_template else read_documents(path)
            if parts is not None:
                texts = _chosen(texts, parts[domain])
                places[domain] = sorted(parts[domain])
            corpora[domain] = Path(folder) / str(index)
            write_split(
                corpora[domain],
                encoded(texts, tokenizer, bos=bos),
                eos_id=tokenizer.eos_token_id or 0,
                vocabulary_size=len(tokenizer),
            )
        if streamed is not None:
            streaming = Streaming.of(directory, config, device, streamed)
            scores = streaming.plain(corpora, whole, progress)
        else:
            model = load_scored(directory, config, device)
            scores = _evaluate(model, corpora, whole, progress)
    return {domain: _placed(score, places.get(domain)) for domain, score in scores.items()}


def load_scored(directory: Path, config: EvaluationConfig, device: str) -> "PreTrainedModel":
    """Load a checkpoint in the arithmetic that ``config`` asks for, ready for ``score_model``.

    Raises:
        InputError: It cannot be loaded, or it does something to its logits that scoring leaves out.
    """
    model = load_causal_lm(directory, dtype=weights_type(config.precision, device), device=device)
    check_plain_head(model)
    return model


def _evaluate(
    model: "PreTrainedModel",
    corpora: Mapping[str, Path],
    config: EvaluationConfig,
    progress: Progress | None,
    what: str = "",
) -> Scores:
    return {
        domain: score_model(
            model,
            TokenCorpus(corpus),
            config=config,
            progress=progress,
            what=f"evaluating {what}{domain}{chosen(config.precision, model.device)}",
        ).to_dict()
        for domain, corpus in corpora.items()
    }


def _chosen(
    texts: Iterable[str | Conversation], parts: Mapping[int, int]
) -> Iterator[str | Conversation]:
    """The texts of ``parts``, each up to so many UTF-8 bytes."""
    for place, text in enumerate(islice(texts, max(parts) + 1)):
        if place in parts and isinstance(text, str):
            yield text.encode()[: parts[place]].decode(errors="ignore")
        elif place in parts:
            yield text


def _placed(score: Mapping[str, Any], places: Sequence[int] | None) -> dict[str, Any]:
    """A score of chosen documents with their places among all."""
    if places is None:
        return dict(score)
    indices = [places[index] for index in score["document_indices"]]
    return {**score, "document_indices": indices}
