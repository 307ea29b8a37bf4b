"""Freed memory is kept while a piece computes, and given back when that is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc alone is told")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from contextlib import nullcontext
import resource, sys, torch
from infra.cluster.memory import held_bytes
from upcycle_core.allocator import all_kept, kept_memory, trim

SIZE = int(sys.argv[1]) * 2**20
PAGES = SIZE // resource.getpagesize()

def faults_of(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.zeros(SIZE, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with kept_memory():
    pass  # glibc raises its thresholds by itself until they are set
outside = faults_of(4)
with kept_memory(), all_kept() if SIZE > 32 * 2**20 else nullcontext():
    faults_of(8)
    inside = faults_of(4)
    held = held_bytes()
trim()
assert inside <= PAGES < 3 * PAGES < outside, (inside, PAGES, outside)
assert held_bytes() < held - SIZE / 2
"""


@pytest.mark.parametrize("megabytes", [16, 64])
def test_memory_is_faulted_in_once(megabytes: int):
    """In a process of its own: what earlier tests have freed would be filled first."""
    command = [sys.executable, "-c", PROGRAM, str(megabytes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
