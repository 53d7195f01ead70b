"""Measures how much a process's memory grows within a call."""

import os
import subprocess
import sys

# What is freed goes back to the system at once, and comes from it again.
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
COUNTING = """
import sys, torch

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def grow(call):
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # resets VmHWM
    call()
    print(status("VmHWM") - before)
"""


def peaks(code: str, *arguments: str) -> list[int]:
    """Returns the growth in bytes of each `grow` call in `code`, except the first.

    code: of another process with one thread, whose sys.argv[1:] are the arguments.
    """
    run = [sys.executable, "-c", COUNTING + code, *arguments]
    env = os.environ | AT_ONCE | {"OMP_NUM_THREADS": "1"}  # each thread has a scratch
    printed = subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout
    return [int(line) for line in printed.split()][1:]
