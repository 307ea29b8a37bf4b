"""What a model answers to prompts that its own experts wrote, and how far a reader is from it.

P prompts, V vocabulary.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from upcycle_core.errors import InputError
from upcycle_core.moe.inspect import force_expert, routers_of

START_TOKENS = 1
SEED = 0


@dataclass(frozen=True)
class Answers:
    """What follows each prompt.

    Args:
        first: Logarithms of the probabilities of the next token [P, V], fp32.
        greedy: The ids that follow, of each prompt.
        margins: By how much the likeliest token leads at each of them, in nats.
    """

    first: torch.Tensor
    greedy: list[list[int]]
    margins: list[list[float]]


@dataclass(frozen=True)
class Distance:
    """How far a reader's answers are from ours.

    Args:
        logits: Largest difference of ``first``, in nats.
        typical: Median over prompts of each one's largest: a token that a router sends elsewhere
            for a rounded weight changes one prompt, and says nothing of the others.
        equal: Greedy tokens up to the first that differs, over all prompts.
        tokens: Of how many.
        difference: Prompt, token and our margin where the first one differs.
    """

    logits: float
    typical: float
    equal: int
    tokens: int
    difference: tuple[int, int, float] | None


def write_prompts(model: Any, *, length: int, specials: Collection[int]) -> list[list[int]]:
    """One prompt from each expert, sampled while every token goes through it: its own domain.

    A model without routers writes two.

    Args:
        model: A causal language model.
        length: Tokens of a prompt.
        specials: Ids that no prompt may hold; the first of them, by number, begins the writing.
    """
    _ask_plainly(model)
    start = min(specials, default=0)
    banned = [[token] for token in sorted(specials)] or None
    prompts = []
    for index, forced in enumerate(_writers(model)):
        torch.manual_seed(SEED + index)
        with forced, torch.inference_mode():
            ids_1S = torch.tensor([[start]], device=model.device)
            written = model.generate(
                ids_1S,
                attention_mask=torch.ones_like(ids_1S),
                do_sample=True,
                min_new_tokens=length,
                max_new_tokens=length,
                bad_words_ids=banned,
                pad_token_id=start,
            )
        prompts.append(written[0, START_TOKENS:].tolist())
    return prompts


def _writers(model: Any) -> Iterator[AbstractContextManager[None]]:
    try:
        experts = routers_of(model)[0].weight.shape[0]
    except InputError:
        yield from (nullcontext(), nullcontext())
        return
    for index in range(experts):
        yield force_expert(model, index)


def _ask_plainly(model: Any) -> None:
    """Drop what a checkpoint says of generation: readers are asked without its penalties, its
    sampling and its end tokens."""
    from transformers import GenerationConfig  # slow to import

    model.generation_config = GenerationConfig()


def ours(model: Any, prompts: Iterable[Sequence[int]], *, tokens: int) -> Answers:
    """Our own answers, past any end of text."""
    _ask_plainly(model)
    first, greedy, margins = [], [], []
    for prompt in prompts:
        ids_1S = torch.tensor([list(prompt)], device=model.device)
        with torch.inference_mode():
            said = model.generate(
                ids_1S,
                attention_mask=torch.ones_like(ids_1S),
                do_sample=False,
                max_new_tokens=tokens,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        steps_TV = torch.log_softmax(torch.cat(said.logits).float().cpu(), -1)
        best_T2 = steps_TV.topk(2).values
        first.append(steps_TV[0])
        greedy.append(said.sequences[0, len(prompt) :].tolist())
        margins.append((best_T2[:, 0] - best_T2[:, 1]).tolist())
    return Answers(torch.stack(first), greedy, margins)


def distance(
    mine: Answers, first: torch.Tensor, greedy: Sequence[Sequence[int]], *, ends: Collection[int]
) -> Distance:
    """Compare a reader's answers with ours.

    Args:
        mine: Ours.
        first: The reader's [P, V].
        greedy: The reader's ids of each prompt.
        ends: Special tokens: some readers stop there, so that nothing behind one is compared.
    """
    equal = tokens = 0
    difference = None
    for prompt, (own, theirs) in enumerate(zip(mine.greedy, greedy, strict=True)):
        length = next((i for i, token in enumerate(own) if token in ends), len(own))
        same = next((i for i in range(length) if list(theirs[i : i + 1]) != own[i : i + 1]), length)
        equal, tokens = equal + same, tokens + length
        if same < length and difference is None:
            difference = (prompt, same, mine.margins[prompt][same])
    typical = moves(mine.first, first).median()
    return Distance(moved(mine.first, first), float(typical), equal, tokens, difference)


def moved(first: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference of two answers [P, V], in nats; what ``other`` has beyond V is padding."""
    return float(moves(first, other).max())


def moves(first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Largest difference of the answers to each prompt [P], in nats."""
    return (first - other[:, : first.shape[1]]).abs().amax(1)
