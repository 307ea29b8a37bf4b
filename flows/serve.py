"""Serve a registered model on loopback; when its alias moves, the new version answers.

``python -m flows.serve NAME@champion [--engine vllm] [--port PORT] [-- OPTION ...]``

OpenAI's interface, by ``transformers serve`` or vLLM behind a small front; what follows ``--`` is
given to them. ``GET /upcycle`` says what runs.
"""

import argparse
import functools
import sys
from collections.abc import Collection

from flows.running.arguments import parser_of
from flows.running.command_line import command
from infra import settings as environment
from infra.logs import bound_logs
from infra.serving.engine import EngineError
from infra.serving.follower import Follower, Patience, Swap
from infra.serving.front import Naming
from infra.serving.server import listen, serve
from infra.tracking import copies
from infra.tracking.references import parsed
from infra.tracking.registry import Registry
from tasks.serving.engines import PATHS, EngineChoice, clear_folder, engine_faults, launcher
from upcycle_core.errors import Fault, InputError, raise_faults


@command
def main(arguments: list[str] | None = None) -> None:
    """Serve until a signal comes."""
    chosen = parser_of("serve").parse_args(arguments)
    name, mark, alias = parsed(chosen.model)
    settings = environment.configure()
    listening = listen(chosen.port)
    port = listening.getsockname()[1]
    choice = _choice(chosen)
    raise_faults(engine_faults(choice))
    registry = Registry(settings)
    registry.referenced(chosen.model)
    folder = settings.services / f"serve-{port}"
    folder.mkdir(parents=True, exist_ok=True)
    bound_logs(folder)

    def keep(numbers: Collection[int]) -> None:
        copies.keep(name, numbers)
        clear_folder(folder, name, numbers)

    follow = functools.partial(
        Follower,
        (lambda: registry.followed(name, alias)) if mark == "@" else (lambda: (int(alias), 0)),
        launcher(settings, registry, name, choice, folder=folder),
        patience=Patience(chosen.hold, chosen.drain, chosen.start),
        swap=_swap(chosen.swap, choice),
        keep=keep,
        clear=functools.partial(copies.remove_unused, settings),
    )
    print(f"Starting {choice.name}; logs in {folder}", flush=True)
    try:
        serve(follow, Naming(name, alias, choice.name, PATHS[choice.name]), listening)
    except EngineError as error:
        raise InputError(Fault("model", chosen.model, f"the engine {error}")) from error


def _choice(chosen: argparse.Namespace) -> EngineChoice:
    import torch

    from upcycle_core.precision import arithmetic

    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        precision = arithmetic(chosen.precision, device)
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise InputError(Fault("--device", device, f"is no device ({said})")) from error
    options = tuple(chosen.options)
    return EngineChoice(chosen.engine, device, precision, chosen.python, options)


def _swap(swap: Swap, choice: EngineChoice) -> Swap:
    """vLLM takes its share of memory at once, and a GPU's is not looked at: no second one there."""
    if swap == "auto" and (choice.name == "vllm" or not choice.device.startswith("cpu")):
        return "instead"
    return swap


if __name__ == "__main__":
    sys.exit(main())
