"""Solved routers, and how they are read back from disk. Shapes: H hidden size, D domains."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import safe_open
from torch import Tensor

from upcycle_core.checkpoints.tensor_file import read_header
from upcycle_core.dume.cross_validation import Candidate

KIND = "routers"


@dataclass(frozen=True)
class LambdaChoice:
    """A lambda and why it is this one."""

    ridge_lambda: float
    chosen_by: Literal["given", "cross-validation"] = "given"
    table: tuple[Candidate, ...] = ()
    """What cross-validation found; empty if lambda was given."""


@dataclass(frozen=True)
class RouterSolution:
    """The routers of a MoE."""

    weights: Mapping[int, Tensor]
    """By layer: W [H, D] fp64; columns of norm 1, unless ``router`` says otherwise."""
    domains: tuple[str, ...]
    """What the columns stand for."""
    choice: LambdaChoice

    @property
    def ridge_lambda(self) -> float:
        """lambda, the same in every layer."""
        return self.choice.ridge_lambda


def load_routers(path: Path) -> RouterSolution:
    """Read what ``save_routers`` wrote.

    Raises:
        InputError: it is no such file.
    """
    header = read_header(path, kind=KIND)
    with safe_open(path, "pt") as file:
        weights = {layer: file.get_tensor(str(layer)) for layer in header["layers"]}
    table = tuple(
        Candidate(
            row["ridge_lambda"],
            {int(k): math.inf if v is None else v for k, v in row["losses"].items()},
        )
        for row in header["table"]
    )
    choice = LambdaChoice(header["ridge_lambda"], header["chosen_by"], table)
    return RouterSolution(weights, tuple(header["domains"]), choice)
