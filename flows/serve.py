"""Serve a registered model on loopback; when its alias moves, the new version answers.

``python -m flows.serve NAME@champion [--engine vllm] [--port PORT] [-- OPTION ...]``

OpenAI's interface, by ``transformers serve`` or vLLM behind a small front; what follows ``--`` is
given to them. ``GET /upcycle`` says what runs.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import get_args

from flows.running.command_line import command
from infra import settings as environment
from infra.serving.engine import EngineError
from infra.serving.follower import Follower, Patience, Swap
from infra.serving.front import Naming
from infra.serving.server import listen, serve
from infra.tracking.registry import Registry
from tasks.serving.engines import PATHS, EngineChoice, Name, engine_faults, launcher
from upcycle_core.errors import Fault, InputError, raise_faults

PORT = 8000


@command
def main(arguments: list[str] | None = None) -> None:
    """Serve until a signal comes."""
    chosen = _parser().parse_args(arguments)
    name, at, alias = chosen.model.removeprefix("models:/").partition("@")
    if not at:
        name, _, alias = name.partition("/")
    if not alias:
        remedy = f"names no version; write {name}@champion or {name}/1"
        raise InputError(Fault("model", chosen.model, remedy))
    settings = environment.configure()
    listening = listen(chosen.port)
    port = listening.getsockname()[1]
    choice = _choice(chosen)
    raise_faults(engine_faults(choice))
    registry = Registry(settings)
    registry.referenced(f"models:/{name}{'@' if at else '/'}{alias}")
    folder = settings.services / f"serve-{port}"
    follow = functools.partial(
        Follower,
        (lambda: registry.pointed(name, alias)) if at else (lambda: int(alias)),
        launcher(settings, registry, name, choice, folder=folder),
        patience=Patience(chosen.hold, chosen.drain, chosen.start),
        swap=_swap(chosen.swap, choice),
    )
    print(f"Starting {choice.name}; logs in {folder}", flush=True)
    try:
        serve(follow, Naming(name, alias, choice.name, PATHS[choice.name]), listening)
    except EngineError as error:
        raise InputError(Fault("model", chosen.model, f"the engine {error}")) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="NAME@ALIAS, which is followed, or NAME/VERSION")
    parser.add_argument("--engine", choices=get_args(Name), default="transformers")
    parser.add_argument("--port", type=int, default=PORT, help=f"of loopback ({PORT}; 0: any)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; by default a GPU where there is one")
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16"), default="fp32", help="type of weights"
    )
    parser.add_argument("--python", type=Path, help="the interpreter of vLLM's environment")
    parser.add_argument(
        "--swap",
        choices=get_args(Swap),
        default="auto",
        help="when the alias moves: start the new engine beside the old one, or instead of it, "
        "while requests wait; auto: beside it where both fit into memory",
    )
    usual = Patience()
    parser.add_argument(
        "--hold", type=float, default=usual.hold, help="seconds that a request waits for an engine"
    )
    parser.add_argument(
        "--drain", type=float, default=usual.drain, help="seconds to finish what it is asked"
    )
    parser.add_argument(
        "--start", type=float, default=usual.start, help="seconds for an engine to come up"
    )
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="for the engine itself")
    return parser


def _choice(chosen: argparse.Namespace) -> EngineChoice:
    import torch

    from upcycle_core.precision import arithmetic

    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    precision = arithmetic(chosen.precision, device)
    options = tuple(chosen.options)
    return EngineChoice(chosen.engine, device, precision, chosen.python, options)


def _swap(swap: Swap, choice: EngineChoice) -> Swap:
    """vLLM takes its share of memory at once, and a GPU's is not looked at: no second one there."""
    if swap == "auto" and (choice.name == "vllm" or not choice.device.startswith("cpu")):
        return "instead"
    return swap


if __name__ == "__main__":
    sys.exit(main())
