"""How fast a machine multiplies, and moves bytes: measured in a few seconds."""

import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from upcycle_core.memory import cores
from upcycle_core.precision import arithmetic

Arithmetic = Literal["auto", "fp32", "bf16", "fp64"]
"""As recipes say it."""
CPUINFO = Path("/proc/cpuinfo")
NAME = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)
SECONDS = 0.3
"""Of each measurement, about."""
ROWS, INNER, OUTER = 1024, 1024, 2048
BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a second brings.

    Args:
        fp32: Floating-point operations of products in fp32, with all cores.
        bf16: The same in bf16.
        fp32_one: With one core.
        bf16_one: The same in bf16.
        memory: Bytes that are copied in memory.
        read: Bytes that are read from the disk.
        write: Bytes that are written to the disk.
        gpu_fp32: Operations of one GPU in fp32; 0 where that is not known.
        gpu_bf16: The same in bf16.
    """

    fp32: float
    bf16: float
    fp32_one: float
    bf16_one: float
    memory: float
    read: float
    write: float
    gpu_fp32: float = 0.0
    gpu_bf16: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Rates | None":
        """What was kept; None where that is not all of it."""
        names = {field.name for field in fields(cls)}
        if names != set(values) or not all(map(_is_rate, values.values())):
            return None
        return cls(**values)

    def to_dict(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)

    def products(self, precision: Arithmetic, busy: float, cores: int) -> float:
        """Operations a second while so many of the cores are busy.

        Args:
            precision: As a recipe says it; fp64 is half as fast as fp32.
            busy: Cores that compute.
            cores: Of the machine.
        """
        if precision == "fp64":
            return self.products("fp32", busy, cores) / 2
        kind = arithmetic(precision, "cpu")
        one = getattr(self, f"{kind}_one")
        everyone = max(one, getattr(self, kind))  # measured beside other programs, it may be less
        if cores <= 1 or busy <= 1:
            return float(one)
        share = min(1.0, (busy - 1) / (cores - 1))
        return float(one + share * (everyone - one))


def identity() -> dict[str, Any]:
    """What rates hold for: processor, cores, version of torch."""
    try:
        found = NAME.search(CPUINFO.read_text(encoding="ascii", errors="replace"))
    except OSError:  # no Linux
        found = None
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return {"processor": name, "cores": cores(), "torch": torch.__version__}


def measure(folder: Path) -> Rates:
    """Measure this machine.

    Args:
        folder: On the disk that is measured; nothing stays there.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(cores())
        everyone = {name: _products(dtype) for name, dtype in _TYPES.items()}
        torch.set_num_threads(1)
        one = {name: _products(dtype) for name, dtype in _TYPES.items()}
    finally:
        torch.set_num_threads(threads)
    there = torch.cuda.is_available()
    gpu = {f"gpu_{n}": _products(kind, "cuda") for n, kind in _TYPES.items() if there}
    read, write = _disk(folder)
    return Rates(
        fp32=everyone["fp32"],
        bf16=everyone["bf16"],
        fp32_one=one["fp32"],
        bf16_one=one["bf16"],
        memory=_memory(),
        read=read,
        write=write,
        **gpu,
    )


_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _products(dtype: torch.dtype, device: str = "cpu") -> float:
    a, b = (torch.randn(s, device=device).to(dtype) for s in ((ROWS, INNER), (INNER, OUTER)))

    def product() -> None:
        torch.mm(a, b)
        if device != "cpu":
            torch.cuda.synchronize()

    return _repeated(product) * 2 * ROWS * INNER * OUTER


def _memory() -> float:
    source = torch.ones(BYTES // 8, dtype=torch.float64)
    target = torch.empty_like(source)
    return _repeated(lambda: target.copy_(source)) * BYTES


def _disk(folder: Path) -> tuple[float, float]:
    """Bytes a second that are read, past the page cache where the system lets us, and written."""
    data = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".rates-") as file:
        began = time.perf_counter()
        for _ in range(BYTES // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        write = BYTES / (time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with open(file.name, "rb", buffering=0) as again:
            began = time.perf_counter()
            while again.read(1 << 22):
                pass
            read = BYTES / (time.perf_counter() - began)
    return read, write


def _repeated(call: Callable[[], object]) -> float:
    """Times a second, of the fastest: others may be at work on the machine."""
    fastest, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - began)
    return 1 / fastest


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and value >= 0
