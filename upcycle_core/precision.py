"""Which arithmetic a model is computed in, where that is left to the machine."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from upcycle_core.checkpoints.divided import AUTO
from upcycle_core.checkpoints.load import DTYPES
from upcycle_core.errors import Fault

Precision = Literal["auto", "fp32", "bf16"]
CPUINFO = Path("/proc/cpuinfo")
# Units that multiply bf16: Intel's and AMD's, Intel's tiles, Arm's.
_UNITS = re.compile(r"^(?:flags|Features)\s*:.*\b(avx512_bf16|amx_bf16|bf16)\b", re.MULTILINE)
_TILES = re.compile(r"^flags\s*:.*\bamx_bf16\b", re.MULTILINE)


def arithmetic(precision: Precision, device: str | torch.device) -> Literal["fp32", "bf16"]:
    """What ``auto`` is on a device: bf16 where it multiplies that faster than fp32.

    A GPU does if CUDA says so; one of another machine, in a plan, is taken to. A CPU does if it has
    units for it; one without emulates bf16, which takes several times as long as fp32.

    Args:
        precision: As a recipe says it; what is not ``auto`` stays.
        device: Where it is computed (``cpu``, ``cuda:0``, or ``auto``: on several GPUs).
    """
    if precision != "auto":
        return precision
    if device != AUTO and torch.device(device).type == "cpu":
        return "bf16" if bf16_units() else "fp32"
    if not torch.cuda.is_available():  # of another machine, as in a plan
        return "bf16"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def chosen(precision: Literal["auto", "fp32", "bf16", "fp64"], device: str | torch.device) -> str:
    """What is said of a computation: " in bf16" where ``auto`` has chosen it, else nothing."""
    return f" in {arithmetic(precision, device)}" if precision == "auto" else ""


def weights_type(
    precision: Literal["auto", "fp32", "bf16", "fp64"], device: str | torch.device
) -> torch.dtype:
    """Type of weights for a forward pass in ``precision``; fp64 is possible there too."""
    return DTYPES["fp64" if precision == "fp64" else arithmetic(precision, device)]


def device_faults(device: str) -> Iterator[Fault]:
    """Why nothing can be computed on a device: no such name, or none on this machine."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA asserts that it has it
        said = str(error).partition("\n")[0]
        yield Fault("--device", device, f"cannot be used here ({said}); leave it out, or name cpu")


@cache
def bf16_units() -> str | None:
    """Name of this machine's CPU feature that multiplies bf16; None without one."""
    try:
        found = _UNITS.search(CPUINFO.read_text(encoding="ascii", errors="replace"))
    except OSError:  # no Linux
        return None
    return found[1] if found else None


@cache
def matrix_units() -> bool:
    """Whether this machine's CPU multiplies bf16 by whole tiles (Intel's AMX)."""
    try:
        return _TILES.search(CPUINFO.read_text(encoding="ascii", errors="replace")) is not None
    except OSError:  # no Linux
        return False
