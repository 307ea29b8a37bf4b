"""The union of the strangers' vocabularies, in the words of the recipe."""

from collections.abc import Mapping
from pathlib import Path

from upcycle_core.backbone.vocabulary import Union, unite_vocabularies
from upcycle_core.errors import Fault, InputError


def union_of(models: Mapping[str, Path], segmentation: str | None) -> Union:
    """All tokens of all models; their rows in the models' order.

    Raises:
        InputError: The models cut text by different rules, and ``segmentation`` names none.
    """
    ruling = None if segmentation is None else list(models).index(segmentation)
    try:
        return unite_vocabularies(list(models.values()), ruling=ruling)
    except InputError as error:
        raise InputError(*(_named(fault, list(models)) for fault in error.faults)) from None


def segmentation_faults(models: Mapping[str, Path], segmentation: str | None) -> list[Fault]:
    """What keeps the tokenizers of ``models`` from becoming one."""
    try:
        union_of(models, segmentation)
    except InputError as error:
        return list(error.faults)
    return []


def _named(fault: Fault, names: list[str]) -> Fault:
    """``fault`` with the recipe's words for models and for the choice among them."""
    field, remedy = fault.field, fault.remedy.replace("(ruling)", "(symphony.segmentation)")
    for index, name in enumerate(names):
        field = field.replace(f"models[{index}]", f"domains.{name}")
        remedy = remedy.replace(f"models[{index}]", f"domains.{name}")
    return Fault(field, fault.value, remedy)
