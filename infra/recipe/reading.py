"""Reading recipes: YAML in, frozen dataclasses out, with every fault in one message."""

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from infra.recipe.amounts import amount_of
from infra.recipe.budget import budget_faults, with_budget
from infra.recipe.checks import faults
from infra.recipe.names import masked
from infra.recipe.paths import rooted, with_folder
from infra.recipe.schema import ADAPTER, Recipe, resolve
from infra.recipe.strict_yaml import read_yaml
from upcycle_core.errors import Fault, raise_faults

Section = TypeVar("Section")
LARGEST = 2**63
"""Whole numbers that large, and larger ones, neither Prefect's nor MLflow's database holds."""
ADDABLE = ("baselines", "tasks", "task_evaluation", "compression")
"""What files beside a recipe add to it."""
ASKING = ("symphony", "simoe", *(f"baselines.*.{name}" for name in ("symphony", "simoe", "ders")))
"""Sections that ask for a method by being there: with nothing under it, one has its defaults."""

Checks = Callable[[Recipe], Iterable[Fault]]
ALIKE = 0.6
"""Likeness of two names from which one may be meant by the other (difflib's own)."""
BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "more than",
    "less_than_equal": "at most",
    "less_than": "less than",
}
"""How a number that is out of bounds is said, by pydantic's name of the fault."""


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    added: Sequence[Path] = (),
    checks: Checks = lambda recipe: (),
    completed: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> Recipe:
    """Read a recipe.

    Args:
        path: YAML file.
        overrides: ``dotted.key=value`` settings, values in YAML.
        added: YAML files whose ``baselines``, ``tasks`` or ``compression`` are added to the
            recipe's own.
        checks: What is wrong with a recipe beside what ``faults`` finds.
        completed: The recipe with what follows from what it says.

    Raises:
        InputError: With all faults: unknown keys (and the nearest known), keys that stand twice,
            values out of bounds, and what ``faults`` finds.
    """
    values = _values(path)
    keys = [key for key in values if not str(key).startswith(".")]
    if keys and set(keys) <= set(ADDABLE):
        remedy = f"holds {' and '.join(keys)} alone, for a recipe: name that before it, as "
        raise_faults([Fault("recipe", str(path), f"{remedy}RECIPE.yaml {path}")])
    for file in added:
        _add(values, file)
    for override in overrides:
        _override(values, override)
    return validate(rooted(values), checks=checks, completed=completed)


def validate(
    values: object,
    *,
    checks: Checks = lambda recipe: (),
    completed: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> Recipe:
    """Turn plain values into a recipe; see ``load_recipe``."""

    def faults_across(values: object, recipe: Recipe) -> list[Fault]:
        """Faults of values that each are of the right kind."""
        booleans = _number_faults(values, resolve(recipe))
        return [*booleans, *budget_faults(recipe), *faults(recipe), *checks(recipe)]

    try:
        recipe = completed(with_folder(ADAPTER.validate_python(values)))
    except ValidationError as error:
        found = [_fault_of(problem) for problem in error.errors()]
        rest = _without(values, error)
        with suppress(ValidationError):  # faults that would come up once these values are gone
            found += faults_across(rest, completed(with_folder(ADAPTER.validate_python(rest))))
        raise_faults(found)
    raise_faults(faults_across(values, recipe))
    recipe = with_budget(recipe)
    # One order everywhere: of sums, of the router's columns, of the experts in the model.
    return replace(recipe, domains=dict(sorted(recipe.domains.items())))


def _values(path: Path) -> dict[str, Any]:
    """The keys of a YAML file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise_faults([Fault("recipe", str(path), "no such file; name a YAML recipe")])
    except (OSError, ValueError) as error:  # no text, or a zero in the path
        remedy = f"cannot be read ({error}); name a YAML file in UTF-8"
        raise_faults([Fault("recipe", str(path), remedy)])
    try:
        values = read_yaml(text, str(path), sections=ASKING)
    except yaml.YAMLError as error:
        raise_faults([Fault("recipe", str(path), f"not YAML ({error}); correct it")])
    if not isinstance(values, dict):
        remedy = "holds no keys; start from a copy of recipes/five-domains.yaml"
        raise_faults([Fault("recipe", str(path), remedy)])
    return values


def _add(values: dict[str, Any], file: Path) -> None:
    """Add the entries of ``file`` to a recipe's; it may hold nothing else of a recipe.

    Keys that begin with ``.`` are for YAML's anchors.
    """
    found = {k: value for k, value in _values(file).items() if not str(k).startswith(".")}
    remedy = f"beside the first recipe, a file holds {' or '.join(ADDABLE)}, names and settings"
    if not found or not all(key in ADDABLE and isinstance(found[key], dict) for key in found):
        raise_faults([Fault(str(file), sorted(map(str, found)), remedy)])
    for key, entries in found.items():
        own = values.setdefault(key, {})
        if not isinstance(own, dict):
            raise_faults([Fault(key, own, "no mapping of names to settings; correct it")])
        twice = [name for name in entries if name in own]
        raise_faults(
            Fault(f"{key}.{name}", str(file), "is there already; rename one") for name in twice
        )
        own |= entries


def settings_of(recipe: Recipe, kind: type[Section]) -> Section:
    """A recipe's ``settings`` as the config class of its method.

    Raises:
        InputError: Unknown keys, and values of another kind or out of bounds.
    """
    try:
        return TypeAdapter(kind).validate_python(dict(recipe.settings))
    except ValidationError as error:
        known = [f.name for f in fields(kind)] if is_dataclass(kind) else []
        raise_faults(
            Fault(
                ".".join(["settings", *map(str, problem["loc"])]),
                masked(problem["input"]),
                f"{problem['msg']}; the settings are {known}",
            )
            for problem in error.errors()
        )
        raise


def _without(values: object, error: ValidationError) -> object:
    """A copy of ``values`` without those that ``error`` names."""
    rest = copy.deepcopy(values)
    for problem in error.errors():
        _drop(rest, problem["loc"])
    return rest


def _number_faults(given: object, read: object, where: str = "") -> Iterator[Fault]:
    """What was given as true or false and read as a number, which pydantic allows, and whole
    numbers that no database holds.

    Texts may be numbers: YAML has one for ``2e-4``.
    """
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        for key in filter(read.__contains__, given):
            yield from _number_faults(given[key], read[key], f"{where}.{key}".lstrip("."))
    elif isinstance(given, list | tuple) and isinstance(read, list):
        for value, number in zip(given, read, strict=True):
            yield from _number_faults(value, number, where)
    elif isinstance(given, bool) and type(read) in (int, float):
        yield Fault(where, given, "is no number; write the number that is meant")
    elif type(read) is int and abs(read) >= LARGEST:
        yield Fault(where, given, f"must be less than {LARGEST}, which is 2^63; correct it")


def _drop(values: Any, location: Sequence[int | str]) -> None:
    """Delete what stands at ``location``; a whole list if it is a part of one."""
    key, *deeper = location
    if not isinstance(values, dict) or key not in values:
        return
    if deeper and isinstance(values[key], dict):
        _drop(values[key], deeper)
    else:
        del values[key]


def _override(values: Any, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise_faults([Fault("--set", override, "write dotted.key=value")])
    *path, last = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise_faults([Fault("--set", override, f"{part} is no section; write {part}=VALUE")])
    if not text.strip() and any(fnmatchcase(key, section) for section in ASKING):
        remedy = f"says nothing; write {key}={{}} for its defaults, or {key}=null for none"
        raise_faults([Fault("--set", override, remedy)])
    try:
        values[last] = read_yaml(text, override, key, sections=ASKING)
    except yaml.YAMLError as error:
        raise_faults([Fault("--set", override, f"the value is not YAML ({error}); correct it")])


def _fault_of(problem: Mapping[str, Any]) -> Fault:
    location = ".".join(str(part) for part in problem["loc"])
    key = str(problem["loc"][-1]) if problem["loc"] else ""
    if problem["type"] == "missing":  # whose input is all that is there
        return Fault(location, None, "is missing; give it")
    shown = masked(problem["input"], key)
    if problem["type"] != "unexpected_keyword_argument":
        return Fault(location, shown, _remedy(problem))
    return Fault(location, shown, f"no such key; {_hint(problem['loc'][:-1], key)}")


def _hint(location: Sequence[str | int], key: str) -> str:
    """What may be meant by a key that a section does not have: one of a section in it, of sections
    beside it, or a name that is like it; else what keys there are."""
    known, beside = _keys_at(location), _keys_at(location[:-1])
    below = [name for name in known if key in _keys_at((*location, name))]
    if below:
        return f"did you mean {' or '.join(f'{name}.{key}' for name in below)}?"
    path = ".".join(str(part) for part in location[:-1])
    others = [name for name in beside if key in _keys_at((*location[:-1], name))]
    if others and path:
        return f"only {', '.join(f'{path}.{name}' for name in others)} have it"
    if not known:
        return ""
    found = nearest(key, known)
    if _likeness(key, found)[0] >= ALIKE:
        return f"did you mean {found}?"
    return f"the keys there are {', '.join(known)}"


def _remedy(problem: Mapping[str, Any]) -> str:
    """What would do instead."""
    words = BOUNDS.get(problem["type"])
    amount = amount_of(problem["input"]) if problem["type"] == "int_parsing" else None
    if amount is not None and amount.is_integer():
        return f"write the number itself: {amount:_.0f}"
    if words is None:
        return f"{problem['msg']}; correct it"
    (bound,) = (value for name, value in problem["ctx"].items() if name in ("ge", "gt", "le", "lt"))
    return f"must be {words} {bound}; correct it"


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key that is likest: the whole of it, or its last word, which says what it is.

    ``lamda`` is a ``ridge_lambda`` and no ``lambda_grid``.
    """

    return max(known, key=lambda name: _likeness(key, name))


def _likeness(key: str, name: str) -> tuple[float, float]:
    whole, last = (
        difflib.SequenceMatcher(None, key, text).ratio() for text in (name, name.rpartition("_")[2])
    )
    return max(whole, last), whole


def _keys_at(location: Sequence[str | int]) -> list[str]:
    """Field names of the dataclass at ``location`` in a recipe."""
    here: Any = Recipe
    for part in location:
        here = get_type_hints(here).get(str(part)) if is_dataclass(here) else get_args(here)[-1]
        options = [option for option in get_args(here) if is_dataclass(option)]
        if not is_dataclass(here) and options and type(None) in get_args(here):
            here = options[0]
    return [f.name for f in fields(here)] if is_dataclass(here) else []
