"""What comes back from Ray: results, what was raised there, and in a line that Ray is gone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from upcycle_core.errors import Fault, InputError

WAIT_SECONDS = 0.5
LOST = (
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.RaySystemError,
    ray.exceptions.RpcError,
)


def get(reference: ray.ObjectRef) -> Any:
    """What a task returned; bad input as it was raised there."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, InputError) else error) from None


def call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    given_up: Callable[[], bool],
) -> Any:
    """Call a function in some process of Ray's, and wait for it.

    Args:
        function: Module-level, of ours.
        args: Its arguments.
        kwargs: The same.
        given_up: Asked twice a second whether it is waited for no more.

    Raises:
        KeyboardInterrupt: It is not, and is ended there as by Ctrl-C.
    """
    with loss_named():
        # No CPU: what is read waits for no training that holds them all.
        task: Any = ray.remote(num_cpus=0)(function)
        reference = task.options(name=function.__name__).remote(*args, **kwargs)
        try:
            while not ray.wait([reference], timeout=WAIT_SECONDS)[0]:
                if given_up():
                    raise KeyboardInterrupt
        except BaseException:
            ray.cancel(reference)
            raise
        return get(reference)


@contextmanager
def loss_named() -> Iterator[None]:
    """Say in a line that Ray is gone, whoever notices."""
    try:
        yield
    except LOST as error:
        raise InputError(loss(brief(error))) from None


def loss(what: str) -> Fault:
    """Ray's end, by ``what`` was seen of it."""
    remedy = f"is gone ({what}); what is finished is kept: run the same command again"
    return Fault("compute", "Ray", remedy)


def brief(error: Exception, length: int = 300) -> str:
    """What an error says, in a line of ``length`` characters at most."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"
