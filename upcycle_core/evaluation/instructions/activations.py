"""What a SIMoE model's router makes of prompts: mean expert coefficients by task (Fig. 2).

B rows, M experts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.config import Bos
from upcycle_core.errors import Fault, InputError
from upcycle_core.evaluation.instructions.answers import (
    Batch,
    Row,
    batches,
    encode_prompts,
    positions,
    task_ids,
)
from upcycle_core.plain import Plain
from upcycle_core.precision import Precision, weights_type
from upcycle_core.progress import Progress, Silent

By = Literal["task", "category"]


@dataclass(frozen=True, kw_only=True)
class Activation(Plain):
    """The mean coefficients of one task's prompts.

    Args:
        name: The task or category.
        domain: Where it belongs; "" if that is not known.
        coefficients: [M] means of alpha; they sum to 1.
        count: Prompts.
    """

    name: str
    domain: str
    coefficients: tuple[float, ...]
    count: int

    @property
    def label(self) -> str:
        """``domain: name``, as in the paper's Fig. 2."""
        return f"{self.domain}: {self.name}" if self.domain else self.name


@dataclass(frozen=True, kw_only=True)
class Use(Plain):
    """How a model's prompts share its experts, over all of them.

    Args:
        effective: exp(H(mean alpha)), 1 to M: experts, if they were used alike.
        apart: Of the entropy of mean alpha, the share in nats that tasks explain: 0 where every
            task's mean coefficients are the same, log M where each has experts of its own.
        leading: The largest mean coefficient.
        unused: Experts that no task gives more than ``UNUSED``, from 1.
        tasks: How many there are.
    """

    effective: float
    apart: float
    leading: float
    unused: tuple[int, ...]
    tasks: int = 1

    @classmethod
    def of(cls, activations: Sequence[Activation]) -> "Use":
        """What the means of tasks say, each weighed by its prompts."""
        prompts = sum(own.count for own in activations)
        shares = [own.count / prompts for own in activations]
        columns = list(zip(*(own.coefficients for own in activations), strict=True))
        means = [
            sum(s * alpha for s, alpha in zip(shares, column, strict=True)) for column in columns
        ]
        within = sum(
            s * _entropy(own.coefficients) for s, own in zip(shares, activations, strict=True)
        )
        return cls(
            effective=math.exp(_entropy(means)),
            apart=_entropy(means) - within,
            leading=max(means),
            unused=tuple(n for n, column in enumerate(columns, 1) if max(column) <= UNUSED),
            tasks=len(activations),
        )

    def warnings(self, *, by_token: bool = False) -> list[str]:
        """What is no mixture, and what may be done about it.

        Args:
            by_token: Whether each token has a mixture of its own; tasks' means then say nothing.
        """
        found = []
        if self.leading > COLLAPSED:
            found.append(
                f"one expert has {100 * self.leading:.1f} % of the coefficients: it is no mixture; "
                "what may help: docs/simoe.md, Choices"
            )
        if not by_token and self.leading <= COLLAPSED and self.tasks > 1 and self.apart < ALIKE:
            found.append(
                f"all {self.tasks} tasks use the experts alike, apart by {self.apart:.4f} nats: "
                "the router tells none from another; what may help: docs/simoe.md, Choices"
            )
        if self.unused:
            names = ", ".join(map(str, self.unused))
            found.append(f"no task uses the experts {names}; their parameters stay in the file")
        return found


COLLAPSED = 0.9
"""Mean coefficient of one expert above which the others do nothing."""
ALIKE = 0.005
"""Nats that tasks explain of the coefficients' entropy below which the router does not choose."""
UNUSED = 0.01
"""Mean coefficient of a task up to which it does not use an expert."""


def _entropy(shares: Sequence[float]) -> float:
    """In nats."""
    return -sum(share * math.log(share) for share in shares if share > 0)


def expert_activations(
    model_dir: Path,
    rows: Sequence[Row],
    *,
    by: By = "task",
    batch_size: int = 16,
    precision: Precision = "fp32",
    device: str = "cpu",
    max_prompt_tokens: int | None = None,
    bos: Bos = "auto",
    progress: Progress | None = None,
) -> list[Activation]:
    """Mean coefficients alpha of every task's, or category's, prompts.

    Where each token has coefficients of its own, a prompt's are the mean over its tokens.

    Args: as ``answers.answer``, but for

        model_dir: A SIMoE checkpoint with its tokenizer; ``upcycle_core.simoe.model`` must be
            imported before.
        rows: Each with ``prompt``, ``task``, ``category``, and ``domain`` where known.
        by: What prompts are averaged over.
        max_prompt_tokens: By default what the model's context holds.

    Returns:
        One a domain and task, sorted by both.

    Raises:
        InputError: The model has no expert coefficients, or no row is given.
    """
    if not rows:
        raise InputError(Fault("rows", 0, "nothing to route; give at least one prompt"))
    dtype = weights_type(precision, device)
    model: Any = load_causal_lm(model_dir, dtype=dtype, device=device)
    if not hasattr(model, "coefficients"):
        remedy = "it has no expert coefficients; give a SIMoE model"
        raise InputError(Fault("model", str(model_dir), remedy))
    tokenizer = load_tokenizer(model_dir)
    longest = max_prompt_tokens or positions(model.config)
    prompts = encode_prompts(tokenizer, rows, max_prompt_tokens=longest, bos=bos)
    progress = progress or Silent()
    progress.start("routing", len(rows), "prompts")
    found: dict[tuple[str, str], list[torch.Tensor]] = {}
    for batch in batches(prompts.ids, batch_size=batch_size, pad_id=0, device=device):
        own = [rows[place] for place in batch.places]
        for row, alpha_M in zip(own, _coefficients(model, batch, own, device), strict=True):
            found.setdefault((row.get("domain") or "", row[by]), []).append(alpha_M)
        progress.advance(len(own))
    return [
        Activation(
            name=name,
            domain=domain,
            coefficients=tuple(torch.stack(alphas).mean(0).tolist()),
            count=len(alphas),
        )
        for (domain, name), alphas in sorted(found.items(), key=lambda item: item[0])
    ]


def _coefficients(model: Any, batch: Batch, rows: Sequence[Row], device: str) -> torch.Tensor:
    """[B, M] fp64 on the CPU."""
    more = task_ids(model.config, rows, device)
    with torch.inference_mode():
        alpha_BM = model.coefficients(batch.input_BS, attention_mask=batch.mask_BS, **more)
    if alpha_BM.dim() == 3:
        alpha_BM = _token_means(alpha_BM, batch.mask_BS)
    return alpha_BM.double().cpu()


def _token_means(alpha_BSM: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    """[B, M] means over each prompt's tokens, where every token has coefficients of its own."""
    weighted_BSM = alpha_BSM.double() * mask_BS[..., None]
    return weighted_BSM.sum(1) / mask_BS.sum(1, keepdim=True)
