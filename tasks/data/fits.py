"""Whether what a recipe names goes together with what it asks for, from models' headers alone."""

from collections.abc import Iterator, Mapping

from infra.recipe.schema import Recipe
from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import LM_HEAD
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.ders import checks
from upcycle_core.dume.checks import check_repairable, fewest_tokens
from upcycle_core.errors import Fault, InputError


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


def head_faults(recipe: Recipe, readers: Mapping[str, CheckpointReader]) -> Iterator[Fault]:
    """A head that is to be merged by counts, of models that have none beside their embedding."""
    merge = recipe.backbone.merge
    if merge.head != "counts" or merge.embeddings == "counts" or recipe.lineage is not None:
        return
    if readers:
        config = next(iter(readers.values())).config
        is_tied = LM_HEAD not in family_of(config).tensors(config, ffn=False)
    else:
        is_tied = recipe.seed_model.shape.tie_embeddings
    if is_tied:
        remedy = "the head is the embedding, which is merged by backbone.merge.embeddings: set "
        remedy += "that to counts, and remove this"
        yield Fault("backbone.merge.head", merge.head, remedy)


def type_faults(recipe: Recipe) -> Iterator[Fault]:
    """A type that ready experts get, and those that are trained here beside them do not end in."""
    asked, experts = recipe.experts.dtype, recipe.experts
    trained = {name for name, domain in recipe.domains.items() if domain.expert is None}
    if asked in ("auto", "fp32") or len(trained) == len(recipe.domains):
        return
    how = {n: experts.continuing if n in recipe.parents else experts.training for n in trained}
    whole = sorted(name for name, training in how.items() if training.method != "lora")
    if whole:
        remedy = f"what is trained here ({', '.join(whole)}) is fp32, and all experts have one "
        remedy += "type: use auto or fp32, or train with method: lora"
        yield Fault("experts.dtype", asked, remedy)


def rank_faults(recipe: Recipe, readers: Mapping[str, CheckpointReader]) -> Iterator[Fault]:
    """Ranks of deltas above the matrices of the models, all sound."""
    if readers:
        config = next(iter(readers.values())).config
        sizes = int(config["hidden_size"]), int(config["intermediate_size"])
        yield from checks.rank_faults(recipe.delta_ranks, *sizes)


def weight_faults(recipe: Recipe, readers: Mapping[str, CheckpointReader]) -> Iterator[Fault]:
    """What the models, all sound, say against weights of experts that do not sum to one."""
    if not recipe.moe.normalise_top_k and readers:
        yield from family_of(next(iter(readers.values())).config).normalising_faults()
