"""Tests of keep_freed_memory: fewer page faults, memory returned when disabled, and errors."""

import ctypes
import subprocess
import sys

import pytest

from fusedops import allocator

CHILD = """
import resource, torch
from fusedops.allocator import keep_freed_memory, returns_freed_memory

def faults():
    for _ in range(10):  # what this setting pays once
        x + x
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        x + x
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
x = torch.ones(4096, 4096)  # 64 MiB: above what glibc ever keeps by itself
default = faults()
assert returns_freed_memory()
keep_freed_memory()
assert not returns_freed_memory()
kept = faults()
held = resident()
keep_freed_memory(False)
assert returns_freed_memory()
print(default, kept, held - resident())
"""


def test_kept_memory_does_not_fault_and_is_given_back():
    command = [sys.executable, "-c", CHILD]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    default, kept, given_back = (int(number) for number in run.stdout.split())
    assert kept < default / 10
    python = 2**20  # what Python itself may touch for the first time between the two readings
    assert given_back >= 4096 * 4096 * 4 - python


def test_c_library_without_mallopt(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not allocator.returns_freed_memory()
    with pytest.raises(RuntimeError, match="keep_freed_memory: needs glibc"):
        allocator.keep_freed_memory()


def test_refused_option():
    class Refuses:
        @staticmethod
        def mallopt(option, value):
            return 0

    with pytest.raises(RuntimeError, match=r"mallopt\(-4, 0\) failed"):
        allocator._set(Refuses, -4, 0)
