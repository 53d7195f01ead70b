"""A mutant, and the lists of them."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checks.tree import ROOT

LISTS = Path(__file__).parent
LEAST = 10  # of a kernel file


@dataclass(frozen=True)
class Mutant:
    """`file` with one line made wrong: `replace` where `find` is. `tests` must see it."""

    file: str
    tests: str
    why: str
    find: str
    replace: str


def mutants(only: str = "") -> Iterator[Mutant]:
    """Those of every file whose path contains `only`, file by file."""
    for path in sorted(LISTS.rglob("*.toml")):
        file = str(path.relative_to(LISTS).with_suffix(""))
        if only not in file:
            continue
        for tests, found in tomllib.loads(path.read_text()).items():
            yield from (Mutant(file, tests, why, *change) for why, change in found.items())


def kernel_files() -> set[str]:
    """The files that compute something, each of which must have its mutants."""
    patterns = ("csrc/cpu/**/*.cpp", "csrc/cuda/*/*.c*", "csrc/cuda/device.cuh")
    patterns += ("fusedops/triton/*/*.py",)
    found = {str(path.relative_to(ROOT)) for p in patterns for path in ROOT.glob(p)}
    return {name for name in found if not name.endswith(("/isa.cpp", "/__init__.py"))}
