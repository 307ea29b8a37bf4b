"""What comes back from Ray: results, what was raised there, and in a line that Ray is gone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from infra.cluster.worker import WorkerLost
from upcycle_core.errors import Fault, InputError

WAIT_SECONDS = 0.5
LOST = (
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.RaySystemError,
    ray.exceptions.RpcError,
)


KILLED = {
    ray.exceptions.OutOfMemoryError: "ran out of memory",
    ray.exceptions.WorkerCrashedError: "was killed, as the system does where memory runs out",
    WorkerLost: "lost a worker, as where memory runs out,",
}
"""What ended a task's process each time that it was begun anew."""


def get(reference: ray.ObjectRef, name: str) -> Any:
    """What the task ``name`` returned; bad input as it was raised there.

    Raises:
        InputError: Its process was killed as often as it was begun, or what it raised.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, WorkerLost):
            remedy = f"{KILLED[WorkerLost]} each time that it was begun "
            remedy += f"({brief(error.cause)}); let workers divide the "
            remedy += "model (sharding: full), make batches or sequences smaller, or use machines "
            remedy += "with more memory; what is finished is kept"
            raise InputError(Fault("compute", name, remedy)) from None
        raise (error.cause if isinstance(error.cause, InputError) else error) from None
    except (ray.exceptions.OutOfMemoryError, ray.exceptions.WorkerCrashedError) as error:
        remedy = f"{KILLED[type(error)]} each time that it was begun; let fewer pieces run at once "
        remedy += "(memory or cpus of its kind under compute), make batches or sequences smaller, "
        remedy += "or use a machine with more memory; what is finished is kept"
        raise InputError(Fault("compute", name, remedy)) from None


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
        return get(reference, function.__name__)


@contextmanager
def loss_named() -> Iterator[None]:
    """Say in a line that Ray is gone, whoever notices; Ray's client calls it a lost connection."""
    try:
        yield
    except (*LOST, ConnectionError) as error:
        if isinstance(error, ray.exceptions.RayTaskError):  # a task's own, to whatever it asked
            raise
        raise InputError(loss(brief(error))) from None


def loss(what: str) -> Fault:
    """Ray's end, by ``what`` was seen of it."""
    remedy = f"is gone ({what}); what is finished is kept: run the same command again"
    return Fault("compute", "Ray", remedy)


def brief(error: Exception, length: int = 300) -> str:
    """What an error says, in a line of ``length`` characters at most."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"
