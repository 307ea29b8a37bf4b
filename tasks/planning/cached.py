"""What given models leave in the models' cache, beside workspaces: converted, merged, fetched."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache

from infra.recipe.schema import Recipe
from tasks.data.given import REGISTERED, given_fields, registered_place
from tasks.planning.row import Planned
from upcycle_core.checkpoints.known import FILE, KnownFiles
from upcycle_core.checkpoints.reader import INDEX_FILE, SINGLE_FILE
from upcycle_core.errors import InputError
from upcycle_core.given.adapter import Adapter, is_adapter
from upcycle_core.given.resolve import CONFIG, GGUF, converted_before
from upcycle_core.planning.shape import Shape

FP32, HALF = 4, 2


@dataclass(frozen=True)
class Cached:
    """A model that is brought into the cache before it is read.

    Args:
        size: Bytes that it takes there, nothing of which is another file's.
        is_there: Whether it was brought there before.
        dtype: Of its weights, where that is known.
        memory: Bytes that are held meanwhile, of one tensor after another.
    """

    size: int
    is_there: bool
    dtype: torch.dtype | None
    memory: int = 0


def cached_models(recipe: Recipe, shape: Shape, cache: Path) -> dict[str, Cached]:
    """{reference: what it leaves} of a recipe's models, and of the bases of adapters among them.

    Args:
        recipe: The recipe.
        shape: Of any of its models; adapters take as much as what they are merged into.
        cache: Where models are kept.

    Raises:
        InputError: A model is to come from the registry, and is not there.
    """
    found: dict[str, Cached] = {}
    for field, reference in given_fields(recipe).items():
        try:
            for name, cached in _of(recipe, reference, shape, cache):
                found.setdefault(name, cached)
        except InputError as error:
            raise InputError(*(fault.within(field) for fault in error.faults)) from error
    return found


def sources_row(cached: Mapping[str, Cached]) -> Planned:
    """The stage that brings models into the cache, where they stay for all workspaces."""
    size = sum(model.size for model in cached.values())
    memory = max((model.memory for model in cached.values() if not model.is_there), default=0)
    return Planned("sources", 1, 1, cached=size, read=size, memory=memory)


def _of(recipe: Recipe, reference: str, shape: Shape, cache: Path) -> Iterator[tuple[str, Cached]]:
    folder, known = Path(reference).expanduser(), KnownFiles(cache / FILE)
    if (folder / CONFIG).is_file():
        return
    if reference.startswith(REGISTERED):  # weights that lie on this machine are linked to
        size = shape.stored if registered_place(reference) is None else 0
        yield reference, Cached(size, False, shape.dtype)
    elif reference.endswith(GGUF):
        dtype = _type_in(folder, shape)
        size = shape.whole * (FP32 if dtype == torch.float32 else HALF)
        there = converted_before(reference, cache, known=known)
        # Dequantised in fp32, and in its own type.
        yield reference, Cached(size, there, dtype, (FP32 + HALF) * shape.largest)
    elif is_adapter(folder):
        seed = recipe.seed_model.model
        base = Adapter(folder).base_name if seed in (None, reference) else seed
        there = converted_before(reference, cache, base=base, known=known)
        # A matrix, it and what is added to it in fp32, and their sum.
        memory = (3 * FP32 + shape.itemsize) * shape.inner * shape.hidden
        yield reference, Cached(shape.stored, there, shape.dtype, memory)
        if base is not None and not is_adapter(Path(base).expanduser()):  # else said when resolved
            yield from _of(recipe, base, shape, cache)
    elif not folder.exists():
        files = (try_to_load_from_cache(reference, f, cache) for f in (SINGLE_FILE, INDEX_FILE))
        yield reference, Cached(shape.stored, any(isinstance(f, str) for f in files), shape.dtype)


def _type_in(file: Path, shape: Shape) -> torch.dtype | None:
    """What the weights of a GGUF file become, by its size alone: opening it takes seconds.

    What is quantised becomes bf16; of sixteen bits there are two types.
    """
    bits = 8 * file.stat().st_size / shape.whole if file.is_file() else 0
    if bits > 24:
        return torch.float32
    return torch.bfloat16 if bits < 15 else None
