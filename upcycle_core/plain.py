"""Dataclasses as plain values, for JSON, and back."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Plain:
    """What a dataclass that goes to JSON and comes back is derived from.

    Attributes:
        written: What is written, in order, properties among it; all fields by default.
    """

    written: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = self.written or [field.name for field in fields(self)]
        return {name: _plain(getattr(self, name)) for name in names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote; what is no field is left out."""
        kinds, known = get_type_hints(cls), [f.name for f in fields(cls) if f.name in values]
        return cls(**{name: _read(kinds[name], values[name]) for name in known})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, tuple):
        return [_plain(own) for own in value]
    return value.to_dict() if isinstance(value, Plain) else value


def _read(kind: Any, value: Any) -> Any:
    if isinstance(kind, UnionType) and value is not None:
        kind = get_args(kind)[0]
    origin = get_origin(kind)
    if origin is Mapping:
        return {key: _read(get_args(kind)[1], own) for key, own in value.items()}
    if origin is tuple:
        return tuple(_read(get_args(kind)[0], own) for own in value)
    is_plain = isinstance(kind, type) and issubclass(kind, Plain)
    return kind.from_dict(value) if is_plain else value
