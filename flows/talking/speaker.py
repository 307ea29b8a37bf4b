"""A loaded model that answers questions and says of every token which experts made it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flows.running.registered import context, room
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.encoding import answer_ends, asked
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.moe.trace import Routing, Through, Token, trace

Event = dict[str, Any]
SEEDS = 2**32
TOKENS = 120
"""New tokens, unless the page asks for others."""
HOTTEST = 5.0


@dataclass(frozen=True)
class Question:
    """What a page asks.

    Args:
        prompt: Text to continue; with ``chat`` what a user says, to be answered.
        chat: Whether the chat template writes it.
        tokens: At most this many new tokens.
        temperature: 0 is greedy.
        seed: Of the draws.
        through: Where tokens go: ``routers``, ``average`` or an expert's number.
    """

    prompt: str
    chat: bool = False
    tokens: int = TOKENS
    temperature: float = 0.7
    seed: int = 0
    through: Through = "routers"

    @classmethod
    def read(cls, values: object) -> "Question":
        """That of a request.

        Raises:
            InputError: With every field that cannot be used.
        """
        if not isinstance(values, dict):
            raise InputError(Fault("question", values, "must be a JSON object"))
        checks: Mapping[str, tuple[Callable[[Any], bool], str]] = {
            "prompt": (_is_text, "is empty; write something"),
            "chat": (lambda v: isinstance(v, bool), "must be true or false"),
            "tokens": (lambda v: _is_whole(v) and v >= 1, "must be a whole number, at least 1"),
            "temperature": (
                lambda v: _is_number(v) and 0 <= v <= HOTTEST,
                f"must be a number from 0 (greedy) to {HOTTEST:g}",
            ),
            "seed": (lambda v: _is_whole(v) and 0 <= v < SEEDS, "must be from 0 to 4294967295"),
            "through": (
                lambda v: v in ("routers", "average") or _is_whole(v),
                "must be routers, average or an expert's number",
            ),
        }
        given = {"prompt": "", **values}
        unknown = [Fault(key, given[key], "no such field") for key in given.keys() - checks.keys()]
        raise_faults(
            [
                *unknown,
                *(
                    Fault(key, given[key], remedy)
                    for key, (is_right, remedy) in checks.items()
                    if key in given and not is_right(given[key])
                ),
            ]
        )
        return cls(**given)


@dataclass(frozen=True)
class Speaker:
    """A model, and what the page says about it.

    Args:
        model: Loaded.
        tokenizer: Its tokenizer.
        name: Of the registered model, and its version.
        bos: What stands before a text.
        names: Of the experts, in their order.
        prompts: (domain, prompt) for people to begin with.
    """

    model: Any
    tokenizer: Any
    name: str
    bos: Bos
    names: Sequence[str]
    prompts: Sequence[tuple[str, str]]

    def about(self) -> Event:
        """What the page has to know before anything is asked."""
        routing, config = Routing.of(self.model), self.model.config
        return {
            "name": self.name,
            "architecture": type(self.model).__name__.removesuffix("ForCausalLM"),
            "routing": routing.by,
            "layers": routing.layers,
            "experts": list(self.names),
            "chosen": getattr(config, "num_experts_per_tok", None),
            "averages": self._averages(routing),
            "chat": bool(self.tokenizer.chat_template),
            "context": context(self.model),
            "hottest": HOTTEST,
            "prompts": [{"domain": domain, "prompt": prompt} for domain, prompt in self.prompts],
            "defaults": {
                name: field.default
                for name, field in Question.__dataclass_fields__.items()
                if name in ("tokens", "temperature", "seed")
            },
        }

    def answer(
        self, question: Question, take: Callable[[Event], None], is_stopped: Callable[[], bool]
    ) -> None:
        """Answer, telling of everything as it comes.

        Args:
            question: What is asked.
            take: Called with ``token`` events, and with ``ended`` at last.
            is_stopped: Whether nobody waits for the answer any more.

        Raises:
            InputError: The prompt is longer than the model's context, there is no such expert, or
                the tokenizer has no chat template.
        """
        ids = asked(self.tokenizer, question.prompt, bos=self.bos, chat=question.chat)
        left = room(self.model, question.prompt, ids)
        tokens = question.tokens if left is None else min(question.tokens, left)
        count, start = 0, time.monotonic()

        def tell(token: Token) -> None:
            nonlocal count
            count += not token.is_given
            layers = _parts(token.shares)
            take({"is": "token", "given": token.is_given, "text": token.text, "layers": layers})

        why: str = trace(
            self.model,
            self.tokenizer,
            ids,
            take=tell,
            is_stopped=is_stopped,
            through=question.through,
            tokens=tokens,
            temperature=question.temperature,
            seed=question.seed,
            ends=answer_ends(self.tokenizer, self.model, chat=True) if question.chat else None,
        )
        if why == "length" and tokens < question.tokens:
            why = "context"
        seconds = round(time.monotonic() - start, 2)
        take({"is": "ended", "why": why, "tokens": count, "seconds": seconds})

    def _averages(self, routing: Routing) -> bool:
        """Whether there is a mean of the experts: not of DeRS, which stores them as deltas."""
        return routing.by != "none" and not hasattr(self.model.config, "deltas")


def expert_names(routing: Routing, domains: Sequence[str]) -> list[str]:
    """The experts' domains, if each has one, or else numbers."""
    if routing.by == "layer" and len(domains) == routing.experts:
        return list(domains)
    return [f"expert {number + 1}" for number in range(routing.experts)]


def _parts(shares_LD: Tensor) -> list[list[tuple[int, float]]]:
    """Of each layer (expert, share) of those that had a part."""
    return [
        [(expert, round(share, 3)) for expert, share in enumerate(row) if share > 0]
        for row in shares_LD.tolist()
    ]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
