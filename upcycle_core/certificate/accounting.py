"""Whether every tensor of a checkpoint is where it belongs in what a reader has loaded."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

Place = Sequence[str | int | None]
"""Parameter, index in its first axis where it has three, row at which the tensor begins."""

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def misplaced(places: Mapping[str, Sequence[Place]]) -> dict[str, str]:
    """Tensors that are missing, or lie where those of other layers and experts do not.

    A tensor belongs into a parameter of its own layer and expert. How a reader stacks matrices is
    its own affair; but it does it the same way everywhere, so that the row where most tensors of a
    kind begin is right.

    Args:
        places: Name in the checkpoint to all places where its bytes were found.

    Returns:
        Name to what is wrong, sorted by name.
    """
    usual: dict[str, Counter[tuple[str, int]]] = {}
    for name, found in places.items():
        at_home = {_way(place) for place in found if _numbers_of(place) == _numbers(name)}
        usual.setdefault(_kind(name), Counter()).update(at_home)
    wrong = {}
    for name, found in sorted(places.items()):
        expected = usual[_kind(name)].most_common(1)
        if not found:
            wrong[name] = "its values are nowhere in what was loaded"
        elif not any(
            _numbers_of(place) == _numbers(name) and _way(place) == expected[0][0]
            for place in found
        ):
            parameter, index, row = found[0]
            where = f"{parameter}[{index}]" if index is not None else parameter
            wrong[name] = f"its values are in {where}, row {row}: another tensor's place"
    return wrong


def _kind(name: str) -> str:
    return NUMBER.sub("*", name)


def _numbers(name: str) -> list[int]:
    """Layer and expert that a name speaks of; the digits of ``w1`` are no number of either."""
    return [int(found) for found in NUMBER.findall(name)]


def _numbers_of(place: Place) -> list[int]:
    index = place[1]
    return [*_numbers(str(place[0])), *([int(index)] if index is not None else [])]


def _way(place: Place) -> tuple[str, int]:
    return _kind(str(place[0])), int(place[2] or 0)
