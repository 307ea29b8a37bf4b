"""What is wrong with what a recipe says about DeRS, without reading any file."""

from collections.abc import Iterator

from infra.recipe.names import name_fault
from infra.recipe.schema import Recipe
from upcycle_core.ders.checks import rank_faults
from upcycle_core.errors import Fault

COMPRESSIBLE = ("dume", "btx", "sparse-upcycling", "drop-upcycling")
"""Methods whose models are stock Mixtures-of-Experts that grew from one seed."""

DRAWN = 0.1
"""By how much experts are less like their seed than the share that is left of it says."""


def ders_faults(recipe: Recipe) -> Iterator[Fault]:
    """Every fault of ``compression``, and of baselines whose experts are deltas."""
    if recipe.trains_seed:  # of given models the files are asked
        shape = recipe.seed_model.shape
        yield from rank_faults(recipe.delta_ranks, shape.hidden_size, shape.intermediate_size)
    compression = recipe.compression
    if compression is None:
        return
    if not compression.codecs:
        remedy = "no way to store a delta; add one, e.g. {rank-4: {codec: low_rank, rank: 4}}"
        yield Fault("compression.codecs", {}, remedy)
    for name, codec in compression.codecs.items():
        yield from name_fault(f"compression.codecs.{name}", name)
        yield from codec.faults(f"compression.codecs.{name}")
        if name == "original":
            remedy = "names a row of the table already; rename it"
            yield Fault(f"compression.codecs.{name}", codec.codec, remedy)
    if compression.base == "seed" and not recipe.has_seed:
        remedy = "the recipe has no seed model; name seed_model.model, or use mean"
        yield Fault("compression.base", "seed", remedy)
    known = [n for n, row in recipe.baselines.items() if row.method in COMPRESSIBLE]
    known.insert(0, recipe.method)
    if not compression.models:
        yield Fault("compression.models", [], f"nothing to compress; use some of {known}")
    if len(set(compression.models)) < len(compression.models):
        remedy = "names a model twice; give each once"
        yield Fault("compression.models", list(compression.models), remedy)
    shown = {recipe.method}
    for name in compression.models:
        if name not in known:
            remedy = f"not a Mixture-of-Experts of one seed here; use some of {known}"
            yield Fault("compression.models", name, remedy)
        elif name in recipe.baselines:
            yield from _ancestor_fault(recipe, name)
            title = recipe.baselines[name].title or name
            if title.lower() in shown:
                remedy = "another model of the table is called so; choose another name"
                yield Fault(f"baselines.{name}.title", title, remedy)
            shown.add(title.lower())


def _ancestor_fault(recipe: Recipe, name: str) -> Iterator[Fault]:
    """Experts of which so much is drawn anew that the seed is not their base."""
    row, compression = recipe.baselines[name], recipe.compression
    if compression is None or compression.base != "seed" or row.method != "drop-upcycling":
        return
    likeness = 1 - row.reinitialised
    if likeness < compression.minimum_cosine + DRAWN:
        remedy = f"its experts are like the seed by a cosine of {likeness:g} at most, for "
        remedy += f"{row.reinitialised:g} of each is drawn anew, and compression.minimum_cosine is "
        remedy += f"{compression.minimum_cosine:g}: lower that below {max(likeness - DRAWN, 0):g}, "
        remedy += "or leave the row out"
        yield Fault("compression.models", name, remedy)
