"""Router by router: L passes, each through the routers solved before (the paper's alternative).

The joint pass sends every token of a domain through that domain's experts. Here a token takes the
way that the MoE will send it, so a layer's router is optimal for what really reaches it.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from upcycle_core.backbone.write import weights_type as weights_of
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.dume.collect import collect_shard
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.statistics import save_statistics
from upcycle_core.errors import Fault, InputError
from upcycle_core.moe.inspect import set_routers
from upcycle_core.precision import weights_type
from upcycle_core.progress import Progress, Silent


def sequential_statistics(
    moe: Path,
    routers: Mapping[int, Tensor],
    layer: int,
    corpus: Path,
    out: Path,
    *,
    config: StatisticsConfig,
    shard: int,
    device: str = "cpu",
    progress: Progress | None = None,
) -> None:
    """One (layer, domain, shard) piece: a statistics file that holds ``layer`` alone.

    Nothing behind the router of ``layer`` is computed, and that router's own weights do not matter.

    Args:
        moe: The assembled MoE; its k decides how many experts a token passes through.
        routers: Layer to W [H, D] for every layer before ``layer``.
        layer: Whose router inputs are counted.
        corpus, out, config, shard, device, progress: As for ``domain_statistics``.

    Raises:
        InputError: a router before ``layer`` is missing.
    """
    missing = [before for before in range(layer) if before not in routers]
    if missing:
        raise InputError(Fault("routers", missing, f"solve these layers before layer {layer}"))
    model = load_causal_lm(moe, dtype=weights_type(config.precision, device), device=device)
    if config.precision == "fp64":
        model.set_experts_implementation("eager")  # torch's grouped product has no fp64
    stored = weights_of(CheckpointReader(moe))  # as the MoE will hold them
    set_routers(model, {before: routers[before].to(stored) for before in range(layer)})
    layout, moments = collect_shard(
        model.get_decoder(),
        corpus,
        [layer],
        config=config,
        shard=shard,
        progress=progress or Silent(),
        what=f"statistics of layer {layer}",
    )
    save_statistics(out, layout, moments)
