"""The union of several models' vocabularies, by byte strings: tokenizer, embeddings and heads."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upcycle_core.backbone.weights import checked_weights
from upcycle_core.checkpoints.copy import TEMPLATES
from upcycle_core.checkpoints.reader import CHUNK
from upcycle_core.checkpoints.vocabulary import (
    Key,
    Vocabulary,
    read_vocabulary,
    rule_faults,
    spell,
)
from upcycle_core.checkpoints.writer import sync_directory, write_json, write_text
from upcycle_core.errors import Fault, InputError, raise_faults

# A character that Unicode keeps out of text: an entry that begins with it is met by no text. The
# decoder takes it off again.
SHIELD = "\ufdd0"
CARRIED = ("special_tokens_map.json", "chat_template.jinja", "chat_template.json", TEMPLATES)


@dataclass(frozen=True, kw_only=True, eq=False)
class Union:
    """All tokens of several tokenizers, each once.

    The ruling model's tokens keep their ids; those of the others follow in the order of their byte
    strings, in whatever order the models come. Rows that a model pads its matrices with are no
    tokens and are left behind, but for those below the ruling model's last token, so that its ids
    stay.

    Args:
        tokens: The byte string of each; None for an id that the ruling model does not use.
        rows: Its row in each model's matrices, -1 where a model lacks it; int64 [models, tokens].
        ruling: Index of the model whose segmentation the result has.
        source: That model's directory.
        core: The result's tokenizer.json.
    """

    tokens: tuple[bytes | None, ...]
    rows: Tensor
    ruling: int
    source: Path
    core: Mapping[str, Any]


def unite_vocabularies(directories: Sequence[Path], *, ruling: int | None = None) -> Union:
    """Match the tokens of several tokenizers: the same are those of the same byte string.

    Byte-level BPE, sentencepiece's spaces and single bytes, and plain strings are read as bytes;
    ids never count. Added tokens that some model calls special are matched by content, and only
    with added tokens.

    Tokens that the ruling model lacks cannot come out of a text, which is cut as that model cuts
    it: in BPE they are entries that no merge makes, and where an entry would be found without a
    merge, they begin with a character that no text has and the decoder removes. Control tokens of
    other models are added as special tokens, so that prompts can name them.

    Args:
        directories: Checkpoints or tokenizers, one a model.
        ruling: Index of the model whose segmentation the result has. It may be left out where the
            rules of all are the same.

    Raises:
        InputError: A tokenizer cannot be read; the rules differ and none was chosen; the ruling
            one cannot spell a token.
    """
    faults: list[Fault] = []
    vocabularies: list[Vocabulary] = []
    for index, directory in enumerate(directories):
        try:
            vocabularies.append(read_vocabulary(directory, field=f"models[{index}].tokenizer"))
        except InputError as error:
            faults += error.faults
    raise_faults(faults)
    if ruling is None:
        raise_faults(rule_faults(vocabularies))
        ruling = 0
    if not 0 <= ruling < len(vocabularies):
        remedy = f"is no model; give an index below {len(vocabularies)}"
        raise InputError(Fault("ruling", ruling, remedy))
    controls = {t.content for v in vocabularies for t in v.tokens if t.special}
    tables = [vocabulary.rows(controls) for vocabulary in vocabularies]
    places = _places(tables, ruling)
    size = max(places.values()) + 1
    tokens: list[bytes | None] = [None] * size
    for key, place in places.items():
        tokens[place] = key.text
    rows = torch.full((len(tables), size), -1, dtype=torch.int64)
    for row, table in zip(rows, tables, strict=True):
        row[[places[key] for key in table]] = torch.tensor(list(table.values()))
    unused = torch.tensor([token is None for token in tokens])
    rows[ruling][unused] = torch.arange(size)[unused]
    return Union(
        tokens=tuple(tokens),
        rows=rows,
        ruling=ruling,
        source=vocabularies[ruling].directory,
        core=_extended(vocabularies[ruling], places, tables[ruling]),
    )


def merge_rows(
    union: Union,
    matrices: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    naive: bool = False,
    field: str = "rows",
) -> Tensor:
    """Merge matrices with one row a token: embeddings, or heads.

    The row of a token is the mean over the models that have it, sum w x / sum w, summed in fp32
    (fp64 for fp64) in the order of the models and cast back. A row that one model alone has is
    copied, bit for bit, whatever its weight. Models of weight 0 count only where no other has the
    token.

    ``naive`` is the ablation of Symphony-MoE's Table 3, which the paper does not define for tokens
    that some models lack: here a missing row counts as zeros, so that the row of a token which one
    of N equal models has comes out N times smaller, and those that all have come out the same.

    Works through the rows in pieces: beside matrices and result, about 32 MB are held.

    Args:
        union: Whose rows they are.
        matrices: [rows, width], one a model, of one width and type. Rows beyond a model's tokens
            are not read.
        weights: Not negative, one a model; equal by default.
        naive: Whether missing rows count as zeros.
        field: How errors name the matrix.

    Returns:
        [tokens of the union, width], in the matrices' type.

    Raises:
        InputError: The matrices do not belong to the models, or to each other.
    """
    raise_faults(_matrix_faults(union, matrices, field))
    first = matrices[0]
    given = checked_weights(len(matrices), weights, field)
    exact = torch.promote_types(first.dtype, torch.float32)
    shares = torch.tensor(given, dtype=exact, device=first.device)
    result = first.new_empty((len(union.tokens), first.shape[1]))
    step = max(1, CHUNK // max(1, first.shape[1]))
    for out, rows in zip(result.split(step), union.rows.split(step, dim=1), strict=True):
        rows = rows.to(first.device)
        has = (rows >= 0).to(exact)
        share = has * shares[:, None]  # [models, rows of this piece]
        share = torch.where(share.sum(dim=0) > 0, share, has)
        total = torch.zeros(out.shape, dtype=exact, device=first.device)
        for matrix, row, w in zip(matrices, rows, share, strict=True):
            at = torch.nonzero(row >= 0).flatten()
            total.index_add_(0, at, matrix[row[at]].to(exact) * w[at, None])
        out.copy_(total / (shares.sum() if naive else share.sum(dim=0)[:, None]))
        if naive:
            continue
        alone = has.sum(dim=0) == 1
        for matrix, row in zip(matrices, rows, strict=True):
            at = torch.nonzero(alone & (row >= 0)).flatten()
            out[at] = matrix[row[at]]
    return result


def write_union_tokenizer(union: Union, out: Path) -> None:
    """Write the tokenizer of the union; roles, template and settings are the ruling model's.

    Files that say the same in an older form (vocab.json, merges.txt, tokenizer.model) are left
    behind: they would lack the tokens of the others.

    Args:
        union: From ``unite_vocabularies``.
        out: The directory; made if it is not there.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(union.core, ensure_ascii=False, indent=2)
    write_text(out / "tokenizer.json", text + "\n")
    path = union.source / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = {key: value for key, value in config.items() if key != "auto_map"}  # code left behind
    # The one class that takes tokenizer.json as it is; others rebuild parts of it.
    kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(out / "tokenizer_config.json", kept)
    for file in sorted(file for pattern in CARRIED for file in union.source.glob(pattern)):
        target = out / file.relative_to(union.source)
        target.parent.mkdir(exist_ok=True)
        write_text(target, file.read_text(encoding="utf-8"))
    sync_directory(out)


def _places(tables: Sequence[Mapping[Key, int]], ruling: int) -> dict[Key, int]:
    """The id of every token in the union."""
    places = dict(tables[ruling])
    new = sorted(set().union(*tables) - places.keys())
    return places | {key: id for id, key in enumerate(new, max(places.values(), default=-1) + 1)}


def _extended(
    ruler: Vocabulary, places: Mapping[Key, int], known: Mapping[Key, int]
) -> dict[str, Any]:
    """The ruler's tokenizer.json with the tokens that it does not know."""
    new = [(key, id) for key, id in places.items() if key not in known]
    raise_faults(_spelling_faults(ruler, [key for key, _ in new]))
    entries = {token.content: token.id for token in ruler.tokens}
    added = list(ruler.core.get("added_tokens") or ())
    for key, id in new:
        content = key.text.decode() if key.control else spell(key.text, ruler.spelling) or ""
        hidden = Key(key.text) in places if key.control else _found_unmerged(ruler, content)
        while hidden or content in entries:
            content, hidden = SHIELD + content, False
        entries[content] = id
        if key.control and not content.startswith(SHIELD):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": id, "content": content, **flags, "special": True})
    core = {**ruler.core, "added_tokens": added}
    # Added tokens stand in the vocabulary too: the reader numbers those that do not by itself.
    core["model"] = {**ruler.core["model"], "vocab": _vocabulary(ruler, entries)}
    if core.get("decoder") and any(content.startswith(SHIELD) for content in entries):
        core["decoder"] = _unshielding(core["decoder"])
    return core


def _found_unmerged(ruler: Vocabulary, content: str) -> bool:
    """Whether the ruler would find such an entry in a text though no merge makes it."""
    model = ruler.core["model"]
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    looked_up = model["type"] != "BPE" or model.get("ignore_merges") or affixes
    return bool(looked_up) or len(content) < 2


def _spelling_faults(ruler: Vocabulary, keys: Sequence[Key]) -> Iterator[Fault]:
    bad = [k.text for k in keys if not k.control and spell(k.text, ruler.spelling) is None]
    if bad:
        remedy = f"rules, yet has no way to spell {len(bad)} tokens of other models, such as "
        remedy += f"{bad[0]!r}; let a model with byte-level BPE rule"
        yield Fault(ruler.field, str(ruler.directory), remedy)


def _vocabulary(ruler: Vocabulary, entries: Mapping[str, int]) -> dict[str, int] | list:
    """The entries in the form of the ruler's model."""
    vocab = ruler.core["model"]["vocab"]
    if isinstance(vocab, dict):
        return dict(sorted(entries.items(), key=lambda entry: entry[1]))
    # Unigram numbers its pieces; the lowest score there is leaves that of unknown text as it is.
    lowest = min(score for _, score in vocab)
    contents = {id: content for content, id in entries.items()}
    rest = range(len(vocab), max(contents, default=-1) + 1)
    return [*vocab, *([contents.get(id, f"{SHIELD}{id}"), lowest] for id in rest)]


def _unshielding(decoder: Mapping[str, Any]) -> dict[str, Any]:
    rest = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    remove = {"type": "Replace", "pattern": {"String": SHIELD}, "content": ""}
    return {"type": "Sequence", "decoders": [remove, *rest]}


def _matrix_faults(union: Union, matrices: Sequence[Tensor], field: str) -> Iterator[Fault]:
    if len(matrices) != len(union.rows):
        remedy = f"are not one a model; the union is of {len(union.rows)}"
        raise InputError(Fault(field, f"{len(matrices)} matrices", remedy))
    first = matrices[0]
    for index, (matrix, rows) in enumerate(zip(matrices, union.rows, strict=True)):
        name, shape = f"{field}[{index}]", f"{list(matrix.shape)} {matrix.dtype}"
        fits = matrix.ndim == 2 and matrix.shape[1:] == first.shape[1:]
        if not fits or matrix.dtype != first.dtype:
            remedy = f"differs from the first's {list(first.shape)} {first.dtype} in more than rows"
            yield Fault(name, shape, remedy)
        elif int(rows.max()) >= len(matrix):
            remedy = f"has no row for token {int(rows.max())} of its tokenizer; resize the "
            yield Fault(name, shape, remedy + "model's embedding, or remove the token")
