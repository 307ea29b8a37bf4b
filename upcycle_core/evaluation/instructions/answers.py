"""Answers of a model to instructions: greedy, and in fp32 the same for any batch size.

B rows, S tokens of the longest prompt in the batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from upcycle_core.architectures.resolve import stretched
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.conversations import without_thoughts
from upcycle_core.corpora.encoding import answer_ends
from upcycle_core.corpora.instructions import UNKNOWN_TASK, encode_prompt, response_opening
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.precision import Precision, chosen, weights_type
from upcycle_core.progress import Progress, Silent

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """What a model said.

    Args:
        texts: One a row, without special tokens and without white space around it.
        truncated: Prompts that lost tokens from the left.
    """

    texts: list[str]
    truncated: int


class Prompts(NamedTuple):
    """Encoded prompts.

    Args:
        ids: One list of token ids a row, none empty.
        truncated: How many lost tokens from the left.
    """

    ids: list[list[int]]
    truncated: int


class Batch(NamedTuple):
    """Prompts of similar length, padded on the left.

    Args:
        places: Which rows they are.
        input_BS: Token ids.
        mask_BS: 1 on prompts, 0 on padding.
    """

    places: list[int]
    input_BS: Tensor
    mask_BS: Tensor


def answer(
    model_dir: Path,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    batch_size: int = 16,
    precision: Precision = "fp32",
    device: str = "cpu",
    max_prompt_tokens: int | None = None,
    bos: Bos = "auto",
    progress: Progress | None = None,
) -> Answers:
    """Answer every row's prompt: the likeliest token each time, up to the end token.

    Prompts are written as in training, see ``corpora.instructions``. In fp32 what a row is batched
    with does not change its answer. The longest rows come first.

    Args:
        model_dir: A causal checkpoint with its tokenizer. A package of its own architecture must be
            imported before.
        rows: Each with ``prompt``; with ``task`` where a SIMoE model routes by task.
        max_new_tokens: Longest answer.
        batch_size: B.
        precision: Of weights and arithmetic.
        device: Where the model runs.
        max_prompt_tokens: Longer prompts lose tokens from the left; by default what the model's
            context leaves beside an answer.
        bos: As the rows' that it was tuned on.
        progress: Hears of every row.

    Raises:
        InputError: A row has no prompt, no room is left for prompts, or the tokenizer's fault (see
            ``encode_prompt``).
    """
    raise_faults(_faults(rows, max_new_tokens, batch_size))
    dtype = weights_type(precision, device)
    model: Any = load_causal_lm(model_dir, dtype=dtype, device=device)
    tokenizer: Any = load_tokenizer(model_dir)
    if max_prompt_tokens is None:
        max_prompt_tokens = _room(model.config, max_new_tokens)
    prompts = encode_prompts(tokenizer, rows, max_prompt_tokens=max_prompt_tokens, bos=bos)
    ends = answer_ends(tokenizer, model, chat=bool(tokenizer.chat_template))
    opening = response_opening(tokenizer) if tokenizer.chat_template else ""
    model.generation_config = _greedy(max_new_tokens, ends)
    texts, progress = [""] * len(rows), progress or Silent()
    progress.start(f"answering{chosen(precision, device)}", len(rows), "prompts")
    for batch in batches(prompts.ids, batch_size=batch_size, pad_id=ends[0], device=device):
        more = task_ids(model.config, [rows[place] for place in batch.places], device)
        with torch.inference_mode():
            out_BT = model.generate(batch.input_BS, attention_mask=batch.mask_BS, **more)
        new_BT = out_BT[:, batch.input_BS.shape[1] :]
        for place, ids in zip(batch.places, new_BT.tolist(), strict=True):
            said = list(takewhile(lambda token: token not in ends, ids))
            texts[place] = _said(tokenizer.decode(said, skip_special_tokens=True), opening)
        progress.advance(len(batch.places))
    return Answers(texts, prompts.truncated)


def _greedy(max_new_tokens: int, ends: list[int]) -> GenerationConfig:
    """Sampling, penalties and the like that a checkpoint may ask for would not be greedy."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )


def _said(text: str, opening: str) -> str:
    """What an answer says: without what the template opens it with, and behind its thoughts."""
    return without_thoughts(text.strip().removeprefix(opening))


def encode_prompts(
    tokenizer: Any, rows: Sequence[Row], *, max_prompt_tokens: int, bos: Bos = "auto"
) -> Prompts:
    """Prompts as token ids, as training rows have them before their responses.

    Args:
        tokenizer: The model's.
        rows: Each with ``prompt``, or with the messages ``asked`` where others than a user speak.
        max_prompt_tokens: What is longer loses tokens from the left.
        bos: As for ``encode_prompt``.
    """
    asked = [row.get("asked") or row["prompt"] for row in rows]
    found = [encode_prompt(tokenizer, one, max_tokens=max_prompt_tokens, bos=bos) for one in asked]
    return Prompts([prompt.ids for prompt in found], sum(prompt.cut > 0 for prompt in found))


def batches(
    ids: Sequence[Sequence[int]], *, batch_size: int, pad_id: int, device: str
) -> Iterator[Batch]:
    """Rows by length, longest first: what does not fit the memory fails at once."""
    order = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        rows = [torch.tensor(ids[place]) for place in places]
        input_BS = padded(rows, padding_value=pad_id)
        mask_BS = padded([torch.ones_like(row) for row in rows])
        yield Batch(places, input_BS.to(device), mask_BS.to(device))


def task_ids(config: Any, rows: Sequence[Row], device: str) -> dict[str, Tensor]:
    """What a model that routes by task must be told; nothing for others.

    Returns:
        ``task_ids`` [B] int64: each row's task's place among the trained ones, -1 for another.
    """
    if getattr(config, "routing", None) != "task":
        return {}
    known = {name: place for place, name in enumerate(config.tasks)}
    found = [known.get(row.get("task"), UNKNOWN_TASK) for row in rows]
    return {"task_ids": torch.tensor(found, device=device)}


def positions(config: Any) -> int:
    """Tokens that a loaded model was made for, beyond ``max_position_embeddings`` where its rope is
    stretched."""
    rope = getattr(config, "rope_parameters", None) or {}
    return stretched(config.max_position_embeddings, rope)


def _room(config: Any, max_new_tokens: int) -> int:
    longest = positions(config)
    room = longest - max_new_tokens
    if room < 1:
        remedy = f"the model holds {longest} tokens; leave room for a prompt"
        raise_faults([Fault("max_new_tokens", max_new_tokens, remedy)])
    return room


def _faults(rows: Sequence[Row], max_new_tokens: int, batch_size: int) -> list[Fault]:
    faults = [] if rows else [Fault("rows", 0, "nothing to answer; give at least one prompt")]
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            faults.append(Fault(name, value, "use at least 1"))
    for place, row in enumerate(rows):
        prompt = row.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            remedy = "must be text that is not empty; fill it or remove the row"
            faults.append(Fault(f"rows[{place}].prompt", prompt, remedy))
    return faults
