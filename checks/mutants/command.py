"""Builds and tests each mutant; none may survive: `python -m checks mutants`."""

import argparse
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import chain, groupby
from queue import SimpleQueue
from random import Random

import torch
from rich.console import Console
from rich.progress import Progress

from checks.mutants.mutant import Mutant, mutants
from checks.tree import ROOT, Tree

HAS_AMX = torch.cpu._is_amx_tile_supported()
TIMEOUT = 300  # seconds of tests per mutant; one that hangs counts as caught

Result = tuple[Mutant, str, float]  # the mutant, its outcome, and the seconds it took


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", default="", help="only the files whose paths contain this")
    parser.add_argument("--sample", type=int, help="only so many of them, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of --sample")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree to use at a time")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a mutant survives."""
    all_mutants, console = list(mutants(args.file)), Console()
    todo = [mutant for mutant in all_mutants if HAS_AMX or not mutant.needs_amx]
    if todo != all_mutants:
        console.print(f"{len(all_mutants) - len(todo)} mutants need a CPU with AMX: left out")
    if args.sample is not None:
        todo = drawn(todo, args.sample, args.seed)
    groups = [list(group) for _, group in groupby(todo, lambda mutant: mutant.file)]
    folders = [ROOT / "build" / "mutants" / str(job) for job in range(min(args.jobs, len(groups)))]
    trees = [Tree(folder) for folder in folders]
    with Progress(console=console) as progress, ThreadPoolExecutor(args.jobs) as pool:
        bar = progress.add_task("mutants", total=len(todo))
        list(pool.map(ready, trees))
        must_pass(pool, trees, {mutant.tests for mutant in todo})
        free: SimpleQueue[Tree] = SimpleQueue()
        for tree in trees:
            free.put(tree)

        def tell(result: Result) -> None:
            mutant, what, seconds = result
            text = f"{what:9} {seconds:4.0f} s  {mutant.file}: {mutant.why}"
            console.print(text, soft_wrap=True, highlight=False)
            progress.advance(bar)

        results = list(chain(*pool.map(lambda group: tried(free, group, tell), groups)))
    wrong = [f"{m.file}: {what}: {m.why}" for m, what, _ in results if what != "caught"]
    text = "\n".join(wrong) or f"{len(results)} mutants, all caught"
    console.print(text, soft_wrap=True, highlight=False)
    return int(bool(wrong))


def drawn(candidates: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """At most `count` of the mutants, in their order."""
    places = Random(seed).sample(range(len(candidates)), min(count, len(candidates)))
    return [candidates[place] for place in sorted(places)]


def ready(tree: Tree) -> None:
    tree.sync()
    tree.build()


def must_pass(pool: Executor, trees: list[Tree], selections: set[str]) -> None:
    """Exits with the tests' output if they fail without any mutant."""
    todo = sorted(selections)
    for tests, run in zip(todo, pool.map(trees[0].pytest, todo), strict=True):
        if run.returncode != 0:
            raise SystemExit(f"{tests} fails without any mutant:\n{run.stdout}")


def tried(
    free: SimpleQueue[Tree], group: list[Mutant], tell: Callable[[Result], None]
) -> list[Result]:
    """Tries one file's mutants in a tree that nothing else uses; returns their results."""
    tree, results = free.get(), []
    path = tree.folder / group[0].file
    right = path.read_text()
    try:
        for mutant in group:
            start = time.monotonic()
            results.append((mutant, outcome(tree, mutant, right), time.monotonic() - start))
            tell(results[-1])
    finally:
        path.write_text(right)
        free.put(tree)
    return results


def outcome(tree: Tree, mutant: Mutant, right: str) -> str:
    """Returns `caught` if a test fails, or if the tests crash or hang."""
    if right.count(mutant.find) != 1:
        return "misplaced"
    (tree.folder / mutant.file).write_text(right.replace(mutant.find, mutant.replace))
    try:
        if mutant.file.startswith("csrc/"):
            tree.rebuild()
        status = tree.pytest(mutant.tests, TIMEOUT).returncode
    except subprocess.CalledProcessError:
        return "no build"
    except subprocess.TimeoutExpired:
        return "caught"
    return {0: "SURVIVES", 1: "caught"}.get(status, "caught" if status < 0 else "no tests")
