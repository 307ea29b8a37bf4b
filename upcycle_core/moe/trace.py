"""Generate text and tell of every token which experts it went through, layer by layer.

transformers' own ``generate`` runs, key-value cache and sampling included; hooks look on.
S prompt tokens, L layers with experts, D experts, T tokens of a pass, k experts a token.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from upcycle_core.errors import Fault, InputError
from upcycle_core.moe.inspect import RouterOutput, average_experts, force_expert, routers_of

Through = int | Literal["routers", "average"]
"""Where tokens go: as the routers say, through one expert alone, or through the mean of all."""
Ending = Literal["end", "length", "stopped"]
WINDOW, KEPT = 24, 6
"""Tokens that are decoded together at most, nearly always, and those that are kept of them."""
UNFINISHED = "\ufffd"
"""What bytes decode to that are no character, or not yet."""


@dataclass(frozen=True)
class Routing:
    """How a model chooses experts.

    Args:
        by: ``layer``: each layer routes every token. ``prompt``, ``token``: one mixture of the
            experts in all layers (SIMoE), for a whole prompt or a token's own. ``none``: dense.
        layers: L; 1 where all layers share a mixture.
        experts: D.
    """

    by: Literal["layer", "prompt", "token", "none"]
    layers: int
    experts: int

    @classmethod
    def of(cls, model: Any) -> "Routing":
        """That of a loaded model."""
        if hasattr(model, "coefficients"):
            by: Any = "token" if model.config.routing == "token" else "prompt"
            return cls(by, 1, model.config.num_simoe_experts)
        try:
            routers = routers_of(model)
        except InputError:
            return cls("none", 0, 0)
        return cls("layer", len(routers), routers[0].weight.shape[0])


@dataclass(frozen=True)
class Token:
    """A token, and who had a part in it.

    Args:
        id: Its number in the vocabulary.
        text: What it adds to the text: nothing while a character's bytes are not complete.
        shares: [L, D] fp32 on the CPU, each row of sum one: the routing weights of the pass that
            made it; of a prompt's token, of the pass that read it. [0, 0] of a dense model.
        is_given: Whether it is of the prompt.
    """

    id: int
    text: str
    shares: Tensor
    is_given: bool


def trace(
    model: PreTrainedModel,
    tokenizer: Any,
    ids: Sequence[int],
    *,
    take: Callable[[Token], None],
    is_stopped: Callable[[], bool] = lambda: False,
    through: Through = "routers",
    tokens: int = 100,
    temperature: float = 0.7,
    seed: int = 0,
    ends: Collection[int] | None = None,
) -> Ending:
    """Continue ``ids``, telling of every token when it is there.

    The texts of the answer's tokens, joined, are the decoded answer without its special tokens;
    only where it was stopped may an unfinished character be missing.

    Args:
        model: A causal language model in evaluation mode, MoE or dense.
        tokenizer: Its tokenizer.
        ids: The prompt, S token ids.
        take: Called with every token: the prompt's when it has been read, then each new one.
        is_stopped: Asked in every layer with experts, and after every token.
        through: Where tokens go.
        tokens: At most this many new ones.
        temperature: 0 is greedy.
        seed: Of the draws.
        ends: Ids that end the answer; those that the model names by default.

    Returns:
        Why it ended: the model did (``end``), ``tokens`` were there (``length``), or ``stopped``.

    Raises:
        InputError: There is no such expert, or the model has no experts or none to average.
    """
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": float(temperature)}
    ids_1S = torch.tensor([list(ids)], device=model.device)
    own = _end_tokens(model) if ends is None else set(ends)
    with _sent(model, through), _watched(model, through, is_stopped) as passed:
        teller = _Teller(tokenizer, take, is_stopped, passed, limit=tokens, ends=own)
        torch.manual_seed(seed)
        try:
            model.generate(  # type: ignore[operator]  # it is typed as a tensor or module
                input_ids=ids_1S,
                attention_mask=torch.ones_like(ids_1S),
                max_new_tokens=tokens,
                pad_token_id=min(own) if own else tokenizer.pad_token_id,
                eos_token_id=sorted(own) if own else None,
                streamer=teller,
                **sampling,
            )
        except _Stopped:
            return "stopped"
    return teller.ending


class _Stopped(Exception):
    """Nobody waits for the answer any more."""


class _Teller(BaseStreamer):
    """Hands on what ``generate`` says: first the prompt, then token by token.

    Args:
        tokenizer, take, is_stopped: As for ``trace``.
        passed: Returns shares [T, L, D] of the pass that has just ended.
        limit: New tokens at most.
        ends: Tokens that end an answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        take: Callable[[Token], None],
        is_stopped: Callable[[], bool],
        passed: Callable[[int], Tensor],
        *,
        limit: int,
        ends: set[int] | None,
    ) -> None:
        self.tokenizer, self.take, self.is_stopped = tokenizer, take, is_stopped
        self.passed, self.limit, self.ends = passed, limit, ends or set()
        self.prompt: list[int] = []
        self.count = 0
        self.ending: Ending = "length"
        self.pieces: Pieces

    def put(self, value: Tensor) -> None:
        """Take the prompt [1, S], at first, or a token [1]."""
        if self.is_stopped():
            raise _Stopped
        if not self.prompt:
            self.prompt = value.flatten().tolist()
            return
        [token] = value.tolist()
        shares_TLD = self.passed(1 if self.count else len(self.prompt))
        if not self.count:
            self._read(shares_TLD)
            self.pieces = Pieces(self.tokenizer, before=self.prompt[-1:])
        self.count += 1
        if token in self.ends:
            self.ending = "end"
        is_last = self.ending == "end" or self.count == self.limit
        text = self.pieces.add(token, is_last=is_last)
        self.take(Token(token, text, shares_TLD[-1], is_given=False))

    def end(self) -> None:
        """Nothing is left to say."""

    def _read(self, shares_SLD: Tensor) -> None:
        """Tell of the prompt, special tokens by their names."""
        pieces = Pieces(self.tokenizer, special=True)
        for position, (token, shares_LD) in enumerate(zip(self.prompt, shares_SLD, strict=True)):
            if self.is_stopped():
                raise _Stopped
            text = pieces.add(token, is_last=position == len(self.prompt) - 1)
            self.take(Token(token, text, shares_LD, is_given=True))


class Pieces:
    """What each token adds to a decoded text; the pieces, joined, are that text.

    A character whose bytes are spread over tokens comes whole with its last one. The last tokens
    alone are decoded again with each new one: how a text begins changes nothing behind it.

    Args:
        tokenizer: Whose tokens they are.
        before: Tokens that stand before the text, on which its first characters may depend.
        special: Whether special tokens are written.
    """

    def __init__(
        self, tokenizer: Any, *, before: Sequence[int] = (), special: bool = False
    ) -> None:
        self.tokenizer, self.special = tokenizer, special
        self.ids = list(before)
        self.start = len(self._decoded())
        self.text = ""

    def add(self, token: int, *, is_last: bool = False) -> str:
        """The text that is certain now and was not before; all that is left with the last one."""
        self.ids.append(token)
        whole = self._decoded()[self.start :]
        certain = whole if is_last else whole.rstrip(UNFINISHED)
        if not is_last and not certain.startswith(self.text):
            return ""
        piece, self.text = certain[len(self.text) :], certain
        if len(self.ids) > WINDOW and certain == whole:
            self._forget()
        return piece

    def _forget(self) -> None:
        """Keep the last ids alone, if they are decoded to the end of what all are."""
        whole, ids = self._decoded(), self.ids
        self.ids = ids[-KEPT:]
        tail = self._decoded()
        if tail and whole.endswith(tail):
            self.start, self.text = len(tail), ""
        else:  # they begin within a character, or are special: a later token may do
            self.ids = ids

    def _decoded(self) -> str:
        return self.tokenizer.decode(
            self.ids,
            skip_special_tokens=not self.special,
            clean_up_tokenization_spaces=False,
        )


def _end_tokens(model: Any) -> set[int] | None:
    ends = model.generation_config.eos_token_id
    if ends is None:
        return None
    return {ends} if isinstance(ends, int) else {*ends}


@contextmanager
def _watched(
    model: Any, through: Through, is_stopped: Callable[[], bool]
) -> Iterator[Callable[[int], Tensor]]:
    """Look at what routers say; yields what gives the shares [T, L, D] of the last pass of T."""
    routing = Routing.of(model)
    rows: list[Tensor] = []

    def route(layer: int, _module: nn.Module, _inputs: object, output: RouterOutput) -> None:
        if is_stopped():
            raise _Stopped
        if layer == 0:
            rows.clear()
        _, weights_Tk, experts_Tk = output
        shares_TD = weights_Tk.new_zeros(len(weights_Tk), routing.experts, dtype=torch.float32)
        shares_TD.scatter_(1, experts_Tk, weights_Tk.float())
        rows.append(shares_TD / shares_TD.sum(dim=1, keepdim=True))

    def mix(_module: nn.Module, _inputs: object, output: Any) -> None:
        coefficients = output.coefficients.float()  # [1, M], or [1, T, M]
        rows[:] = [coefficients if coefficients.dim() == 2 else coefficients[0]]

    def passed(tokens: int) -> Tensor:
        if through == "average":
            return torch.full((tokens, routing.layers, routing.experts), 1 / routing.experts)
        if not rows:
            return torch.zeros(tokens, 0, 0)
        return torch.stack(rows, dim=1).cpu().expand(tokens, -1, -1)

    with ExitStack() as stack:
        if routing.by == "layer":
            for layer, router in enumerate(routers_of(model)):
                hook = router.register_forward_hook(partial(route, layer))
                stack.callback(hook.remove)
        elif routing.by != "none":
            stack.callback(model.register_forward_hook(mix).remove)
        yield passed


def _sent(model: Any, through: Through) -> AbstractContextManager[None]:
    """Inside, tokens go ``through``."""
    routing = Routing.of(model)
    if through == "routers":
        return nullcontext()
    if routing.by in ("prompt", "token"):
        return _mixed(model, through, routing.experts)
    return average_experts(model) if through == "average" else force_expert(model, through)


@contextmanager
def _mixed(model: Any, through: int | Literal["average"], experts: int) -> Iterator[None]:
    """One expert's coefficient is one, or all are equal: weights are linear in them."""
    if through != "average" and not 0 <= through < experts:
        raise InputError(Fault("expert", through, f"choose 0 to {experts - 1}"))
    coefficients_1M = torch.full((1, experts), 1 / experts, device=model.device)
    if through != "average":
        coefficients_1M = torch.eye(experts, device=model.device)[through : through + 1]

    def replace(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "coefficients": coefficients_1M}

    hook = model.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
