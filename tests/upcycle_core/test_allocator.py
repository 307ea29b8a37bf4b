"""Freed memory is kept while a piece computes, and given back when that is asked for."""

import resource
import sys

import pytest
import torch

from infra.cluster.memory import held_bytes
from upcycle_core.allocator import kept_memory, trim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc alone is told")
SIZE = 16 * 2**20


def faults_of(times: int) -> int:
    """Page faults of so many allocations that are written and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.zeros(SIZE, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_is_faulted_in_once():
    pages = SIZE // resource.getpagesize()
    with kept_memory():
        pass  # glibc raises its thresholds by itself until they are set
    outside = faults_of(4)
    with kept_memory():
        faults_of(8)
        inside = faults_of(4)
        held = held_bytes()
    trim()
    assert inside <= pages < 3 * pages < outside
    assert held_bytes() < held - SIZE / 2
