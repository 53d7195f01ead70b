"""Tests the C++ code under AddressSanitizer, LeakSanitizer and UBSan: `python -m checks sanitize`.

It runs the kernels' tests, the fuzz tests, and the growth tests of plain training. When the process
ends, LeakSanitizer reports memory that nothing points to. Python's garbage collector points to
every tensor that Python has seen, so leaks of those show only in tests/growth/test_growth.py. ODR
detection compares global variables of different libraries, but not classes: tests/tools/
test_build.py compares those.
"""

import argparse
import os
import subprocess
import sys

from checks.tree import ROOT, Tree

DETECTED = "detect_leaks=1:detect_odr_violation=2"
SUPPRESSIONS = ROOT / "checks" / "leaks.supp"

# Tests that call kernels, where out-of-bounds accesses can be. Compiled graphs are not our C++.
# Without -s, pytest's capturing would lose the report of a process that a sanitizer ends.
NAMES = ("kernels", "torch", "autograd", "modules", "linear", "mixed_precision", "fuzz", "growth")
FILES = sorted(path for name in NAMES for path in ROOT.glob(f"tests/*/test_{name}.py"))
TESTS = f"-s -W ignore {' '.join(str(path.relative_to(ROOT)) for path in FILES)} -k '{{}}'"
KERNELS = "not (triton or interpreted or compile or opcheck or export or growth)"
GROWTH = "growth and test_calls and training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default=f"{KERNELS} or {GROWTH}", help="another selection, as pytest's -k"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a test fails or a sanitizer stops it."""
    tree = sanitized()
    tree.sync()
    tree.build()
    result = tree.pytest(TESTS.format(args.only))
    sys.stdout.write(result.stdout)
    return int(result.returncode != 0)


def sanitized() -> Tree:
    """Returns a copy to build with the sanitizers, whose first error ends the process."""
    return Tree(
        ROOT / "build" / "asan" / "tree",
        [library("libasan.so"), library("libubsan.so")],
        FUSEDOPS_SANITIZE="address,undefined",
        ASAN_OPTIONS=f"{DETECTED}:{os.environ.get('ASAN_OPTIONS', '')}",
        LSAN_OPTIONS=f"suppressions={SUPPRESSIONS}:print_suppressions=0",
        PYTHONMALLOC="malloc",  # Python's own memory may hold the only pointers to a tensor
    )


def library(name: str) -> str:
    """Returns the path of a library that comes with the compiler."""
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
