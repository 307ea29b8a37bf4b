"""What the headers of one dense model say against it: its configuration, and every tensor."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD, RECOMPUTED, Family
from upcycle_core.architectures.resolve import stock_faults
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault, InputError


def architecture_faults(config: Mapping, field: str) -> list[Fault]:
    """What its family and the stock classes, which are slow to import, say against a config.json.

    Args:
        config: Its content.
        field: How faults name the model.

    Raises:
        InputError: It is of no family that is known.
    """
    family = family_of(config, field=f"{field}.config.model_type")
    faults = family.config_faults(config, field)
    faults += stock_faults(config, f"{field}.config")
    if not faults:  # what the dense class takes, as no dropout, the MoE's may not
        target = family.target_config(config, experts=2, top_k=1)
        faults += stock_faults(target, f"{field}.config")
    return faults


def header_faults(reader: CheckpointReader, field: str, *, values: bool = False) -> Iterator[Fault]:
    """What is wrong with an expert or a seed by itself, as far as headers say.

    Args:
        reader: Its checkpoint.
        field: How faults name it.
        values: Whether weights may be read, where a head may be the embedding.
    """
    try:
        yield from architecture_faults(reader.config, field)
        family = family_of(reader.config, field=f"{field}.config.model_type")
        yield from tensor_faults(reader, family, field, mixed=True, values=values)
    except InputError as error:
        yield from error.faults


def tensor_faults(
    reader: CheckpointReader,
    family: Family,
    field: str,
    *,
    config: Mapping | None = None,
    ffn: bool = True,
    mixed: bool = False,
    values: bool = True,
) -> list[Fault]:
    """Account for every tensor: what is missing, misshapen, or there with no use for it.

    Args:
        reader: The checkpoint.
        family: Its family.
        field: How faults name it.
        config: The configuration that its tensors must fit; its own by default.
        ffn: Whether FFNs belong to it (a backbone has none).
        mixed: Whether its tensors may be of several types, as those of a given model that is
            brought into one form.
        values: Whether weights may be read, where a head may be the embedding.
    """
    expected = family.tensors(config or reader.config, ffn=ffn)
    place = str(reader.directory)
    faults: list[Fault] = []
    if other := _other_name(reader):
        remedy = f"calls its embedding {other}, not {EMBEDDING}: it was saved without a head, in a "
        remedy += "wrapper or as a part of another model; save its causal language model alone"
        return [Fault(field, place, remedy)]
    for name, shape in expected.items():
        if name not in reader.tensors:
            faults.append(Fault(field, place, f"lacks tensor {name}; fetch the checkpoint again"))
        elif reader.tensors[name].shape != shape:
            found = reader.tensors[name].shape
            remedy = f"{name} has shape {list(found)}; {list(shape)} is expected by config.json"
            faults.append(Fault(field, place, remedy))
    for name in reader.tensors:
        is_surplus = name not in expected and RECOMPUTED.fullmatch(name) is None
        if is_surplus and (values or name != LM_HEAD):
            faults += list(surplus_fault(reader, name, field))
    weights = {n: t for n, t in reader.tensors.items() if RECOMPUTED.fullmatch(n) is None}
    dtypes = {str(info.dtype) for info in weights.values()}
    if len(dtypes) > 1 and not mixed:
        remedy = f"mixes {', '.join(sorted(dtypes))}; save it in one type"
        faults.append(Fault(field, place, remedy))
    return faults


def _other_name(reader: CheckpointReader) -> str | None:
    """What a checkpoint calls its embedding where all its tensors have another prefix."""
    if EMBEDDING in reader.tensors:
        return None
    return next((n for n in reader.tensors if n.endswith(EMBEDDING.partition(".")[2])), None)


def surplus_fault(reader: CheckpointReader, name: str, field: str) -> Iterator[Fault]:
    """Judge a tensor that nobody asked for; a tied head that equals the embedding is no fault."""
    place = str(reader.directory)
    if name != LM_HEAD or EMBEDDING not in reader.tensors:
        yield Fault(field, place, f"holds {name}, which its architecture has no place for")
    elif not reader.fact("head equals embedding", partial(_has_tied_head, reader)):
        remedy = f"is tied by config.json, yet {name} differs from {EMBEDDING}; set "
        yield Fault(field, place, remedy + "tie_word_embeddings to false, or remove the tensor")


def _has_tied_head(reader: CheckpointReader) -> bool:
    return torch.equal(reader.tensor(LM_HEAD), reader.tensor(EMBEDDING))
