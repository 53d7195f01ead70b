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
from collections.abc import Iterator
from pathlib import Path

from checks.mutants.mutant import Mutant
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

# Planted bugs that the sanitizers must report, and their reports.
BOUNDS, LEAK = "ERROR: AddressSanitizer: ", "ERROR: LeakSanitizer: detected memory leaks"
ODR = "ERROR: AddressSanitizer: odr-violation"
PLANTED = {
    Mutant(
        "csrc/cpu/isa/vec.h",
        TESTS.format("cpu and test_forward_and_gradients and 33"),
        "reads past the row's end",
        "at::vec::Vectorized<T>::loadu(p, tail.count)",
        "at::vec::Vectorized<T>::loadu(p)",
    ): BOUNDS,
    Mutant(
        "csrc/cuda/norm/row.cuh",
        TESTS.format("simt and test_roundings"),
        "a vector more than the row has",
        "if (col < n) body(i, col);",
        "if (col <= n) body(i, col);",
    ): BOUNDS,
    Mutant(
        "csrc/cpu/norm.cpp",
        TESTS.format("cpu and test_roundings"),
        "a reference that is never released",
        "auto* const run = norm_forward_rows_for_isa();\n  at::parallel_for",
        "auto* const run = norm_forward_rows_for_isa();\n"
        "(void)Tensor(std::get<2>(outputs)).unsafeReleaseTensorImpl();\n  at::parallel_for",
    ): LEAK,
    Mutant(
        "csrc/cpu/cross_entropy/products.h",
        TESTS.format("cpu and float32 and test_a_float32_loss"),
        "two classes with the same name: the linker keeps the destructor that releases nothing",
        "class LogitProducts {\n public:",
        "}\nnamespace fusedops::cpu {\nstruct BrgemmScope {\nTensor held = at::empty({1024});\n"
        "[[gnu::noinline]] ~BrgemmScope() {}\n};\n}\n"  # inlined calls would use the right one
        "namespace fusedops::cpu::cross_entropy {\nclass LogitProducts {\n public:\n"
        "BrgemmScope planted;",
    ): LEAK,
    Mutant(
        "csrc/cpu/cross_entropy/products.cpp",
        TESTS.format("cpu and test_a_float32_loss"),
        "a variable that another library defines too",
        "namespace fusedops::cpu::cross_entropy {",
        '[[gnu::visibility("default")]] char planted[4] = {1};\n'
        "namespace fusedops::cpu::cross_entropy {",
    ): ODR,
}
# A second library: within one library, g++ and the linker resolve such a violation.
TWIN = "char planted[64] = {1};"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default=f"{KERNELS} or {GROWTH}", help="another selection, as pytest's -k"
    )
    parser.add_argument("--planted", action="store_true", help="check that bugs are reported")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a test fails, a sanitizer stops it, or one misses a planted
    bug.
    """
    tree = sanitized()
    tree.sync()
    tree.build()
    if args.planted:
        unseen = list(overlooked(tree))
        print(*unseen or ["every planted bug was reported"], sep="\n")
        return int(bool(unseen))
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


def twin(folder: Path) -> str:
    """Compiles TWIN into `folder` and returns the library's path."""
    library = str(folder / "twin.so")
    command = ["g++", "-fPIC", "-shared", "-fsanitize=address", "-xc++", "-", "-o", library]
    subprocess.run(command, check=True, text=True, input=TWIN)
    return library


def overlooked(tree: Tree) -> Iterator[str]:
    """Yields the planted bugs that no sanitizer reports."""
    tree.preload = [*tree.preload, twin(tree.folder / "build")]
    for mutant, report in PLANTED.items():
        path = tree.folder / mutant.file
        right = path.read_text()
        assert right.count(mutant.find) == 1, mutant
        path.write_text(right.replace(mutant.find, mutant.replace))
        try:
            tree.rebuild()
            if report not in tree.pytest(mutant.tests).stdout:
                yield f"{mutant.file}: {mutant.why}: not reported"
        finally:
            path.write_text(right)
