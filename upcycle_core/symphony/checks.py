"""What keeps models from being aligned on this machine, found without importing a solver."""

from importlib.util import find_spec
from typing import Literal

from upcycle_core.errors import Fault

Solver = Literal["scipy", "lapjv"]


def solver_faults(solver: Solver, field: str = "symphony.alignment.solver") -> list[Fault]:
    """A solver whose package is not there; ``field`` is where it was asked for."""
    if solver == "scipy" or find_spec(solver) is not None:
        return []
    remedy = f"its package is not installed; run pip install {solver}, or choose scipy"
    return [Fault(field, solver, remedy)]
