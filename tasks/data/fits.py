"""Whether the machine can hold what a recipe trains and runs, from the models' headers alone.

What is counted is the least: weights, and of what is trained gradients and AdamW's two moments.
Activations come on top, so nothing that fits is refused.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from infra import settings as environment
from infra.cluster.memory import machine_memory
from infra.recipe.resources import Resources
from infra.recipe.schema import Recipe
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.dume.checks import check_repairable, fewest_tokens
from upcycle_core.errors import Fault, InputError
from upcycle_core.precision import weights_type
from upcycle_core.training.config import ExpertTrainingConfig

TRAINED = 16
"""Bytes of a parameter that is trained: fp32 weight, gradient and two moments."""


@dataclass(frozen=True)
class Size:
    """Parameters of a dense model.

    Args:
        whole: All of them.
        ffns: Those of its FFNs, which a MoE has once an expert.
        ends: Those of its embeddings and its head.
    """

    whole: int
    ffns: int
    ends: int

    @classmethod
    def of(cls, reader: CheckpointReader) -> "Size":
        """What a checkpoint's headers say."""
        family = family_of(reader.config)
        sizes = {name: math.prod(info.shape) for name, info in reader.tensors.items()}
        return cls(
            whole=sum(sizes.values()),
            ffns=sum(size for name, size in sizes.items() if family.is_ffn(name)),
            ends=sum(sizes.get(name, 0) for name in (EMBEDDING, LM_HEAD)),
        )

    def training(self, config: ExpertTrainingConfig, device: str) -> int:
        """Bytes at least, to train it as an expert."""
        frozen = weights_type(config.precision, device=device).itemsize
        trained = {
            "full": self.whole,
            "layers": self.whole - self.ends,
            "ffn": self.ffns,
            "lora": 0,
        }[config.method]
        return TRAINED * trained + frozen * (self.whole - trained)

    def mixture(self, experts: int) -> int:
        """Parameters of the MoE of so many of them, without its routers."""
        return self.whole + (experts - 1) * self.ffns


def repair_faults(recipe: Recipe, readers: Mapping[str, CheckpointReader]) -> Iterator[Fault]:
    """What the models, all sound, or the text that is asked for say against a repair."""
    if recipe.experts.repair == "none" or not readers:
        return
    reader = next(iter(readers.values()))
    asked, field = recipe.statistics.tokens, "statistics.tokens"
    enough = fewest_tokens(reader.config) if asked is None else asked
    try:
        check_repairable(family_of(reader.config), reader.config, enough, field)
    except InputError as error:
        yield from error.faults


def weight_faults(recipe: Recipe, readers: Mapping[str, CheckpointReader]) -> Iterator[Fault]:
    """What the models, all sound, say against weights of experts that do not sum to one."""
    if not recipe.moe.normalise_top_k and readers:
        yield from family_of(next(iter(readers.values())).config).normalising_faults()


def memory_faults(recipe: Recipe, readers: Mapping[str, CheckpointReader]) -> Iterator[Fault]:
    """What the machine's memory, or a GPU's, cannot hold. A cluster's machines are not asked.

    Args:
        recipe: Of experts of one seed.
        readers: The models that it names, all sound; the largest counts.
    """
    if not readers or environment.configure().ray_address != "local":
        return
    size = max(map(Size.of, readers.values()), key=lambda own: own.whole)
    domains, compute, config = len(recipe.domains), recipe.compute, recipe.experts.training
    fault = partial(_fault, cpus=compute.cpus or os.cpu_count() or 1)
    trained = sum(domain.expert is None for domain in recipe.domains.values())
    if trained:
        needed = size.training(config, compute.experts.device)
        if compute.experts.sharding == "full":
            needed //= compute.experts.workers
        what = f"to train {size.whole / 1e6:,.0f} M parameters"
        remedy = "" if config.method != "full" else "use ffn or lora"
        where = "experts.training.method"
        yield from fault(
            "experts", compute.experts, (where, config.method), needed, trained, what, remedy
        )
    for kind, held, count, precision in (
        ("statistics", size.whole, domains, recipe.statistics.precision),
        ("evaluation", size.mixture(domains), 2, recipe.evaluation.precision),
    ):
        resources: Resources = getattr(compute, kind)
        each = weights_type(precision, device=resources.device).itemsize
        what = f"for {held / 1e6:,.0f} M weights of {each} bytes"
        remedy = "use bf16" if each > 2 else ""
        asked = (f"{kind}.precision", precision)
        yield from fault(kind, resources, asked, each * held, count, what, remedy)


def _fault(
    kind: str,
    resources: Resources,
    asked: tuple[str, object],
    needed: int,
    count: int,
    what: str,
    remedy: str,
    *,
    cpus: int,
) -> Iterator[Fault]:
    """The fault of ``count`` pieces that need so many bytes each, if the memory is too small."""
    there = machine_memory(device=resources.device)
    if there is None:
        return
    workers = getattr(resources, "workers", 1)
    if resources.gpus:
        together = min(count, max(1, int(1 / resources.gpus)))
    else:
        together = min(workers * count, max(workers, cpus // resources.cpus))
    if together * needed <= there:
        return
    pieces = f"{together} at once, " if together > 1 else ""
    said = f"needs at least {needed / 1e9:.1f} GB {what}, {pieces}and there are {there / 1e9:.1f}; "
    fewer = int(there // needed)
    if fewer and not resources.gpus:
        remedy += " or " if remedy else ""
        remedy += f"let fewer run at once: compute.{kind}.cpus = {-(-cpus // fewer)}"
    yield Fault(*asked, f"{said}{remedy or 'use a larger machine'}")
