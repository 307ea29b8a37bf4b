"""Whether experts can become one model: everything that speaks against it, in one list."""

from collections.abc import Iterator, Mapping

import torch

from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD, RECOMPUTED, Family
from upcycle_core.architectures.resolve import stock_faults
from upcycle_core.checkpoints.reader import CheckpointReader, first_non_finite
from upcycle_core.errors import Fault, InputError

# What must be equal, and the word for it. The rest (special tokens, dropout, cache) may differ.
MUST_AGREE = {
    "hidden_act": "architecture",
    "rms_norm_eps": "architecture",
    "attention_bias": "architecture",
    "tie_word_embeddings": "architecture",
    "sliding_window": "architecture",
    "layer_types": "architecture",
    "vocab_size": "shape",
    "hidden_size": "shape",
    "intermediate_size": "shape",
    "num_hidden_layers": "shape",
    "num_attention_heads": "shape",
    "num_key_value_heads": "shape",
    "head_dim": "shape",
    "rope_parameters": "rope",
    "max_position_embeddings": "rope",
}


def compare_experts(
    readers: Mapping[str, CheckpointReader], vocabularies: Mapping[str, str]
) -> list[Fault]:
    """Find everything that keeps these experts from becoming one model.

    Reads every weight once. The first expert is what the others are compared to.

    Args:
        readers: Checkpoints by the name that faults give them (``experts.law``).
        vocabularies: Fingerprints (``vocabulary_fingerprint``) by the same names; one that is not
            there is not compared.

    Returns:
        All faults, none if the experts fit.
    """
    faults: list[Fault] = []
    first: str | None = None
    for field, reader in readers.items():
        faults += _own_faults(reader, field)
        if first is None:
            first = field
            continue
        faults += _differences(readers[first], reader, first, field)
        ours, theirs = vocabularies.get(first), vocabularies.get(field)
        if ours and theirs and ours != theirs:
            remedy = f"another vocabulary than {first}: the same tokens must have the same ids; "
            remedy += "use experts of one seed model with its tokenizer"
            faults.append(Fault(f"{field}.tokenizer", theirs, remedy))
    return faults


def tensor_faults(
    reader: CheckpointReader,
    family: Family,
    field: str,
    *,
    config: Mapping | None = None,
    ffn: bool = True,
) -> list[Fault]:
    """Account for every tensor: what is missing, misshapen, or there with no use for it.

    Args:
        reader: The checkpoint.
        family: Its family.
        field: How faults name it.
        config: The configuration that its tensors must fit; its own by default.
        ffn: Whether FFNs belong to it (a backbone has none).
    """
    expected = family.tensors(config or reader.config, ffn=ffn)
    place = str(reader.directory)
    faults = []
    for name, shape in expected.items():
        if name not in reader.tensors:
            faults.append(Fault(field, place, f"lacks tensor {name}; fetch the checkpoint again"))
        elif reader.tensors[name].shape != shape:
            found = reader.tensors[name].shape
            remedy = f"{name} has shape {list(found)}; {list(shape)} is expected by config.json"
            faults.append(Fault(field, place, remedy))
    for name in reader.tensors:
        if name not in expected and RECOMPUTED.fullmatch(name) is None:
            faults += list(_surplus_fault(reader, name, field))
    dtypes = {str(info.dtype) for info in reader.tensors.values()}
    if len(dtypes) > 1:
        remedy = f"mixes {', '.join(sorted(dtypes))}; save it in one type"
        faults.append(Fault(field, place, remedy))
    return faults


def _own_faults(reader: CheckpointReader, field: str) -> Iterator[Fault]:
    """What is wrong with one expert by itself."""
    try:
        family = family_of(reader.config, field=f"{field}.config.model_type")
        yield from family.config_faults(reader.config, field)
        yield from stock_faults(reader.config, f"{field}.config")
        yield from tensor_faults(reader, family, field)
    except InputError as error:
        yield from error.faults
    for name in first_non_finite(reader):
        remedy = f"{name} holds NaN or infinity; train or fetch this expert again"
        yield Fault(field, str(reader.directory), remedy)


def _surplus_fault(reader: CheckpointReader, name: str, field: str) -> Iterator[Fault]:
    """Judge a tensor that nobody asked for; a tied head that equals the embedding is no fault."""
    place = str(reader.directory)
    if name != LM_HEAD or EMBEDDING not in reader.tensors:
        yield Fault(field, place, f"holds {name}, which its architecture has no place for")
    elif not torch.equal(reader.tensor(name), reader.tensor(EMBEDDING)):
        remedy = f"is tied by config.json, yet {name} differs from {EMBEDDING}; set "
        yield Fault(field, place, remedy + "tie_word_embeddings to false, or remove the tensor")


def _differences(
    first: CheckpointReader, other: CheckpointReader, first_field: str, field: str
) -> Iterator[Fault]:
    """What two experts do not agree on."""
    types = (first.config.get("model_type"), other.config.get("model_type"))
    if types[0] != types[1]:
        remedy = f"another architecture than {first_field} ({types[0]}); use one family"
        yield Fault(f"{field}.config.model_type", types[1], remedy)
        return
    try:
        family = family_of(first.config)
        ours, theirs = family.resolve(first.config), family.resolve(other.config)
    except InputError:
        return  # said already, of the expert that it is about
    for name, what in MUST_AGREE.items():
        if ours.get(name) != theirs.get(name):
            remedy = f"another {what} than {first_field} ({ours.get(name)!r})"
            remedy += "; use experts of one seed model"
            yield Fault(f"{field}.config.{name}", theirs.get(name), remedy)
    dtypes = [next((t.dtype for t in r.tensors.values()), None) for r in (first, other)]
    if dtypes[0] != dtypes[1]:
        remedy = f"another type of weights than {first_field} ({dtypes[0]}); save both in one"
        yield Fault(field, str(dtypes[1]), remedy)
