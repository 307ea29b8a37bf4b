"""Whether models can become one: everything that speaks against it, in one list."""

import math
from collections.abc import Collection, Iterator, Mapping

import torch

from upcycle_core.architectures.families import FAMILIES, family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD, RECOMPUTED
from upcycle_core.architectures.headers import header_faults
from upcycle_core.checkpoints.reader import CheckpointReader, chunks
from upcycle_core.checkpoints.tokenizer import TokenIds
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
# What need not agree here: it is brought into one form before models are joined (backbone.form).
_BROUGHT = {"vocab_size", "max_position_embeddings", "tie_word_embeddings"}
OF_ONE_SEED = "use experts of one seed model"
OF_ONE_SHAPE = (
    "only models of one architecture, shape and rope can be aligned; choose another model"
)
# Types of rope whose frequencies follow from max_position_embeddings.
_ROPES_OF_A_LENGTH = ("dynamic", "longrope")
# What transformers takes where a type of rope says nothing, or null.
_ROPE_DEFAULTS: Mapping[object, Mapping[str, float]] = {"yarn": {"beta_fast": 32, "beta_slow": 1}}


def compare_experts(
    readers: Mapping[str, CheckpointReader],
    tokens: Mapping[str, TokenIds],
    *,
    ready: Collection[str] | None = None,
) -> list[Fault]:
    """Find everything that keeps these experts from becoming one model.

    Reads every weight once. The first expert is what the others are compared to. Types of weights,
    lengths, added tokens and tied heads may differ: ``backbone.form`` brings them together.

    Args:
        readers: Checkpoints by the name that faults give them (``experts.law``).
        tokens: What their tokenizers' ids mean, by the same names; one that is not there is not
            compared.
        ready: Names of those that become experts; all by default. The seed may equal one.

    Returns:
        All faults, none if the experts fit.
    """
    faults: list[Fault] = []
    first: str | None = None
    configs = {field: reader.config for field, reader in readers.items()}
    for field, reader in readers.items():
        faults += _own_faults(reader, field)
        if field in tokens:
            faults += _row_faults(reader, max(tokens[field].ids.values(), default=-1), field)
        if first is None:
            first = field
            continue
        faults += _differences(configs, first, field, MUST_AGREE, OF_ONE_SEED)
    return [*faults, *_token_faults(readers, tokens), *_twice(readers, ready)]


def compare_strangers(
    readers: Mapping[str, CheckpointReader],
    readable: Collection[str],
    *,
    ready: Collection[str] | None = None,
    one_rope: bool = True,
) -> list[Fault]:
    """Find everything that keeps models without a common seed from becoming one (Symphony-MoE).

    Architecture, shape and rope must agree as with ``compare_experts``; vocabularies need not, and
    a head may be tied or not. Reads every weight once, and again only those of models that begin
    alike.

    Args:
        readers: Checkpoints by the name that faults give them (``domains.law.expert``).
        readable: Names of those whose tokenizers can be read. Others are not looked at.
        ready: Names of those that are joined as they are; all by default. One model may be what
            several others are fine-tuned from.
        one_rope: Whether ropes must agree.

    Returns:
        All faults, none if the models fit.
    """
    faults: list[Fault] = []
    fields, agree = list(readers), _agree_of_strangers(one_rope)
    configs = {field: reader.config for field, reader in readers.items()}
    for at, field in enumerate(fields):
        faults += _own_faults(readers[field], field)
        faults += _norm_faults(configs[field], field)
        if field in readable:
            faults += _vocabulary_faults(readers[field], field)
        if at:
            faults += _differences(configs, fields[0], field, agree, OF_ONE_SHAPE)
    return [*faults, *_twice(readers, ready)]


def compare_configs(
    configs: Mapping[str, Mapping], *, of_one_seed: bool = True, one_rope: bool = True
) -> list[Fault]:
    """Find what config.json alone says against models becoming one: no weight is read.

    It is what ``compare_experts`` and ``compare_strangers`` say of that, except what the stock
    classes say of each, which are slow to import.

    Args:
        configs: Contents of config.json, of known families, by the names that faults give them.
        of_one_seed: Whether they are experts of one seed, or strangers.
        one_rope: Whether ropes of strangers must agree.

    Returns:
        All faults, none if nothing is known to speak against it.
    """
    faults: list[Fault] = []
    agree = MUST_AGREE if of_one_seed else _agree_of_strangers(one_rope)
    advice = OF_ONE_SEED if of_one_seed else OF_ONE_SHAPE
    for field, config in configs.items():
        faults += family_of(config).config_faults(config, field)
        if not of_one_seed:
            faults += _norm_faults(config, field)
        if (first := next(iter(configs))) != field:
            faults += _differences(configs, first, field, agree, advice)
    return faults


def _agree_of_strangers(one_rope: bool) -> dict[str, str]:
    """What must be equal of models without a common seed."""
    without = {"tie_word_embeddings"} if one_rope else {"tie_word_embeddings", "rope_parameters"}
    return {name: what for name, what in MUST_AGREE.items() if name not in without}


def _norm_faults(config: Mapping, field: str) -> Iterator[Fault]:
    """Norms that strangers cannot have."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and not family.norms_first:
        remedy = "has its norms behind attention and FFN, and Symphony-MoE folds norms into "
        remedy += "what reads them; join experts of one seed, with DUME, or use another family"
        yield Fault(f"{field}.config.model_type", family.model_type, remedy)


def _own_faults(reader: CheckpointReader, field: str) -> Iterator[Fault]:
    """What is wrong with one expert by itself."""
    yield from header_faults(reader, field, values=True)
    for name in reader.non_finite:
        remedy = f"{name} holds NaN or infinity; train or fetch this expert again"
        yield Fault(field, str(reader.directory), remedy)


def _vocabulary_faults(reader: CheckpointReader, field: str) -> Iterator[Fault]:
    """Tokens that are no byte strings, or that the embedding has no row for."""
    try:
        tokens = read_vocabulary(reader.directory, field=f"{field}.tokenizer").tokens
    except InputError as error:
        yield from error.faults
        return
    yield from _row_faults(reader, max((token.id for token in tokens), default=-1), field)


def _row_faults(reader: CheckpointReader, last: int, field: str) -> Iterator[Fault]:
    """An embedding with fewer rows than the tokenizer has ids."""
    rows = reader.tensors[EMBEDDING].shape[0] if EMBEDDING in reader.tensors else None
    if rows is not None and last >= rows:
        remedy = f"{EMBEDDING} has {rows} rows, and the tokenizer's last token is {last}; resize "
        remedy += "the model's embedding, or remove tokens that it does not know"
        yield Fault(f"{field}.tokenizer", str(reader.directory), remedy)


def _token_faults(
    readers: Mapping[str, CheckpointReader], tokens: Mapping[str, TokenIds]
) -> Iterator[Fault]:
    """Ids that mean different things, or added tokens that no one tokenizer has all of."""
    fields = [field for field in readers if field in tokens]
    clash = False
    union: dict[str, int] = {}
    for field in fields:
        found = _clash(tokens[fields[0]], union, tokens[field])
        if found is not None:
            clash = True
            remedy = f"another vocabulary than {fields[0]}: {found}; the same tokens must have the "
            remedy += "same ids: use experts of one seed model with its tokenizer"
            yield Fault(f"{field}.tokenizer", str(readers[field].directory), remedy)
        else:
            union |= tokens[field].ids
    if fields and not clash and all(len(tokens[field].ids) < len(union) for field in fields):
        remedy = "no one tokenizer has the tokens that all of them added; add them all to one of "
        remedy += "the experts (add_tokens, resize_token_embeddings), at the ids that they have"
        yield Fault(f"{fields[0]}.tokenizer", str(readers[fields[0]].directory), remedy)


def _clash(first: TokenIds, known: Mapping[str, int], other: TokenIds) -> str | None:
    """The first thing that a tokenizer means differently; what one alone has is no clash."""
    if first.kind != other.kind or first.merges != other.merges:
        return "its model or its merges differ"
    at_ids = {id: token for token, id in known.items()}
    for token, id in sorted(other.ids.items(), key=lambda pair: pair[1]):
        if known.get(token, id) != id:
            return f"{token!r} is {id} here and {known[token]} there"
        if at_ids.get(id, token) != token:
            return f"id {id} is {token!r} here and {at_ids[id]!r} there"
    return None


def _twice(
    readers: Mapping[str, CheckpointReader], ready: Collection[str] | None
) -> Iterator[Fault]:
    """Models that are given more than once."""
    fields = [field for field in readers if ready is None or field in ready]
    for at, field in enumerate(fields):
        same = next((f for f in fields[:at] if _same_model(readers[f], readers[field])), None)
        if same is not None:
            remedy = (
                f"is the same model as {same} ({readers[same].directory}); give each model once"
            )
            yield Fault(field, str(readers[field].directory), remedy)


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

    # FFNs first, for some experts differ in them alone; then small ones.
    def order(name: str) -> tuple[bool, int]:
        return ".mlp." not in name, math.prod(first.tensors[name].shape)

    shared = sorted(names[0] & names[1], key=order)

    def is_same() -> bool:
        return all(_equal(first.tensor(name), other.tensor(name)) for name in shared)

    return first.fact("same weights", is_same, other)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, though in different types."""
    pieces = zip(chunks(one), chunks(other), strict=False)
    return one.shape == other.shape and all(torch.equal(a.double(), b.double()) for a, b in pieces)


def _differences(
    configs: Mapping[str, Mapping],
    first_field: str,
    field: str,
    must_agree: Mapping[str, str],
    advice: str,
) -> Iterator[Fault]:
    """What two models do not agree on."""
    first, other = configs[first_field], configs[field]
    types = (first.get("model_type"), other.get("model_type"))
    if types[0] != types[1]:
        remedy = f"another architecture than {first_field} ({types[0]}); use one family"
        yield Fault(f"{field}.config.model_type", types[1], remedy)
        return
    try:
        family = family_of(first)
        ours, theirs = family.resolve(first), family.resolve(other)
    except InputError:
        return  # said already, of the expert that it is about
    for name, what in must_agree.items():
        is_length = name == "max_position_embeddings"
        if name in _BROUGHT and not (is_length and has_length(ours, theirs)):
            continue
        if computed(ours.get(name)) != computed(theirs.get(name)):
            remedy = f"another {what} than {first_field} ({ours.get(name)!r})"
            remedy += f"; {advice}"
            if name == "rope_parameters" and must_agree.keys() != MUST_AGREE.keys():
                remedy += ", or take the anchor's for all: symphony.rope: anchor"
            yield Fault(f"{field}.config.{name}", theirs.get(name), remedy)


def has_length(*configs: Mapping) -> bool:
    """Whether what a rope turns by follows from ``max_position_embeddings`` in any of these."""
    ropes = [config["rope_parameters"] for config in configs]
    # A yarn that says no factor is stretched to that length.
    stretched = (r.get("rope_type") == "yarn" and r.get("factor") is None for r in ropes)
    return any(stretched) or any(r.get("rope_type") in _ROPES_OF_A_LENGTH for r in ropes)


def computed(value: object) -> object:
    """A number as the model computes with it: in fp32; a rope without its kind's older name, and
    with what its kind has where nothing, or null, is said."""
    if isinstance(value, Mapping):
        older = {"type"} if "rope_type" in value else set()  # of transformers before 4.43
        said = {name: own for name, own in value.items() if own is not None and name not in older}
        whole = {**_ROPE_DEFAULTS.get(value.get("rope_type"), {}), **said}
        return {name: computed(own) for name, own in whole.items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return torch.tensor(value, dtype=torch.float32).item() if is_number else value
