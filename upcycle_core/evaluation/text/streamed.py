"""Perplexity and routing layer by layer: of a model that is not held.

Losses and counts are those of the model that is held, bit for bit. All ways in which a model is
scored, and all texts, go through a layer while it is there.

Shapes: N scored tokens, H hidden size, V vocabulary, D experts, L layers.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise, starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from upcycle_core.activations.stream import LayerStream
from upcycle_core.activations.walk import Text, Through, Walk
from upcycle_core.architectures.families import STOCK_MOES, family_of
from upcycle_core.backbone.stitch import open_stitched, stitched_reader
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.batches import Batch, Paragraphs, paragraph_batches
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.perplexity import (
    finite_sum,
    losses_of,
    scored_paragraphs,
    summed,
)
from upcycle_core.evaluation.text.scores import Score
from upcycle_core.moe.inspect import (
    force_expert,
    record_routing,
    routers_of,
    set_routers,
    set_top_k,
)
from upcycle_core.precision import chosen, weights_type
from upcycle_core.progress import Progress, Silent

Scores = dict[str, dict[str, float]]
"""{domain: what ``Score.to_dict`` gives}"""
Way = Callable[[int, nn.Module], AbstractContextManager[Tensor | None]]
"""How a model is scored: given a layer, entered while a text goes through it; may yield a count
[D] that grows with the tokens each expert receives."""


@dataclass(frozen=True)
class Streamed:
    """What came of a text on one way.

    Args:
        score: Its losses.
        counts: [L][D], tokens that each layer sent to each expert; empty where nothing was counted.
    """

    score: Score
    counts: list[list[int]]


@dataclass(frozen=True)
class _Read:
    """A text as it is scored."""

    corpus: TokenCorpus
    pieces: Paragraphs
    batches: list[Batch]

    @classmethod
    def of(cls, directory: Path, config: EvaluationConfig) -> "_Read":
        corpus = TokenCorpus(directory)
        pieces = scored_paragraphs(corpus, config)
        batches = paragraph_batches(corpus, pieces, config.batch_size, count=config.loss)
        return cls(corpus, pieces, list(batches))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A MoE as it is to be scored.

    Args:
        routers: {layer: W [H, D]}; layers that are not named keep the router they were saved with.
        top_k: Experts a token passes through; the saved number by default.
    """

    routers: Mapping[int, Tensor] = field(default_factory=dict)
    top_k: int | None = None


class Streaming:
    """A model that is scored layer by layer: ``evaluation.text.pieces`` says what is returned.

    Args:
        stream: The model.
        folder: Where hidden states lie meanwhile; a call that was killed goes on at its layer.
        name: How errors name the model.
    """

    def __init__(self, stream: LayerStream, folder: Path, name: str) -> None:
        self._stream, self._folder, self._name = stream, folder, name

    @classmethod
    def of(
        cls, directory: Path, config: EvaluationConfig, device: str, folder: Path
    ) -> "Streaming":
        """A checkpoint: a dense model of a family that is known, or the stock MoE of its experts.

        Raises:
            InputError: It is another.
        """
        reader = CheckpointReader(directory, field="model")
        kind = reader.config.get("model_type")
        if kind not in STOCK_MOES:
            family_of(reader.config)
        read = None if kind in STOCK_MOES else reader.tensor
        dtype = weights_type(config.precision, device)
        stream = LayerStream(directory, read, dtype=dtype, device=device)
        return cls(stream, folder, str(directory))

    @classmethod
    def of_stitched(
        cls, backbone: Path, expert: Path, config: EvaluationConfig, device: str, folder: Path
    ) -> "Streaming":
        """A backbone with one expert's FFNs.

        Raises:
            InputError: They do not fit each other.
        """
        shared, own = open_stitched(backbone, expert)
        read = stitched_reader(family_of(shared.config), own, shared)
        dtype = weights_type(config.precision, device)
        stream = LayerStream(backbone, read, dtype=dtype, device=device, beside=[expert])
        return cls(stream, folder, str(expert))

    def plain(
        self, corpora: Mapping[str, Path], config: EvaluationConfig, progress: Progress | None
    ) -> Scores:
        """The model as it is."""

        def as_it_is(_index: int, _layer: nn.Module) -> AbstractContextManager[None]:
            return nullcontext()

        ways = {"": dict.fromkeys(corpora, as_it_is)}
        return _scores(self._scored(corpora, ways, config, progress)[""])

    def own_experts(
        self,
        experts: Mapping[str, int],
        corpora: Mapping[str, Path],
        config: EvaluationConfig,
        progress: Progress | None,
    ) -> Scores:
        """Each domain with all its tokens sent to one expert."""

        def forced(expert: int) -> Way:
            return lambda _index, layer: force_expert(layer, expert)

        texts = {domain: corpora[domain] for domain in experts}
        ways = {"": {domain: forced(expert) for domain, expert in experts.items()}}
        return _scores(self._scored(texts, ways, config, progress, key=experts)[""])

    def variants(
        self,
        variants: Mapping[str, Variant],
        corpora: Mapping[str, Path],
        config: EvaluationConfig,
        progress: Progress | None,
    ) -> dict[str, dict[str, Any]]:
        """The MoE with several routers or several k, with what routers chose."""
        ways = {name: dict.fromkeys(corpora, self._routed(v)) for name, v in variants.items()}
        key = {name: [_digest(v.routers), v.top_k] for name, v in variants.items()}
        passed = self._scored(corpora, ways, config, progress, key=key)
        return {
            name: {
                "scores": _scores(own),
                "routing": {domain: found.counts for domain, found in own.items()},
            }
            for name, own in passed.items()
        }

    def _routed(self, variant: Variant) -> Way:
        model, saved_k = self._stream.model, self._stream.model.config.num_experts_per_tok

        @contextmanager
        def enter(index: int, layer: nn.Module) -> Iterator[Tensor]:
            [gate] = routers_of(layer)
            saved_HD = gate.weight.detach().T.clone()
            set_routers(layer, {0: variant.routers.get(index, saved_HD)})
            set_top_k(model, variant.top_k or saved_k)
            with record_routing(model) as counts_LD:
                yield counts_LD[index]
            set_routers(layer, {0: saved_HD})

        return enter

    def _scored(
        self,
        corpora: Mapping[str, Path],
        ways: Mapping[str, Mapping[str, Way]],
        config: EvaluationConfig,
        progress: Progress | None,
        *,
        key: Any = None,
    ) -> dict[str, dict[str, Streamed]]:
        what = f"evaluating {', '.join(corpora)}{chosen(config.precision, self._stream.device)}"
        common: dict[str, Any] = {"folder": self._folder, "name": self._name, "what": what}
        return score_streamed(
            self._stream, corpora, ways, config=config, progress=progress, key=key, **common
        )


def _scores(passed: Mapping[str, Streamed]) -> Scores:
    return {domain: found.score.to_dict() for domain, found in passed.items()}


def _digest(routers: Mapping[int, Tensor]) -> str:
    """sha256 of routers {layer: W [H, D]}."""
    found = hashlib.sha256()
    for layer, router_HD in sorted(routers.items()):
        found.update(f"{layer} {router_HD.dtype}".encode())
        found.update(router_HD.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def score_streamed(
    stream: LayerStream,
    corpora: Mapping[str, Path],
    ways: Mapping[str, Mapping[str, Way]],
    *,
    config: EvaluationConfig,
    folder: Path,
    name: str,
    key: Any = None,
    progress: Progress | None = None,
    what: str = "evaluating",
) -> dict[str, dict[str, Streamed]]:
    """Score texts on several ways.

    Args:
        stream: The model.
        corpora: {domain: its split's directory}.
        ways: {variant: {domain: how its text goes}}.
        config: How texts are cut and how much of them is scored.
        folder: Where hidden states lie meanwhile; a call that was killed goes on at its layer.
        name, what: How errors name the model, and progress all of this.
        key: What ``ways`` are made of, as JSON holds it: a killed call of others does not go on.
        progress: Told of tokens, each through a layer.

    Returns:
        {variant: {domain: what came of it}}.

    Raises:
        InputError: No token to score, or a loss that is not finite.
    """
    texts = {domain: _Read.of(path, config) for domain, path in corpora.items()}
    courses = [(variant, domain) for variant, own in ways.items() for domain in own]
    ends = list(accumulate((len(texts[domain].batches) for _, domain in courses), initial=0))
    numbers = dict(zip(courses, starmap(range, pairwise(ends)), strict=True))
    batches = [batch for _, domain in courses for batch in texts[domain].batches]
    tokens = [int(batch.attention_mask.sum()) for batch in batches]
    told = progress or Silent()
    told.start(f"{what}, layer by layer", stream.layers * sum(tokens), "tokens of a layer")

    def visit(index: int, layer: nn.Module, through: Through) -> list[list[int]]:
        counts = []
        for variant, domain in courses:
            with ways[variant][domain](index, layer) as counts_D:
                for number in numbers[variant, domain]:
                    through(number)
                    told.advance(tokens[number])
                counts.append([] if counts_D is None else counts_D.tolist())
        return counts

    passing = (Text(batch.input_ids, batch.attention_mask) for batch in batches)
    walk = Walk(stream, [*passing], folder, key=[name, courses, key])
    counts = walk.go(visit)
    losses = _losses(stream, walk, batches, name)
    found: dict[str, dict[str, Streamed]] = {variant: {} for variant in ways}
    for (variant, domain), sent in zip(courses, zip(*counts, strict=True), strict=True):
        text = texts[domain]
        score = summed(islice(losses, len(text.batches)), text.corpus, text.pieces, config)
        found[variant][domain] = Streamed(score, list(sent) if all(sent) else [])
    walk.close()
    return found


def _losses(
    stream: LayerStream, walk: Walk, batches: list[Batch], name: str
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch with its losses, [N] fp64."""
    norm, head_VH = stream.final_norm(), stream.head()
    for batch, hidden_BSH in zip(batches, walk.ends(), strict=True):
        with torch.inference_mode():  # which who reads them is not in
            losses_N = losses_of(
                norm(hidden_BSH), batch, lambda h_NH: functional.linear(h_NH, head_VH)
            )
            finite_sum(losses_N, name)
        yield batch, losses_N
