"""The pieces of an evaluation: one model, or one model in several variants."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.cluster.memory import Room
from infra.cluster.pieces import Piece
from tasks.engine.stage_run import StageRun
from tasks.scoring.architectures import register_architectures
from tasks.scoring.room import room_of, scoring_folder
from upcycle_core.backbone.average import write_average
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import vocabulary_fingerprint
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.text.perplexity import scored_text
from upcycle_core.evaluation.text.pieces import (
    Scores,
    evaluate_checkpoint,
    evaluate_stitched,
    evaluate_text,
)
from upcycle_core.evaluation.text.scores import (
    Score,
    intervals,
    per_reference_token,
)
from upcycle_core.progress import Progress

HELDOUT = "heldout.parquet"


def scores_of(name: str, function: Callable[..., Scores], /, **arguments: Any) -> Piece:
    """A piece that scores one model on each text apart: what is known of it is not computed."""
    return Piece(name=name, function=function, arguments=arguments, each=("corpora",))


def dense_piece(
    *, out: Path, progress: Progress, model: Path, room: Room | None = None, **common: Any
) -> Scores:
    """The piece: one checkpoint as it is."""
    register_architectures()
    common["streamed"] = _folder(room, out, model, common)
    return evaluate_checkpoint(model, progress=progress, **common)


def average_piece(
    *,
    out: Path,
    progress: Progress,
    experts: Sequence[Path],
    room: Room | None = None,
    **common: Any,
) -> Scores:
    """The piece: the average of all experts' weights, MLPs included.

    It lies beside ``out``, which a kill takes along: written anew it would be another model to what
    the kill left of its layers.
    """
    average = out.with_name(f"{out.name}.average")
    if not average.exists():
        shutil.rmtree(out, ignore_errors=True)
        write_average([CheckpointReader(path) for path in experts], out, max_shard_bytes=10**9)
        out.rename(average)
    common["streamed"] = _folder(room, out, average, common)
    scores = evaluate_checkpoint(average, progress=progress, **common)
    shutil.rmtree(average)
    return scores


def oracle_piece(
    *,
    out: Path,
    progress: Progress,
    backbone: Path,
    experts: Mapping[str, Path],
    corpora: Mapping[str, Path],
    room: Room | None = None,
    **common: Any,
) -> Scores:
    """The piece: every domain's tokens through its own expert."""
    scores: Scores = {}
    for domain, expert in experts.items():
        # A folder each: what a kill left of a later one outlives those that are scored again.
        common["streamed"] = _folder(room, out.with_name(f"{out.name}.{domain}"), expert, common)
        text = {domain: corpora[domain]}
        scores |= evaluate_stitched(backbone, expert, text, progress=progress, **common)
    return scores


def champion_piece(**arguments: Any) -> dict[str, float]:
    """The piece: another model's perplexity on this text, per token of this run's tokenizer."""
    return perplexities(stranger_piece(**arguments))


def stranger_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    tokenizer: Path,
    documents: Mapping[str, Path],
    corpora: Mapping[str, Path],
    reference: Mapping[str, Mapping[str, Any]],
    bos: Bos,
    room: Room | None = None,
    **common: Any,
) -> Scores:
    """The piece: another model's scores on this text, in tokens of this run's tokenizer.

    ``documents`` are the files of the held-out text, ``corpora`` its tokens; of ``reference`` all
    but the losses is read: with the tokens of each document, scores of documents are told.

    Raises:
        InputError: Responses alone are counted, and the tokenizers differ.
    """
    register_architectures()
    common["streamed"] = _folder(room, out, model, common)
    if vocabulary_fingerprint(model) == vocabulary_fingerprint(tokenizer):
        return evaluate_checkpoint(model, corpora, progress=progress, **common)
    if common["config"].loss == "responses":
        # A template writes more than is said, so that bytes do not tell how much text was read.
        remedy = f"{model} has another tokenizer, and responses are compared in one alone; use all"
        raise InputError(Fault("evaluation.loss", "responses", remedy))
    parts = {d: scored_text(TokenCorpus(path), common["config"]) for d, path in corpora.items()}
    scores = evaluate_text(model, documents, bos=bos, parts=parts, progress=progress, **common)
    own = {d: Score.from_dict({"nll": 0.0, **values}) for d, values in reference.items()}
    return {
        domain: per_reference_token(Score.from_dict(score), own[domain]).to_dict()
        for domain, score in scores.items()
    }


def _folder(room: Room | None, out: Path, model: Path, common: Mapping[str, Any]) -> Path | None:
    """Where hidden states lie, of a model that is not held."""
    config, device = common["config"], common["device"]
    return scoring_folder(room, out, model, config=config, device=device)


def perplexities(scores: Scores) -> dict[str, float]:
    """{domain: perplexity} of what a piece has measured."""
    return {domain: Score.from_dict(score).perplexity for domain, score in scores.items()}


def score_intervals(
    rows: Mapping[str, Scores], experts: Scores
) -> dict[str, dict[str, tuple[float, float]]]:
    """{row: {domain or "average": low and high}} of what was measured; see ``intervals``."""
    read = {
        row: {domain: Score.from_dict(score) for domain, score in scores.items()}
        for row, scores in rows.items()
    }
    return intervals(read, {domain: Score.from_dict(score) for domain, score in experts.items()})


def heldout_file(domain: str) -> str:
    """A domain's held-out text, below the workspace: new text to train on leaves it as it is."""
    return f"documents/{domain}/{HELDOUT}"


def reference_of(scores: Scores) -> dict[str, dict[str, Any]]:
    """What ``stranger_piece`` reads of a model's scores: all but its losses, which may be others
    where the counts are the same."""
    found: dict[str, dict[str, Any]] = {}
    for domain, score in scores.items():
        own = Score.from_dict({"nll": 0.0, **score})
        counted = own.document_tokens
        found[domain] = replace(own, nll=0.0, document_nll=(0.0,) * len(counted)).to_dict()
    return found


def counts(scores: Scores) -> dict[str, dict[str, float]]:
    """{domain: scored tokens and bytes}: the same of every model with the same tokenizer."""
    return {d: {"tokens": score["tokens"], "bytes": score["bytes"]} for d, score in scores.items()}


def heldout_arguments(run: StageRun) -> dict[str, Any]:
    """What a piece that scores a model on the held-out text is given, held or layer by layer."""
    return {**held_arguments(run), "room": room_of(run.recipe.compute, "evaluation")}


def held_arguments(run: StageRun) -> dict[str, Any]:
    """The same of a model that is held whole."""
    return {
        "corpora": {d: run.path(f"corpora/{d}/heldout") for d in run.recipe.domains},
        "config": run.recipe.evaluation.measuring,
        "device": run.device("evaluation"),
    }
