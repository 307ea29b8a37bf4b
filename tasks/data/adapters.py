"""LoRA adapters that a recipe trains, held against the layers of what they are trained on."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from infra.recipe.reading import nearest
from infra.recipe.schema import Recipe
from upcycle_core.errors import Fault, InputError
from upcycle_core.training.config import LINEARS, LoraSettings

if TYPE_CHECKING:  # recipes are judged before torch is imported
    from upcycle_core.checkpoints.reader import CheckpointReader


def adapters(recipe: Recipe) -> dict[str, LoraSettings]:
    """{section: the adapter that it asks for}"""
    experts, found = recipe.experts, {}
    trained = {"experts.training": experts.training, "experts.continued": experts.continued}
    for where, config in trained.items() if recipe.trains_experts or not recipe.domains else ():
        if config is not None and config.method == "lora" and config.lora is not None:
            found[where] = config.lora
    for name, row in recipe.baselines.items():
        if row.tuned == "lora" and row.lora is not None:
            found[f"baselines.{name}"] = row.lora
    return found


def adapter_faults(recipe: Recipe, linears: Collection[str] = LINEARS) -> Iterator[Fault]:
    """Adapters of layers that are not there.

    Args:
        recipe: What to make.
        linears: Last names of the linear layers of what is trained; by default those of a seed that
            is shaped here.
    """
    known = sorted(linears)
    for where, settings in adapters(recipe).items():
        # `self_attn.q_proj` is one as well: PEFT holds the ends of names against them.
        unknown = [name for name in settings.modules if name.rpartition(".")[2] not in known]
        if unknown:
            meant = ", ".join(dict.fromkeys(nearest(name, known) for name in unknown))
            remedy = f"no linear layer is called so; did you mean {meant}? choose among "
            yield Fault(f"{where}.lora.modules", unknown, remedy + ", ".join(known))


def given_adapter_faults(recipe: Recipe, readers: "Iterable[CheckpointReader]") -> list[Fault]:
    """The same of given models that are trained on; what they hold is said once, of the first."""
    for reader in readers:
        try:
            linears = linears_of(reader.config)
        except InputError:  # said already
            continue
        if faults := list(adapter_faults(recipe, linears)):
            return faults
    return []


def linears_of(config: Mapping[str, Any]) -> set[str]:
    """Last names of the linear layers that a configuration makes.

    Raises:
        InputError: It is of no family that is known.
    """
    from upcycle_core.architectures.families import family_of
    from upcycle_core.architectures.family import EMBEDDING, LM_HEAD

    shapes = family_of(config).tensors(config)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and name != EMBEDDING]
    return {name.split(".")[-2] for name in (*matrices, LM_HEAD)}  # a tied head is a layer too
