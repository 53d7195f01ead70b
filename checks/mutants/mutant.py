"""Defines a mutant, a bug that tests must catch, and reads the lists of all mutants."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from checks.tree import ROOT

LISTS = Path(__file__).parent
MIN_MUTANTS = 10  # for each kernel file
AMX = "AMX "  # before the tests of mutants that only CPUs with AMX run


@dataclass(frozen=True)
class Mutant:
    """A bug in one line of `file`: `find` becomes `replace`. `tests` must catch it.

    needs_amx: only CPUs with AMX run the line.
    """

    file: str
    tests: str
    why: str
    find: str
    replace: str
    needs_amx: bool = False


def mutants(only: str = "") -> list[Mutant]:
    """Returns the mutants of every file whose path contains `only`, file by file."""
    tables = (tomllib.loads(path.read_text()) for path in sorted(LISTS.glob("*.toml")))
    listed = [
        Mutant(file, selection.removeprefix(AMX), why, *change, selection.startswith(AMX))
        for table in tables
        for file, selections in table.items()
        for selection, bugs in selections.items()
        for why, change in bugs.items()
        if only in file
    ]
    return sorted(listed, key=lambda mutant: mutant.file)


def kernel_files() -> set[str]:
    """Returns the files with computations. Each must have mutants."""
    patterns = ("csrc/cpu/**/*.cpp", "csrc/cuda/*/*.c*", "csrc/cuda/device.cuh")
    patterns += ("fusedops/triton/**/*.py",)
    paths = {str(path.relative_to(ROOT)) for p in patterns for path in ROOT.glob(p)}
    return {name for name in paths if not name.endswith(("/isa.cpp", "/__init__.py"))}
