"""The texts that a recipe names, and what is wrong with them; nothing heavy is imported for it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from infra.recipe.schema import Recipe
from upcycle_core.checkpoints.hashing import sha256_file
from upcycle_core.checkpoints.known import FILE, KnownFiles
from upcycle_core.corpora.config import Source
from upcycle_core.corpora.sources import missing_patterns, source_faults, source_files
from upcycle_core.errors import Fault

if TYPE_CHECKING:
    from upcycle_core.corpora.tuning.config import InstructionSource

TEXTS = ("train", "calibration", "heldout", "elsewhere")


def known_texts(recipe: Recipe, cache: Path) -> KnownFiles:
    """What is remembered of texts, which are read here, beside the models that are in ``cache``."""
    return KnownFiles(cache / FILE, verify=recipe.verify)


def text_faults(recipe: Recipe, known: KnownFiles | None = None) -> list[Fault]:
    """What is wrong with the texts.

    Args:
        recipe: Names them.
        known: Of ``known_texts``; everything is read by default.
    """
    folder = recipe.text_folder
    named = named_texts(recipe)
    found = [
        fault
        for field, source in named.items()
        for fault in source_faults(source, field, folder, known)
    ]
    return found or [*_same_faults(recipe), *_heldout_faults(recipe)]


def named_texts(recipe: Recipe) -> dict[str, Source]:
    """Every text of a recipe, by its field."""
    named = {
        f"domains.{name}.{part}": source
        for name, domain in recipe.domains.items()
        for part in TEXTS
        if (source := getattr(domain, part)) is not None
    }
    named |= {f"outside.{name}": source for name, source in recipe.outside.items()}
    if recipe.seed_text is not None:
        named["seed_model.text"] = recipe.seed_text
    return named


def absent_texts(recipe: Recipe) -> list[str]:
    """Fields of texts and instructions with a file or pattern that nothing is there of."""
    named: dict[str, Source | InstructionSource] = dict(named_texts(recipe))
    named |= {f"instructions.sources.{n}": s for n, s in recipe.instructions.sources.items()}
    folder = recipe.text_folder
    return [field for field, source in named.items() if missing_patterns(source.files, folder)]


def _same_faults(recipe: Recipe) -> Iterator[Fault]:
    """Text of one domain that is another domain's, to the byte."""
    folder = recipe.text_folder
    for part in TEXTS:
        alike: dict[str, list[str]] = {}
        for name, domain in recipe.domains.items():
            if (source := getattr(domain, part)) is not None:
                # Of a harvest its name says it all; another's files are too many to look at.
                files = {} if source.harvest else source_files(source, folder)
                sizes = sorted(f.stat().st_size for f in files.values())
                how = asdict(replace(source, files=(), max_bytes=None))
                alike.setdefault(json.dumps([sizes, how]), []).append(name)
        for names in alike.values():  # only of these everything is read
            first: dict[str, str] = {}
            for name in names if len(names) > 1 else ():
                source = getattr(recipe.domains[name], part)
                read = json.dumps(sorted(map(sha256_file, source_files(source, folder).values())))
                if (other := first.setdefault(read, name)) != name:
                    remedy = f"is the same text as domains.{other}.{part}; name other text for one"
                    yield Fault(f"domains.{name}.{part}", _given(source), remedy)


def _heldout_faults(recipe: Recipe) -> Iterator[Fault]:
    """Files that are held out though nothing else is there to train on, that train another domain,
    or that are held out for two."""
    earlier: dict[str, set[tuple[str, str]]] = {}
    for name, domain in recipe.domains.items():
        if (source := domain.heldout) is None:
            continue
        held = _places(source, recipe.text_folder)
        field, given = f"domains.{name}.heldout", _given(source)
        train = set() if domain.train is None else _places(domain.train, recipe.text_folder)
        if train and train <= held and source.max_bytes is None:
            remedy = f"is all of domains.{name}.train, too, which would leave nothing to train on; "
            remedy += "name other text, or leave heldout out: a share of train is set aside then"
            yield Fault(field, given, remedy)
        for other, place in _trained_on(recipe, held, but=name):
            remedy = f"{place} trains domains.{other}; hold out other text"
            yield Fault(field, given, remedy)
        for other, places in earlier.items():
            if held != places and (shared := held & places):  # all of it: ``_same_faults``
                remedy = f"{min(shared)[0]} is held out for domains.{other}, too; name it in one"
                yield Fault(field, given, remedy)
        earlier[name] = held


def _trained_on(
    recipe: Recipe, held: set[tuple[str, str]], *, but: str
) -> Iterator[tuple[str, str]]:
    """Other domains that are trained on what is held out, each with one such place."""
    for name, domain in recipe.domains.items():
        if name == but or domain.train is None:
            continue
        if shared := held & _places(domain.train, recipe.text_folder):
            yield name, min(shared)[0]


def _places(source: Source, folder: Path | None) -> set[tuple[str, str]]:
    """Every file that is read, or the dataset, and how."""
    how = json.dumps(asdict(replace(source, files=(), max_bytes=None)))
    files = [str(path.resolve()) for path in source_files(source, folder).values()]
    return {(place, how) for place in files or [str(source.dataset)]}


def _given(source: Source) -> object:
    """What a recipe names, for people."""
    return source.harvest or source.dataset or list(source.files)


def missing_faults(recipe: Recipe) -> list[Fault]:
    """What a recipe names and is not there, where nothing else has to be read to judge it.

    Models that lie there, tasks and instructions are looked at with what reads them: then all
    faults come together, from ``Method.outside``.
    """
    named, gone = _named_models(recipe), gone_models(recipe)
    origins = any(domain.origin and domain.origin.model for domain in recipe.domains.values())
    read = len(named) > len(gone) or origins or recipe.tasks or recipe.instructions.sources
    texts, folder = named_texts(recipe).values(), recipe.text_folder
    if read or not (gone or any(missing_patterns(text.files, folder) for text in texts)):
        return []
    return [*text_faults(recipe), *gone]


def gone_models(recipe: Recipe) -> list[Fault]:
    """Models that a recipe names by a path where nothing is."""
    return [
        Fault(field, model, "there is no such file or folder; check the path")
        for field, model in _named_models(recipe).items()
        if _is_gone(model)
    ]


def _named_models(recipe: Recipe) -> dict[str, str]:
    """Experts and seed that a recipe names, by their fields."""
    models = {
        f"domains.{name}.expert": domain.expert for name, domain in recipe.domains.items()
    } | {"seed_model.model": recipe.seed_model.model}
    return {field: model for field, model in models.items() if model is not None}


def _is_gone(model: str) -> bool:
    """Whether it is a path, and nothing is there; a hub may know all other names."""
    try:
        path = Path(model).expanduser()
        return (path.is_absolute() or model.startswith(".")) and not path.exists()
    except (OSError, RuntimeError, ValueError):  # too long, ~ of nobody, a zero in it
        return True
