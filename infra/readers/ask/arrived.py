"""Where the tensors of a checkpoint lie in a model that a reader has loaded, found by their bytes.

What runs in this folder runs in the environment of a reader: it needs nothing of ours. A tensor is
looked for as rows that stand together: readers put matrices below each other (gate over up, query
over key over value) and experts into one tensor.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

Place = tuple[str, int | None, int]
"""Parameter, index in its first axis where it has three, row at which the tensor begins."""


def digest(rows: Any) -> str:
    """Of the values of a tensor as fp32, whatever its type."""
    return hashlib.blake2b(rows.float().contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def matrix(tensor: Any) -> Any:
    """A vector as a matrix of one column: readers put biases below each other too."""
    return tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor


def wanted(tensor: Any) -> dict[str, Any]:
    """What ``places`` needs to know of a tensor of the checkpoint: a vector or matrix."""
    rows = matrix(tensor)
    return {"rows": rows.shape[0], "first": digest(rows[:1]), "all": digest(rows)}


def places(
    parameters: Iterable[tuple[str, Any]], sought: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, list[Place]], list[str]]:
    """Find each tensor.

    Args:
        parameters: Name and tensor of all that the reader has loaded.
        sought: Name in the checkpoint to what ``wanted`` says of it.

    Returns:
        All places of each tensor; the parameters in which none was found.
    """
    by_first: dict[str, list[str]] = {}
    for name, about in sought.items():
        by_first.setdefault(about["first"], []).append(name)
    found: dict[str, list[Place]] = {name: [] for name in sought}
    unknown = []
    for parameter, tensor in parameters:
        tensor = tensor.detach().cpu()
        if parameter in sought and digest(tensor) == sought[parameter]["all"]:
            found[parameter].append((parameter, None, 0))
            continue  # as it is in the checkpoint, of whatever shape
        stack = tensor if tensor.dim() == 3 else matrix(tensor)[None]
        hits = 0
        for index, rows in enumerate(stack):
            for row in range(len(rows)):
                for name in by_first.get(digest(rows[row : row + 1]), ()):
                    block = rows[row : row + sought[name]["rows"]]
                    if digest(block) == sought[name]["all"]:
                        place = (parameter, index if tensor.dim() == 3 else None, row)
                        found[name].append(place)
                        hits += 1
        if not hits and tensor.numel():
            unknown.append(parameter)
    return found, unknown
