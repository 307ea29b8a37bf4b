"""One form for models that are joined: type of weights, length, vocabulary, rope, head.

V rows of the embedding, H hidden size, n rows that a model gets.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from upcycle_core.architectures.families import family_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD, RECOMPUTED, rope_fields
from upcycle_core.architectures.resolve import FIRST_LENGTH
from upcycle_core.backbone.write import Plan, write_model
from upcycle_core.checkpoints.copy import copy_checkpoint
from upcycle_core.checkpoints.given_as import given_as, write_given_as
from upcycle_core.checkpoints.load import DTYPES
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import TokenIds, copy_tokenizer
from upcycle_core.checkpoints.writer import write_json

DtypeChoice = Literal["auto", "fp32", "bf16", "fp16"]
FORM, ROWS, TOKENIZER = "form.json", "rows.safetensors", "tokenizer"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What one checkpoint is made into, so that it fits the others.

    Args:
        dtype: Type of its weights.
        config: Attributes of config.json that are other than its own.
        rows: Name of a tensor (embedding, head) to the rows [n, H] that it gets, fp32.
        ids: Which rows those are.
        tokenizer: Directory of the tokenizer that it gets; None for its own.
        said: What that changes, for people.
    """

    dtype: torch.dtype
    config: Mapping[str, object] = field(default_factory=dict)
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    tokenizer: Path | None = None
    said: tuple[str, ...] = ()

    def save(self, directory: Path) -> None:
        """Write it, with the tokenizer, so that it can be read where the others are not."""
        directory.mkdir(parents=True)
        name = str(self.dtype).removeprefix("torch.")
        content = {"dtype": name, "config": self.config, "ids": self.ids, "said": self.said}
        write_json(directory / FORM, content)
        if self.rows:
            save_file(dict(self.rows), directory / ROWS)
        if self.tokenizer is not None:
            copy_tokenizer(self.tokenizer, directory / TOKENIZER)

    @classmethod
    def load(cls, directory: Path) -> "Form":
        """Read what ``save`` wrote."""
        content = json.loads((directory / FORM).read_text())
        rows, tokenizer = directory / ROWS, directory / TOKENIZER
        return cls(
            dtype=getattr(torch, content["dtype"]),
            config=content["config"],
            rows=load_file(rows) if rows.is_file() else {},
            ids=tuple(content["ids"]),
            tokenizer=tokenizer if tokenizer.is_dir() else None,
            said=tuple(content["said"]),
        )


def common_forms(
    readers: Mapping[str, CheckpointReader],
    tokens: Mapping[str, TokenIds],
    *,
    dtype: DtypeChoice = "auto",
    rope_of: str | None = None,
    own_heads: bool = False,
) -> dict[str, Form]:
    """The form that each of several models is brought into; ``compare`` found no fault in them.

    The type of weights is the narrowest that holds all of theirs, or what is asked for. The length
    is the shortest. Where one head is not tied, none is. Where tokenizers are given, all get the
    one that has every token, with its template and its special tokens: the row of a token that a
    model does not know, or without a token, is the mean over the models that know or have it.

    Args:
        readers: Checkpoints by name.
        tokens: Their tokenizers' ids, for models of one vocabulary; empty for strangers.
        dtype: Type of the weights.
        rope_of: Name of the model whose rope all get; by default they agree already.
        own_heads: Whether all get a head of their own, though none may have one.
    """
    if not readers:
        return {}
    full = {n: family_of(r.config).resolve(r.config) for n, r in readers.items()}
    types = {name: _types(reader) for name, reader in readers.items()}
    every = [kind for own in types.values() for kind in own]
    common = reduce(torch.promote_types, every) if dtype == "auto" else DTYPES[dtype]
    length = min(config["max_position_embeddings"] for config in full.values())
    tied = not own_heads and all(config["tie_word_embeddings"] for config in full.values())
    size = max(config["vocab_size"] for config in full.values()) if tokens else None
    holder = holder_of(tokens) if tokens else None
    forms = {}
    for name, own in types.items():
        config: dict[str, object] = {}
        rope = full[name if rope_of is None else rope_of]["rope_parameters"]
        if full[name]["max_position_embeddings"] != length or rope != full[name]["rope_parameters"]:
            config |= {"max_position_embeddings": length, **rope_fields(rope)}
        if full[name]["tie_word_embeddings"] != tied:
            config["tie_word_embeddings"] = tied
        if own != {common}:
            config["dtype"] = config["torch_dtype"] = _named({common})
        if size not in (None, full[name]["vocab_size"]):
            config["vocab_size"] = size
        said = _changes(config, full[name], own, common)
        rows: dict[str, torch.Tensor] = {}
        ids: tuple[int, ...] = ()
        tokenizer = None
        if holder is not None and size is not None:
            ids = _missing(tokens, name, full[name]["vocab_size"], size)
            heads = [EMBEDDING, *[LM_HEAD] * (not tied)] if ids else []
            rows = {head: _mean_rows(readers, tokens, head, ids) for head in heads}
            if tokens[name].ids != tokens[holder].ids:
                tokenizer = readers[holder].directory
                new = len(tokens[holder].ids) - len(tokens[name].ids)
                said.append(f"{new} tokens that {holder} added")
        forms[name] = Form(
            dtype=common, config=config, rows=rows, ids=ids, tokenizer=tokenizer, said=tuple(said)
        )
    return forms


def holder_of(tokens: Mapping[str, TokenIds]) -> str:
    """Whose tokenizer has every token, of models of one vocabulary."""
    return max(tokens, key=lambda name: len(tokens[name].ids))


def write_in_form(
    source: Path, form: Form, out: Path, *, max_shard_bytes: int, link: bool = False
) -> None:
    """Copy a checkpoint into ``out``, in its form; to the byte where that changes nothing.

    One tensor at a time is held.

    Args:
        source: The checkpoint.
        form: What it becomes.
        out: The directory that is written.
        max_shard_bytes: Size of one safetensors file.
        link: Whether weights that nothing changes are ``source``'s own files, see
            ``copy_checkpoint``.
    """
    if not (form.config or form.ids or form.tokenizer):
        copy_checkpoint(source, out, link=link)
        return
    reader = CheckpointReader(source)
    config = {**reader.config, **form.config}
    if "rope_parameters" in form.config:  # explicit now; older fields stand beside it
        for name in ("partial_rotary_factor", FIRST_LENGTH):
            config.pop(name, None)
    shapes = family_of(config).tensors(config)
    untied = LM_HEAD in shapes and LM_HEAD not in reader.tensors

    def produce(name: str) -> torch.Tensor:
        tensor = reader.tensor(EMBEDDING if name == LM_HEAD and untied else name)
        if form.ids and name in (EMBEDDING, LM_HEAD):
            grown = torch.zeros(shapes[name], dtype=tensor.dtype)
            grown[: len(tensor)] = tensor
            grown[list(form.ids)] = form.rows[name].to(tensor.dtype)
            tensor = grown
        return tensor.to(form.dtype)

    plan: Plan = {
        name: (shape, form.dtype, partial(produce, name)) for name, shape in shapes.items()
    }
    write_model(out, plan, config, source=reader, max_shard_bytes=max_shard_bytes)
    if form.tokenizer is not None:
        copy_tokenizer(form.tokenizer, out)
    write_json(out / FORM, {"said": form.said})
    if (said := given_as(source)) is not None:
        write_given_as(out, said)


def changes(checkpoint: Path) -> list[str]:
    """What ``write_in_form`` changed in a checkpoint that it wrote, for people."""
    path = checkpoint / FORM
    return json.loads(path.read_text())["said"] if path.is_file() else []


def _types(reader: CheckpointReader) -> set[torch.dtype]:
    """Types of a checkpoint's weights."""
    weights = (i for n, i in reader.tensors.items() if RECOMPUTED.fullmatch(n) is None)
    return {info.dtype for info in weights}


def _changes(
    config: Mapping[str, object],
    before: Mapping[str, Any],
    types: set[torch.dtype],
    common: torch.dtype,
) -> list[str]:
    """What a model's new configuration and type of weights change, for people."""
    implied = ("torch_dtype", "rope_theta", "rope_scaling")
    changed = [k for k in config if k not in implied and config[k] != before.get(k)]
    said = [_change(key, before.get(key), config[key]) for key in changed]
    return said + [f"weights of {_named(types)} -> {_named({common})}"] * (len(types) > 1)


def _named(kinds: set[torch.dtype]) -> str:
    """Types as config.json names them."""
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def _change(key: str, old: object, new: object) -> str:
    if key == "max_position_embeddings":
        return f"{key}: {old} -> {new}, the smallest of all models counts"
    return f"{key}: {old} -> {new}"


def _missing(tokens: Mapping[str, TokenIds], name: str, own: int, size: int) -> tuple[int, ...]:
    """Rows of the whole vocabulary that a model of ``own`` rows lacks, or has without a token."""
    known = set(tokens[name].ids.values())
    union = set().union(*(set(one.ids.values()) for one in tokens.values()))
    return tuple(sorted((union - known) | set(range(own, size))))


def _mean_rows(
    readers: Mapping[str, CheckpointReader],
    tokens: Mapping[str, TokenIds],
    head: str,
    ids: Sequence[int],
) -> torch.Tensor:
    """[n, H] fp32: the mean row of each id, over who knows its token, else over who has the row."""
    matrices = {
        name: reader.tensor(head if head in reader.tensors else EMBEDDING)
        for name, reader in readers.items()
    }
    known = {name: set(one.ids.values()) for name, one in tokens.items()}
    rows = []
    for id in ids:
        holders = [n for n in readers if id in known[n]]
        holders = holders or [n for n in readers if id < len(matrices[n])]
        rows.append(torch.stack([matrices[n][id].float() for n in holders]).mean(0))
    return torch.stack(rows)
