"""Checks all GPU kernels' machine code and can tabulate it: `python -m checks machine-code`."""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, product
from pathlib import Path

from checks.machine_code import ROOT, launches, nvcc, passed, table
from checks.machine_code.cuda import DEMANDS
from checks.machine_code.gates import Compiled, failures, idle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--write", type=Path, metavar="FILE", help="file for the table")
    add("--check", type=Path, metavar="FILE", help="fail if the table in this file differs")
    add("--triton", type=Path, metavar="FOLDER", action="append", default=[],
        help="a folder with another installed triton; may be repeated")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a kernel fails, or the table has changed."""
    if nvcc.find() is None:
        raise SystemExit("machine-code needs nvcc, on the PATH or under CUDA_HOME")
    jobs = list(_jobs([None, *args.triton]))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parsed = pool.submit(nvcc.parses, nvcc.bridges())
        compiled = list(pool.map(lambda job: job[1](), jobs))
        wrong = [] if parsed.result() else ["a bridge from tensors does not parse"]
        kernels = sorted(chain(*compiled), key=lambda kernel: kernel.compiler)
    wrong += [*failures(kernels), *idle(kernels, DEMANDS)]
    if args.check:
        wrong += table.differences(kernels, args.check.read_text())
    if args.write:
        args.write.parent.mkdir(exist_ok=True)
        args.write.write_text(table.document(kernels))
    if args.write:
        passed.record(_without_failures(zip((unit for unit, _ in jobs), compiled, strict=True)))
    print(*wrong, f"{len(kernels)} kernels, {len(wrong)} failures", sep="\n", file=sys.stderr)
    return int(bool(wrong))


def _jobs(tritons: list[Path | None]) -> Iterator[tuple[str, Callable[[], list[Compiled]]]]:
    """Yields each CUDA source and each family of Triton kernels, with the call that compiles it."""
    for source in nvcc.sources(".cu"):
        yield str(source.relative_to(ROOT)), partial(nvcc.compiled, source)
    for choice in product(launches.FAMILIES, launches.ARCHITECTURES, tritons):
        yield choice[0], partial(launches.compiled, *choice)


def _without_failures(compiled: Iterable[tuple[str, list[Compiled]]]) -> dict[str, set[str]]:
    """Returns, for each compiler, the sources and families without a failing kernel."""
    tried, failed = defaultdict(set), defaultdict(set)
    for unit, kernels in compiled:
        for compiler in {kernel.compiler for kernel in kernels}:
            tried[compiler].add(unit)
        for kernel in kernels:
            if failures([kernel]):
                failed[kernel.compiler].add(unit)
    return {compiler: units - failed[compiler] for compiler, units in tried.items()}
