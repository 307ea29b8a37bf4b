"""What a recipe is about, from the headers of its models and the sizes of its files."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from infra.recipe.schema import Recipe
from tasks.data.adapters import adapter_faults, linears_of
from tasks.data.fits import fit_faults, type_faults
from tasks.data.given import SEED_FIELD, given_fields, given_model
from tasks.data.lengths import position_faults
from tasks.methods import METHODS
from tasks.planning.parts import Subjects, in_type
from tasks.symphony.variants import section
from upcycle_core.architectures.compare import compare_configs
from upcycle_core.architectures.headers import architecture_faults, header_faults
from upcycle_core.checkpoints.reader import CheckpointReader, weight_files
from upcycle_core.corpora.config import Domain, Source
from upcycle_core.corpora.sources import source_files
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.given.adapter import ADAPTER_CONFIG, Adapter, adapter_settings, is_adapter
from upcycle_core.given.resolve import GGUF, absent_base, gguf_path
from upcycle_core.planning.shape import Shape

CONFIG = "config.json"
BYTES = 256
"""Tokens that every tokenizer has which is trained here."""
FP32 = 4
NOT_TO_BE_HAD = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)
"""What the hub's client raises."""


def subjects_of(recipe: Recipe, cache: Path) -> Subjects:
    """The shape of a recipe's models, and how much text its domains have.

    Args:
        recipe: With a seed that is given or made, or ready experts.
        cache: Where models are kept that come from the hub or the registry.

    Raises:
        InputError: A model's config.json cannot be read; models cannot become one; an adapter is to
            be trained of layers that are not there.
    """
    texts = {name: _texts(recipe, domain) for name, domain in recipe.domains.items()}
    splits: dict[str, Any] = {
        split: {name: sizes[split] for name, sizes in texts.items()}
        for split in ("text", "calibration", "heldout")
    }
    if METHODS[recipe.method].has_seed:
        shape = _shape(recipe, cache)
        raise_faults(adapter_faults(recipe, linears_of(shape.config)))
        return Subjects(shape, **splits)
    shape = _shape_of_strangers(recipe, cache)
    return Subjects(shape, vocabulary=_union(recipe, shape), **splits)


def _texts(recipe: Recipe, domain: Domain) -> dict[str, int]:
    """Bytes of a domain's texts: all, and those of two splits, which may be shares of the first."""
    train, calibration, heldout, elsewhere = (
        _bytes(source, recipe.text_folder)
        for source in (domain.train, domain.calibration, domain.heldout, domain.elsewhere)
    )
    shares = recipe.corpus
    return {
        "text": train + calibration + heldout + elsewhere,
        "calibration": calibration if domain.calibration else int(shares.calibration_share * train),
        "heldout": heldout if domain.heldout else int(shares.heldout_share * train),
    }


def _shape(recipe: Recipe, cache: Path) -> Shape:
    fields = list(given_fields(recipe))
    if not fields:
        raise_faults(fit_faults(recipe, None))
        return _made_here(recipe)
    first = SEED_FIELD if SEED_FIELD in fields else fields[0]
    shapes = _shapes(recipe, cache, needed=[first])
    return _in_one_type(shapes[first], list(shapes.values()))


def _shapes(recipe: Recipe, cache: Path, *, needed: Collection[str]) -> dict[str, Shape]:
    """{field of the recipe: the shape of the model that it names}

    Args:
        recipe: The recipe.
        cache: Where models are kept.
        needed: Fields whose models must be read; of the others those are left out that would have
            to be fetched, converted or merged for it.

    Raises:
        InputError: With all that keeps models from being read, or from becoming one
            in the type that is asked for.
    """
    shapes: dict[str, Shape] = {}
    known: dict[str, Shape] = {}
    faults: list[Fault] = []
    for field, reference in given_fields(recipe).items():
        try:
            own = known.get(reference)
            if own is None and field in needed:
                own = _given(recipe, reference, cache, field)
            elif own is None:
                own = _header(reference, cache, field)
        except InputError as error:
            faults += [fault.within(field) for fault in error.faults]
            continue
        if own is not None:
            shapes[field] = known[reference] = own
    faults += [*_joining_faults(recipe, shapes), *_twice(recipe), *type_faults(recipe)]
    raise_faults(faults)
    return shapes


def _twice(recipe: Recipe) -> Iterator[Fault]:
    """Experts that are one model, as the stage ``sources`` says it of their weights.

    A config.json alone stands for models that are to come.
    """
    known: dict[str | Path, str] = {}
    for name, domain in recipe.domains.items():
        if domain.expert is None:
            continue
        field, folder = f"domains.{name}.expert", Path(domain.expert).expanduser()
        if (folder / CONFIG).is_file() and not any(folder.glob("*.safetensors")):
            continue
        first = known.setdefault(folder.resolve() if folder.exists() else domain.expert, field)
        if first != field:
            remedy = f"is the same model as {first}; give each model once"
            yield Fault(field, domain.expert, remedy)


def _joining_faults(recipe: Recipe, shapes: Mapping[str, Shape]) -> list[Fault]:
    """What the stage ``sources`` will say of the models together, by the rule of the method."""
    method, configs = METHODS[recipe.method], {f: shape.config for f, shape in shapes.items()}
    faults = [*position_faults(recipe, method.lengths(recipe), configs)]
    if method.has_seed:
        faults += compare_configs(configs)
        return faults or [*fit_faults(recipe, next(iter(configs.values()), None))]
    one_rope = section(recipe).rope == "same"
    return compare_configs(configs, of_one_seed=False, one_rope=one_rope) + faults


def _in_one_type(shape: Shape, shapes: Sequence[Shape]) -> Shape:
    """The shape in the narrowest type that holds all, as ``upcycle_core.backbone.form`` has it.

    Tensors of several types in one model are held by fp32.
    """
    types = [own.dtype or torch.float32 for own in shapes]
    return in_type(shape, reduce(torch.promote_types, types))


def _shape_of_strangers(recipe: Recipe, cache: Path) -> Shape:
    """Of any of them: they agree in all but their vocabularies, of which the largest counts."""
    given = given_fields(recipe)
    shapes = list(_shapes(recipe, cache, needed=given).values())
    if len(given) < len(recipe.domains):
        own = [d.origin and d.origin.vocabulary_size for d in recipe.domains.values()]
        largest = max(size or recipe.tokenizer.vocabulary_size for size in own)
        shapes.append(_made_here(recipe).with_vocabulary(largest))
    return _in_one_type(max(shapes, key=lambda shape: shape.vocabulary), shapes)


def _union(recipe: Recipe, shape: Shape) -> int:
    """Tokens of all models together, at most: those that are trained here share their bytes."""
    own = {
        origin.vocabulary_size
        for domain in recipe.domains.values()
        if (origin := domain.origin) is not None and origin.vocabulary_size is not None
    }
    return shape.vocabulary + sum(max(0, size - BYTES) for size in own)


def _given(
    recipe: Recipe, reference: str, cache: Path, field: str, *, is_base: bool = False
) -> Shape:
    if _is_converted(reference):
        return _of_header(recipe, reference, cache, field)
    try:
        return _shape_of(reference, cache, field)
    except NOT_TO_BE_HAD as error:
        base = None if is_base else _base_on_hub(recipe, reference, cache)
        if base is not None:
            return _given(recipe, base, cache, field, is_base=True)
        remedy = "its config.json is neither on this disk nor to be had from the hub "
        remedy += (
            f"({type(error).__name__}); name a folder that holds a config.json, weights or not"
        )
        raise InputError(Fault(field, reference, remedy)) from error


def _base_on_hub(recipe: Recipe, reference: str, cache: Path) -> str | None:
    """What an adapter of the hub is merged into, by its settings; None of what is none there."""
    try:
        file = Path(hf_hub_download(reference, ADAPTER_CONFIG, cache_dir=cache))
    except NOT_TO_BE_HAD:
        return None
    seed = recipe.seed_model.model
    own: str | None = adapter_settings(file.parent).get("base_model_name_or_path") or None
    return own if seed in (None, reference) else seed


def _of_header(recipe: Recipe, reference: str, cache: Path, field: str) -> Shape:
    """What a GGUF file becomes, or an adapter, whose base this is in its type; of the registry, a
    version as it lies there."""
    if reference.endswith(GGUF):
        from upcycle_core.given.gguf_file import open_gguf  # imports transformers

        file = open_gguf(gguf_path(reference, cache))
        shape = Shape.of_config(file.config, file.dtype.itemsize, field=field)
        return replace(shape, dtype=file.dtype)
    folder, seed = Path(reference).expanduser(), recipe.seed_model.model
    if is_adapter(folder):
        base = Adapter(folder).base_name if seed in (None, reference) else seed
        if base is not None and not is_adapter(Path(base).expanduser()):  # else said when resolved
            return _of_base(recipe, reference, base, cache, field)
    return _seen(given_model(recipe, reference, cache), field)


def _of_base(recipe: Recipe, reference: str, base: str, cache: Path, field: str) -> Shape:
    """That of what an adapter is merged into."""
    try:
        return _given(recipe, base, cache, field, is_base=True)
    except InputError as error:
        faults = (
            replace(fault, value=reference, remedy=absent_base(base, fault.remedy))
            if fault.value == base
            else fault
            for fault in error.faults
        )
        raise InputError(*faults) from error


def _shape_of(reference: str, cache: Path, field: str) -> Shape:
    """That of a folder, or of what the hub has by that name: of its config.json, where the rest is
    to be fetched, or was not to its end."""
    folder = _with_config(reference, cache)
    if folder != Path(reference).expanduser():
        try:
            CheckpointReader(folder, field=field)
        except InputError:
            return _stand_in(folder, field)
    return _seen(folder, field)


def _seen(directory: Path, field: str) -> Shape:
    """The shape of a checkpoint, or of a config.json alone, which stands for one that is to come.

    Raises:
        InputError: With all that is wrong with it by itself, as the stage ``sources`` says it.
    """
    _, _, faults = weight_files(directory, field)
    if any(fault.value == str(directory) for fault in faults):  # no file of weights at all
        return _stand_in(directory, field)
    reader = CheckpointReader(directory, field=field)  # says what else is wrong with its files
    raise_faults(header_faults(reader, field))
    return Shape.of_reader(reader)


def _stand_in(directory: Path, field: str) -> Shape:
    shape = Shape.of_config_alone(directory, field=field)
    raise_faults(architecture_faults(shape.config, field))
    return shape


def _header(reference: str, cache: Path, field: str) -> Shape | None:
    """Of a model beside the first; None where it would have to be converted or merged for it, as a
    GGUF file or an adapter, whose type is its base's."""
    if _is_converted(reference):
        return None
    try:
        return _shape_of(reference, cache, field)
    except HFValidationError as error:
        remedy = "is no directory, and no name that a hub could have; mend the path"
        raise InputError(Fault(field, reference, remedy)) from error
    except NOT_TO_BE_HAD:
        return None


def _is_converted(reference: str) -> bool:
    folder = Path(reference).expanduser()
    is_elsewhere = folder.exists() or ":" in reference or reference.endswith(GGUF)
    return is_elsewhere and not (folder / CONFIG).is_file()


def _with_config(reference: str, cache: Path) -> Path:
    """The folder of its config.json, which is fetched from the hub if it is not there."""
    folder = Path(reference).expanduser()
    if (folder / CONFIG).is_file():
        return folder
    return Path(hf_hub_download(reference, CONFIG, cache_dir=cache)).parent


def _made_here(recipe: Recipe) -> Shape:
    """Of a seed with random weights."""
    shape = recipe.seed_model.shape
    config: dict[str, Any] = {
        "model_type": shape.family,
        "vocab_size": recipe.tokenizer.vocabulary_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.attention_heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.hidden_size // shape.attention_heads,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_embeddings,
    }
    return Shape.of_config(config, FP32)


def _bytes(source: Source | None, folder: Path | None) -> int:
    """What is read of a text; 0 where that is not known before it is read."""
    if source is None:
        return 0
    if not source.files:
        return source.max_bytes or 0
    try:
        there = sum(path.stat().st_size for path in source_files(source, folder).values())
    except (InputError, OSError):  # said by who reads it
        return source.max_bytes or 0
    return min(there, source.max_bytes) if source.max_bytes else there
