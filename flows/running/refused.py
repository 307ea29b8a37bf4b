"""Bad input that is found while a flow runs: Prefect records what was said, not a traceback."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from prefect.states import Failed, State

from upcycle_core.errors import InputError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def in_a_line(run: Callable[Parameters, Result]) -> Callable[Parameters, Result | State]:
    """The function of a flow or task, whose run fails with the faults of ``InputError`` alone.

    Who asks for the run's result gets the error.
    """

    @wraps(run)
    def attempt(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | State:
        try:
            return run(*args, **kwargs)
        except InputError as error:
            return Failed(message=str(error), data=error)

    return attempt
