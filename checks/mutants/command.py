"""`python -m checks mutants`: each mutant is built and tested; one that survives is a failure."""

import argparse
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from checks.mutants.mutant import LEAST, Mutant, kernel_files, mutants
from checks.tree import ROOT, Tree

LONGEST = 300  # seconds that tests may take: a mutant that hangs is caught

Result = tuple[Mutant, str, float]  # what became of it, and the seconds that it took


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", default="", help="only of the files whose paths begin so")


def run(args: argparse.Namespace) -> int:
    """The exit status: 1 when a mutant is not caught, or a kernel file has too few."""
    todo, console = list(mutants(args.file)), Console()
    tree = Tree(ROOT / "build" / "mutants" / "tree")
    results: list[Result] = []
    with Progress(console=console) as progress:
        bar = progress.add_task("unmutated", total=len(todo))
        tree.sync()
        tree.build()
        must_pass(tree, {mutant.tests for mutant in todo})
        for file, group in groupby(todo, lambda mutant: mutant.file):
            progress.update(bar, description=file)
            for result in tried(tree, list(group)):
                results.append(result)
                progress.advance(bar)
                told = f"{result[1]:9} {result[2]:4.0f} s  {file}: {result[0].why}"
                console.print(told, soft_wrap=True, highlight=False)
    console.print(table(results))
    return int(bool(failures(console, results, args.file)))


def must_pass(tree: Tree, selections: set[str]) -> None:
    for tests in sorted(selections):
        found = tree.pytest(tests)
        if found.returncode != 0:
            raise SystemExit(f"{tests} fails without any mutant:\n{found.stdout}")


def tried(tree: Tree, group: list[Mutant]) -> Iterator[Result]:
    """The results of the mutants of one file."""
    path = tree.folder / group[0].file
    right = path.read_text()
    try:
        for mutant in group:
            start = time.monotonic()
            yield mutant, fate(tree, mutant, right), time.monotonic() - start
    finally:
        path.write_text(right)


def fate(tree: Tree, mutant: Mutant, right: str) -> str:
    """`caught` when a test fails, or when the tests crash or hang."""
    if right.count(mutant.find) != 1:
        return "misplaced"
    (tree.folder / mutant.file).write_text(right.replace(mutant.find, mutant.replace))
    try:
        if mutant.file.startswith("csrc/"):
            tree.rebuild()
        status = tree.pytest(mutant.tests, LONGEST).returncode
    except subprocess.CalledProcessError:
        return "no build"
    except subprocess.TimeoutExpired:
        return "caught"
    return {0: "SURVIVES", 1: "caught"}.get(status, "caught" if status < 0 else "no tests")


def table(results: list[Result]) -> Table:
    found = Table("file", "mutants", "caught", "seconds")
    for file, group in groupby(results, lambda result: result[0].file):
        results = list(group)
        caught = sum(what == "caught" for _, what, _ in results)
        seconds = sum(spent for _, _, spent in results)
        found.add_row(file, str(len(results)), str(caught), f"{seconds:.0f}")
    return found


def failures(console: Console, results: list[Result], only: str) -> int:
    """How many mutants are not caught and files have too few; each is printed."""
    wrong = [f"{m.file}: {what}: {m.why}" for m, what, _ in results if what != "caught"]
    count = Counter(mutant.file for mutant, _, _ in results)
    files = sorted(file for file in kernel_files() if file.startswith(only))
    wrong += [f"{f}: {count[f]} mutants, not {LEAST}" for f in files if count[f] < LEAST]
    told = "\n".join(wrong) or f"{len(results)} mutants, all caught"
    console.print(told, soft_wrap=True, highlight=False)
    return len(wrong)
