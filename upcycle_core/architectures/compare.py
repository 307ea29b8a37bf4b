"""Whether models can become one: everything that speaks against it, in one list."""

import math
from collections.abc import Iterator, Mapping

import torch

from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD, RECOMPUTED, Family
from upcycle_core.architectures.resolve import stock_faults
from upcycle_core.checkpoints.reader import CheckpointReader, chunks, first_non_finite
from upcycle_core.checkpoints.vocabulary import read_vocabulary
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
# Strangers' tokens are matched one by one, so their vocabularies may be of any size.
STRANGERS_AGREE = {name: what for name, what in MUST_AGREE.items() if name != "vocab_size"}
OF_ONE_SEED = "use experts of one seed model"
OF_ONE_SHAPE = (
    "only models of one architecture, shape and rope can be aligned; choose another model"
)


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
        faults += _differences(readers, first, field, MUST_AGREE, OF_ONE_SEED)
        ours, theirs = vocabularies.get(first), vocabularies.get(field)
        if ours and theirs and ours != theirs:
            remedy = f"another vocabulary than {first}: the same tokens must have the same ids; "
            remedy += "use experts of one seed model with its tokenizer"
            faults.append(Fault(f"{field}.tokenizer", theirs, remedy))
    return faults


def compare_strangers(
    readers: Mapping[str, CheckpointReader], vocabularies: Mapping[str, str]
) -> list[Fault]:
    """Find everything that keeps models without a common seed from becoming one (Symphony-MoE).

    Architecture, shape and rope must agree as with ``compare_experts``; vocabularies need not, but
    embeddings are tied in all models or in none. Reads every weight once, and again only those of
    models that begin alike.

    Args:
        readers: Checkpoints by the name that faults give them (``domains.law.expert``).
        vocabularies: Fingerprints (``vocabulary_fingerprint``) by the same names: the tokenizers
            that can be read. Others are not looked at.

    Returns:
        All faults, none if the models fit.
    """
    faults: list[Fault] = []
    fields = list(readers)
    for at, field in enumerate(fields):
        faults += _own_faults(readers[field], field)
        if field in vocabularies:
            faults += _vocabulary_faults(readers[field], field)
        if at:
            faults += _differences(readers, fields[0], field, STRANGERS_AGREE, OF_ONE_SHAPE)
        same = next((f for f in fields[:at] if _same_model(readers[f], readers[field])), None)
        if same is not None:
            remedy = f"is the same model as {same} ({readers[same].directory}): it would be its "
            remedy += "own anchor; give each model once"
            faults.append(Fault(field, str(readers[field].directory), remedy))
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


def _vocabulary_faults(reader: CheckpointReader, field: str) -> Iterator[Fault]:
    """Tokens that are no byte strings, or that the embedding has no row for."""
    try:
        tokens = read_vocabulary(reader.directory, field=f"{field}.tokenizer").tokens
    except InputError as error:
        yield from error.faults
        return
    rows = reader.tensors[EMBEDDING].shape[0] if EMBEDDING in reader.tensors else None
    last = max((token.id for token in tokens), default=-1)
    if rows is not None and last >= rows:
        remedy = f"{EMBEDDING} has {rows} rows, and the tokenizer's last token is {last}; resize "
        remedy += "the model's embedding, or remove tokens that it does not know"
        yield Fault(f"{field}.tokenizer", str(reader.directory), remedy)


def _same_model(first: CheckpointReader, other: CheckpointReader) -> bool:
    """Whether two checkpoints are one directory, or hold the same weights."""
    if first.directory.resolve() == other.directory.resolve():
        return True
    names = [
        {name for name in reader.tensors if RECOMPUTED.fullmatch(name) is None}
        for reader in (first, other)
    ]
    # A tied head may lie on the disk or not.
    if (names[0] ^ names[1]) - {LM_HEAD}:
        return False
    # Small ones first: models that differ do so in their norms.
    shared = sorted(names[0] & names[1], key=lambda name: math.prod(first.tensors[name].shape))
    return all(_equal(first.tensor(name), other.tensor(name)) for name in shared)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, though in different types."""
    pieces = zip(chunks(one), chunks(other), strict=False)
    return one.shape == other.shape and all(torch.equal(a.double(), b.double()) for a, b in pieces)


def _differences(
    readers: Mapping[str, CheckpointReader],
    first_field: str,
    field: str,
    must_agree: Mapping[str, str],
    advice: str,
) -> Iterator[Fault]:
    """What two models do not agree on."""
    first, other = readers[first_field], readers[field]
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
    for name, what in must_agree.items():
        if ours.get(name) != theirs.get(name):
            remedy = f"another {what} than {first_field} ({ours.get(name)!r})"
            remedy += f"; {advice}"
            yield Fault(f"{field}.config.{name}", theirs.get(name), remedy)
    dtypes = [next((t.dtype for t in r.tensors.values()), None) for r in (first, other)]
    if dtypes[0] != dtypes[1]:
        remedy = f"another type of weights than {first_field} ({dtypes[0]}); save both in one"
        yield Fault(field, str(dtypes[1]), remedy)
