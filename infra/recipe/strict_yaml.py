"""The YAML of recipes: what a loader would drop, or drown in, without a word is a fault."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from upcycle_core.errors import Fault, raise_faults

VALUES = 100_000
"""Most values of a text; what an alias repeats counts every time."""
DEPTH = 50
"""Most levels of a text; an alias to what holds it has no end."""
MERGE = "tag:yaml.org,2002:merge"
NOTHING = "tag:yaml.org,2002:null"
MAPPING = "tag:yaml.org,2002:map"


class Dumper(yaml.SafeDumper):
    """Writes texts that YAML 1.2, which DVC reads, has as numbers and 1.1 has not (``1e5``)."""


class Loader(yaml.SafeLoader):
    """Reads these numbers as DVC has written them."""


for kind in (Dumper, Loader):
    kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        [*"-+.0123456789"],
    )
    kind.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"0o[0-7]+$"), ["0"])


def read_yaml(text: str, source: str, key: str = "", *, sections: Sequence[str] = ()) -> Any:
    """Plain values of a YAML text.

    Args:
        text: One document; nothing in it can run code.
        source: Where it stands, for people: a file, or a setting.
        key: The dotted key of the recipe that the values are for; all of it by default.
        sections: Dotted keys, `*` for any name, that mean `{}` where nothing is written under them.
            `null` stays none.

    Raises:
        InputError: A key stands twice in a mapping, and one of the two would be lost.
        yaml.YAMLError: It is no YAML, or more of it than any recipe.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        duplicates = [] if root is None else list(_duplicates(root, source, key))
        if root is not None and sections and not duplicates:
            _fill(root, key, sections)
        values = None if root is None or duplicates else loader.construct_document(root)
    except RecursionError:
        raise yaml.YAMLError("nested too deep") from None
    except ValueError as error:  # a date that is none, a number of ten thousand digits
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()
    raise_faults(duplicates)
    return _unshared(values)


def _fill(root: Node, key: str, sections: Sequence[str]) -> None:
    """Put an empty mapping where nothing at all is written under one of ``sections``."""
    for where, mapping in _mappings(root, key):
        for number, (name, value) in enumerate(mapping.value):
            is_empty = value.tag == NOTHING and not value.value
            field = _below(where, name)
            if is_empty and any(fnmatchcase(field, section) for section in sections):
                filled = MappingNode(MAPPING, [], value.start_mark, value.end_mark)
                mapping.value[number] = (name, filled)


def _duplicates(root: Node, source: str, key: str) -> Iterator[Fault]:
    """Keys that stand twice in a mapping. What `<<` merges into one may be there already."""
    looked_at = set()
    for where, mapping in _mappings(root, key):
        if id(mapping) in looked_at:
            continue
        looked_at.add(id(mapping))
        lines: dict[tuple[str, str], int] = {}
        for name, _ in mapping.value:
            if not isinstance(name, ScalarNode) or name.tag == MERGE:
                continue
            line, known = name.start_mark.line + 1, (name.tag, name.value)
            if known not in lines:
                lines[known] = line
                continue
            both = f"line {line}" if line == lines[known] else f"lines {lines[known]} and {line}"
            remedy = f"stands twice, on {both}, and one of them would be lost; keep one"
            yield Fault(_below(where, name), source, remedy)


def _mappings(root: Node, key: str) -> Iterator[tuple[str, MappingNode]]:
    """Every mapping of a text with its dotted key, aliases followed."""
    pending = [(root, key, 0)]
    count = 0
    while pending:
        node, where, depth = pending.pop()
        count += 1
        if count > VALUES or depth > DEPTH:
            limit = f"{VALUES:,} values or {DEPTH} levels"
            raise yaml.YAMLError(f"more than {limit}, what its aliases repeat counted each time")
        if isinstance(node, MappingNode):
            yield where, node
            inner = [(value, _below(where, name)) for name, value in node.value]
        elif isinstance(node, SequenceNode):
            inner = [(value, where) for value in node.value]
        else:
            inner = []
        pending += [(value, place, depth + 1) for value, place in reversed(inner)]


def _unshared(values: Any) -> Any:
    """A copy in which what an alias repeats is a value of its own: a setting changes one alone."""
    if isinstance(values, dict):
        return {key: _unshared(value) for key, value in values.items()}
    return [_unshared(value) for value in values] if isinstance(values, list) else values


def _below(where: str, name: Node) -> str:
    return f"{where}.{name.value}" if where else str(name.value)
