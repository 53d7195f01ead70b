"""Defines a mutant, a bug that tests must catch, and reads the lists of all mutants."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

LISTS = Path(__file__).parent
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
