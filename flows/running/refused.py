"""What ends a flow before it is done: bad input and a full disk are recorded as what was said, not
as a traceback, and SIGTERM ends it in time."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from prefect.states import Failed, State

from flows.running.naming import name_run, title_of_day
from infra.recipe.schema import Recipe
from infra.services.stopping import ended_in_time
from infra.settings import full_disk_faults
from upcycle_core.errors import InputError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def in_a_line(run: Callable[Parameters, Result]) -> Callable[Parameters, Result | State]:
    """The function of a flow or task, whose run fails with the faults of ``InputError`` alone, or
    with what to do where the disk is full.

    Who asks for the run's result gets the error. Where a flow is given its recipe, its run is
    called by that and the day: it may have failed before it had come to call itself so.
    """

    @wraps(run)
    def attempt(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | State:
        try:
            with ended_in_time(), full_disk_faults():
                return run(*args, **kwargs)
        except InputError as error:
            recipe = next(iter([*args, *kwargs.values()]), None)
            if isinstance(recipe, Recipe):
                name_run(f"{title_of_day(recipe.name)}: failed", tags=(recipe.name,))
            return Failed(message=str(error), data=error)

    return attempt
