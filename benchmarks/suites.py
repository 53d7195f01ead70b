"""Which rows a command times: a family's table, the launch table, or what must be shown."""

import importlib
import math
from argparse import Namespace
from collections.abc import Iterator
from types import ModuleType

import torch

from benchmarks import FAMILIES
from benchmarks.case import FORWARD, TRAINING, Case, Operation
from benchmarks.must_show import Goal

TOKENS, HIDDEN = (1, 4, 16, 64), (64, 1024)
MMAP_THRESHOLD = 128 * 1024  # bytes; below it glibc keeps freed memory under either setting


def family(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def cases(args: Namespace) -> list[Case]:
    """The rows of `args.suite` that `args.allocator` can make a difference to."""
    if args.suite == "launch":
        return launch(args.quick)
    rows = (
        [goal.case() for goal in goals(args.allocator)]
        if args.suite == "must-show"
        else table(args)
    )
    return rows if args.allocator == "default" else [case for case in rows if large(case)]


def large(case: Case) -> bool:
    return math.prod(case.shape) * case.dtype.itemsize >= MMAP_THRESHOLD


def goals(allocator: str) -> list[Goal]:
    every = (goal for name in FAMILIES for goal in family(name).MUST_SHOW)
    return [goal for goal in every if allocator in goal.at_least]


def table(args: Namespace) -> list[Case]:
    module = family(args.suite)
    shapes = module.QUICK_SHAPES if args.quick else module.SHAPES
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if args.full else [])
    rows = _product(module.OPERATIONS, dtypes, shapes)
    return list(rows) if args.compile else [without_compile(row) for row in rows]


def launch(quick: bool) -> list[Case]:
    tokens, hidden = ((1,), (64,)) if quick else (TOKENS, HIDDEN)
    operations = [operation for name in FAMILIES for operation in family(name).LAUNCH]
    return list(_product(operations, [torch.float32], [(t, n) for n in hidden for t in tokens]))


def without_compile(case: Case) -> Case:
    names = (name for name in case.operation.contenders if not name.startswith("compile"))
    return Case(case.operation, case.mode, case.dtype, case.shape, only=tuple(names))


def _product(
    operations: list[Operation], dtypes: list[torch.dtype], shapes: list[tuple[int, ...]]
) -> Iterator[Case]:
    for operation in operations:
        for mode in (FORWARD, TRAINING):
            for dtype in dtypes:
                for shape in shapes:
                    yield Case(operation, mode, dtype, shape)
