"""Where trained baselines start: experts, their averaged backbone, routers that know nothing."""

from collections.abc import Mapping
from pathlib import Path

from upcycle_core.architectures.families import family_of
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault, InputError
from upcycle_core.moe.assemble import assemble
from upcycle_core.moe.plan import Edit
from upcycle_core.moe.random import random_routers
from upcycle_core.progress import Progress

SEED = "seed model"
"""Name of the seed among the experts; no domain has a space in its name."""


def with_seed(experts: Mapping[str, Path], seed_expert: Path | None) -> dict[str, Path]:
    """The experts, with the seed model as the last of them if there is one.

    Raises:
        InputError: There are fewer than two.
    """
    everyone = dict(experts) if seed_expert is None else {**experts, SEED: seed_expert}
    if len(everyone) < 2:
        raise InputError(Fault("experts", list(everyone), "must be two or more"))
    return everyone


def model_shape(checkpoint: Path, field: str) -> tuple[int, int]:
    """Number of layers L and hidden size H of a dense checkpoint.

    Raises:
        InputError: It cannot be read, or its family is not supported.
    """
    config = CheckpointReader(checkpoint, field=field).config
    full = family_of(config, field=f"{field}.config.model_type").resolve(config)
    return full["num_hidden_layers"], full["hidden_size"]


def write_mixture(
    experts: Mapping[str, Path],
    out: Path,
    *,
    top_k: int,
    router_seed: int,
    max_shard_bytes: int,
    edit: Edit | None = None,
    progress: Progress | None = None,
) -> None:
    """Assemble experts, the mean of everything that is not an FFN, and routers of N(0, 0.02^2).

    Arguments and errors as ``assemble``.

    Args:
        experts: Name to checkpoint; one checkpoint may come several times.
        out: The directory that is written.
        top_k: Experts a token passes through.
        router_seed: Decides the routers.
        max_shard_bytes: Size of one safetensors file.
        edit: Applied to the experts' matrices on their way.
        progress: Hears of every tensor.
    """
    name, first = next(iter(experts.items()))
    layers, hidden = model_shape(first, f"experts.{name}")
    routers = random_routers(layers, hidden, len(experts), seed=router_seed)
    assemble(
        experts,
        None,
        routers,
        out,
        top_k=top_k,
        max_shard_bytes=max_shard_bytes,
        edit=edit,
        progress=progress,
    )
