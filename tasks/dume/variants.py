"""The MoE with one router or another, as one piece that loads it once.

Routers are solved in fp64. They are scored as a checkpoint holds them, in the type of its weights.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from infra.cluster.memory import Room
from infra.durable import is_whole, read_json, sealed, write_atomically
from infra.recipe.resources import PassResources
from tasks.scoring.room import scoring_folder
from upcycle_core.backbone.write import weights_type
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.dume.config import RouterConfig
from upcycle_core.dume.router import solve_routers
from upcycle_core.dume.router_reader import load_routers
from upcycle_core.dume.statistics import Statistics
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import Variant, evaluate_moe
from upcycle_core.evaluation.text.results import Parameter
from upcycle_core.moe.random import random_routers
from upcycle_core.progress import Progress

LOADED_AGAIN_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Saved:
    """The routers of a file."""

    file: Path

    def variant(self, model: Path) -> Variant:
        """The MoE with them."""
        return _held(load_routers(self.file).weights, model)


@dataclass(frozen=True)
class Drawn:
    """Routers that know nothing.

    Args:
        seed: Of the draw.
        experts: D.
    """

    seed: int
    experts: int

    def variant(self, model: Path) -> Variant:
        """The MoE with them."""
        shape = CheckpointReader(model).config
        layers, size = shape["num_hidden_layers"], shape["hidden_size"]
        return _held(random_routers(layers, size, self.experts, seed=self.seed), model)


@dataclass(frozen=True, kw_only=True)
class Swept:
    """One parameter set to ``value``, routers solved anew where it is theirs (Figure 2).

    Args:
        parameter: What is set.
        value: What to.
        routers: The file of those that are solved already, which another k leaves as they are.
        statistics: {domain: its file}, in the order of the experts.
        router: How they are solved else.
    """

    parameter: Parameter
    value: float
    routers: Path
    statistics: Mapping[str, Path]
    router: RouterConfig

    def variant(self, model: Path) -> Variant:
        """The MoE with them."""
        if self.parameter == "top_k":
            return replace(Saved(self.routers).variant(model), top_k=int(self.value))
        config, window = self.router, None
        if self.parameter == "ridge_lambda":
            config = replace(config, ridge_lambda=float(self.value))
        else:
            window = int(self.value)
        loaded = {domain: Statistics.load(path) for domain, path in self.statistics.items()}
        solution = solve_routers(loaded, config=config, window=window)
        return _held(solution.weights, model)


def sweeps(config: EvaluationConfig) -> dict[Parameter, Sequence[float]]:
    """The values of each parameter that is swept."""
    return {
        "top_k": config.sweep_top_k,
        "ridge_lambda": config.sweep_ridge_lambda,
        "window": config.sweep_window,
    }


def is_loaded_for_each(resources: PassResources, size: int) -> bool:
    """Whether kinds of variants of a MoE are scored side by side, each by a piece that loads it.

    On CPUs a small one is: loading takes less than scoring one text. Else it is loaded once.

    Args:
        resources: What pieces that score may use.
        size: Bytes of the MoE's weights.
    """
    held = resources.device == "cpu" and resources.streamed != "always"
    return held and size <= LOADED_AGAIN_BYTES


def _held(routers: Mapping[int, Tensor], model: Path) -> Variant:
    """The MoE with these routers as its files would have them."""
    dtype = weights_type(CheckpointReader(model))
    return Variant(routers={layer: router_HD.to(dtype) for layer, router_HD in routers.items()})


def variants_piece(
    *,
    out: Path,
    progress: Progress,
    model: Path,
    variants: Mapping[str, Saved | Drawn | Swept],
    room: Room | None = None,
    **common: Any,
) -> dict[str, dict[str, Any]]:
    """The piece: every variant of one MoE; one that is scored is not scored again after a kill.

    Returns:
        {variant: its scores and routing}, as ``evaluate_moe`` does.
    """
    folder = out.with_name(f"{out.name}.rows")
    folder.mkdir(exist_ok=True)
    files = {name: folder / f"{name}.json" for name in variants}
    known = {name: own["row"] for name, file in files.items() if is_whole(own := read_json(file))}

    def keep(name: str, row: Mapping[str, Any]) -> None:
        write_atomically(files[name], json.dumps(sealed({"row": row})))

    left = {name: own.variant(model) for name, own in variants.items() if name not in known}
    if left:
        where = {"config": common["config"], "device": common["device"]}
        common["streamed"] = scoring_folder(room, out, model, **where)
        known |= evaluate_moe(model, left, progress=progress, finished=keep, **common)
    shutil.rmtree(folder)
    return {name: known[name] for name in variants}
