"""Stage ``strangers``: one model a domain that shares no seed with the others, trained or given."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from infra.recipe.schema import Recipe
from tasks.data.given import given_model
from tasks.engine.artifacts import FORMS
from tasks.engine.stage import StageRun, each, stage
from tasks.training import Texts, train_piece
from upcycle_core.backbone.form import Form, write_in_form
from upcycle_core.corpora.config import Bos, Origin, TokenizerConfig
from upcycle_core.corpora.encoding import encoded
from upcycle_core.corpora.reader import read_chats
from upcycle_core.corpora.shards import write_split
from upcycle_core.corpora.tokenizer import train_tokenizer
from upcycle_core.progress import Progress
from upcycle_core.training.config import LlamaShape
from upcycle_core.training.seed import initialise_model


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    own, given = recipe.domains[domain], [f"sources/{domain}.json"]
    if own.expert is not None or (own.origin is not None and own.origin.model is not None):
        given.append(f"sources/{FORMS}/{domain}")
    return given if own.expert is not None else [*given, *each(recipe, "documents/{domain}")]


def _params(recipe: Recipe, domain: str) -> Iterator[str]:
    yield f"domains.{domain}.expert"
    if recipe.domains[domain].expert is None:
        yield from ("seed", "experts.training", f"domains.{domain}.origin")
        yield from ("seed_model.shape", "tokenizer", "corpus.bos")


@stage("experts/{domain}", _inputs, params=_params)
def experts(run: StageRun) -> None:
    """Write the model's checkpoint, with its own tokenizer."""
    recipe, domain = run.recipe, run.recipe.domains[run.domain]
    origin = domain.origin or Origin()
    given = domain.expert or origin.model
    start = None
    if given is not None:
        form = Form.load(run.path(f"sources/{FORMS}/{run.domain}"))
        start = run.out if domain.expert is not None else _fresh(run.out, ".start")
        size = recipe.moe.max_shard_bytes
        write_in_form(given_model(recipe, given, run.models), form, start, max_shard_bytes=size)
    if domain.expert is not None:
        return
    run.run_one(
        stranger_piece,
        "experts",
        name=run.domain,
        documents={name: run.path(f"documents/{name}") for name in recipe.domains},
        origin=origin,
        start=start,
        shape=recipe.seed_model.shape,
        vocabulary=recipe.tokenizer,
        config=recipe.experts.training,
        bos=recipe.corpus.bos,
        seed=recipe.seed,
        device=run.device("experts"),
    )
    if start is not None:
        shutil.rmtree(start)


def stranger_piece(
    *,
    out: Path,
    progress: Progress,
    name: str,
    documents: Mapping[str, Path],
    origin: Origin,
    start: Path | None,
    shape: LlamaShape,
    vocabulary: TokenizerConfig,
    bos: Bos,
    seed: int,
    **training: Any,
) -> dict[str, Any]:
    """The piece: train from ``start``, or from random weights with a tokenizer of their own."""
    beside = out.with_suffix("")
    shares = {domain: origin.mixture.get(domain, 0.0) for domain in documents}
    mixture = {domain: share for domain, share in shares.items() if share} or {name: 1.0}
    if start is None:
        start, words = _fresh(beside, ".initial"), _fresh(beside, ".tokenizer")
        read = documents
        if origin.vocabulary_size is not None:
            vocabulary = replace(vocabulary, vocabulary_size=origin.vocabulary_size)
            read = {domain: documents[domain] for domain in mixture}
        train_tokenizer(read, words, config=vocabulary)
        initialise_model(shape, words, start, seed=initialisation(origin, name, seed))
    texts = _fresh(beside, ".tokens")
    encoder = AutoTokenizer.from_pretrained(start, local_files_only=True, trust_remote_code=False)
    for domain in mixture:
        write_split(
            texts / domain,
            encoded(read_chats(documents[domain] / "train.parquet"), encoder, bos=bos),
            eos_id=encoder.eos_token_id,
            vocabulary_size=len(encoder),
        )
    return train_piece(
        out=out,
        progress=progress,
        start=start,
        data=Texts(train=[texts / domain for domain in mixture], weights=list(mixture.values())),
        seed=seed,
        **training,
    )


def initialisation(origin: Origin, name: str, seed: int) -> int:
    """The seed of a domain's random weights: the origin's own, or drawn from seed and name."""
    if origin.initialisation is not None:
        return origin.initialisation
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "big")


def _fresh(beside: Path, suffix: str) -> Path:
    """An empty folder, whatever a killed attempt has left there."""
    folder = beside.with_suffix(suffix)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
