"""Stage ``strangers``: one model a domain that shares no seed with the others, trained or given."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.recipe.schema import Recipe
from tasks.data.given import place_given
from tasks.engine.artifacts import FORMS
from tasks.engine.params import expert_keys, is_trained
from tasks.engine.stage import StageRun, stage
from tasks.symphony.vocabulary import sharing
from tasks.training import Texts, train_one, train_piece
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.config import Bos, Origin, TokenizerConfig
from upcycle_core.corpora.shards import write_encoded
from upcycle_core.corpora.tokenizer import train_tokenizer
from upcycle_core.progress import Progress
from upcycle_core.training import workers
from upcycle_core.training.config import LlamaShape
from upcycle_core.training.seed import initialise_model


def trained_on(recipe: Recipe, domain: str) -> list[str]:
    """The text that a domain's model is trained on, below the workspace: no other split of it."""
    return [_text(name) for name in mixture(recipe, domain)]


def _text(domain: str) -> str:
    return f"documents/{domain}/train.parquet"


def mixture(recipe: Recipe, domain: str) -> dict[str, float]:
    """{domain: its share} of the text that a domain's model is trained on; its own by default."""
    shares = (recipe.domains[domain].origin or Origin()).mixture
    return {name: shares[name] for name in recipe.domains if shares.get(name)} or {domain: 1.0}


def _inputs(recipe: Recipe, domain: str) -> Iterator[str]:
    own, continued = recipe.domains[domain], domain in recipe.parents
    if own.expert is not None or (own.origin and own.origin.model and not continued):
        yield from (f"sources/{domain}.json", f"sources/{FORMS}/{domain}")
    if own.expert is not None:
        return
    yield from trained_on(recipe, domain)
    if continued:
        yield f"parents/{domain}"
    elif domain in sharing(recipe):
        yield "vocabulary"


def _params(recipe: Recipe, domain: str) -> Iterator[str]:
    yield from expert_keys(recipe, domain)
    own = recipe.domains[domain]
    if own.expert is not None:
        return
    # A given model is what sources/ says, wherever it lies.
    begins = "origin" if own.origin is None or own.origin.model is None else "origin.mixture"
    yield from (f"domains.{domain}.{begins}", "corpus.bos")
    if begins == "origin" and domain not in recipe.parents:
        yield "seed_model.shape"
        if domain not in sharing(recipe):
            yield "tokenizer"


@stage("experts/{domain}", _inputs, params=_params, lasting=is_trained)
def experts(run: StageRun) -> None:
    """Write the model's checkpoint, with its own tokenizer."""
    recipe, domain = run.recipe, run.recipe.domains[run.domain]
    origin = domain.origin or Origin()
    is_continued = run.domain in recipe.parents
    given = domain.expert or (None if is_continued else origin.model)
    start = run.path(f"parents/{run.domain}") if is_continued else None
    if given is not None:
        start = run.out if domain.expert is not None else _fresh(run.out, ".start")
        place_given(run, given, run.domain, start)
    if domain.expert is not None:
        return
    shares, shares_words = mixture(recipe, run.domain), run.domain in sharing(recipe)
    train_one(
        run,
        stranger_piece,
        "experts",
        documents={name: run.path(_text(name)) for name in shares},
        shares=list(shares.values()),
        initial=initialisation(origin, run.domain, recipe.seed),
        start=start,
        shape=recipe.seed_model.shape,
        words=run.path("vocabulary") if shares_words and start is None else _own(recipe, origin),
        config=recipe.experts.continuing if is_continued else recipe.experts.training,
        bos=recipe.corpus.bos,
        seed=recipe.seed,
        device=run.device("experts"),
    )
    if given is not None and start is not None:
        shutil.rmtree(start)


def stranger_piece(
    *,
    out: Path,
    progress: Progress,
    documents: Mapping[str, Path],
    shares: Sequence[float],
    initial: int,
    start: Path | None,
    shape: LlamaShape,
    words: Path | TokenizerConfig,
    bos: Bos,
    seed: int,
    **training: Any,
) -> dict[str, Any]:
    """The piece: train from ``start``, or from random weights with the tokenizer ``words``.

    Where ``words`` says how, that tokenizer is trained here, on the same text.
    """
    beside = out.with_suffix("")
    texts, made = beside.with_suffix(".tokens"), beside.with_suffix(".initial")
    if workers.rank() == 0:
        if start is None:
            if not isinstance(words, Path):
                config, words = words, _fresh(beside, ".tokenizer")
                train_tokenizer(documents, words, config=config)
            initialise_model(shape, words, _fresh(beside, ".initial"), seed=initial)
        _write_tokens(documents, start or made, _fresh(beside, ".tokens"), bos)
    workers.wait()
    return train_piece(
        out=out,
        progress=progress,
        start=start or made,
        data=Texts(train=[texts / domain for domain in documents], weights=shares),
        seed=seed,
        **training,
    )


def _write_tokens(documents: Mapping[str, Path], start: Path, texts: Path, bos: Bos) -> None:
    """The text in the words of the model at ``start``."""
    encoder = load_tokenizer(start)
    for domain in documents:
        write_encoded(texts / domain, documents[domain], encoder, bos=bos)


def initialisation(origin: Origin, name: str, seed: int) -> int:
    """The seed of a domain's random weights: the origin's own, or drawn from seed and name."""
    if origin.initialisation is not None:
        return origin.initialisation
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "big")


def _own(recipe: Recipe, origin: Origin) -> TokenizerConfig:
    """The tokenizer of a model that shares none."""
    size = origin.vocabulary_size or recipe.tokenizer.vocabulary_size
    return replace(recipe.tokenizer, vocabulary_size=size)


def _fresh(beside: Path, suffix: str) -> Path:
    """An empty folder, whatever a killed attempt has left there."""
    folder = beside.with_suffix(suffix)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
