"""Selects the cases to time: an operator family's table, small-batch calls, or cases with goals."""

import importlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from benchmarks import FAMILIES
from benchmarks.harness.case import FORWARD, TRAINING, Case, Operation, without_compile
from benchmarks.harness.goals import Goal

TOKENS, HIDDEN = (1, 4, 16, 64), (64, 1024)
MMAP_THRESHOLD = 128 * 1024  # bytes; glibc keeps smaller freed blocks under either setting


def family(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.operators.{name}")


def cases(args: Namespace) -> list[Case]:
    """The suite's rows that match `args.match`; "keep" drops small ones, except launches."""
    if args.suite == "launch":
        rows = launch(args.quick, args.family)
    elif args.suite == "must-show":
        rows = together(goal.case() for goal in goals(args.allocator, args.family))
    else:
        rows = table(args)
    any_size = args.suite == "launch" or args.allocator == "default"
    return [case for case in rows if args.match in case.title and (any_size or large(case))]


def together(cases: Iterable[Case]) -> list[Case]:
    """Cases that differ in their contenders alone as one case, in which all take turns."""
    rows: dict[str, Case] = {}
    for case in cases:
        names = (*rows.get(case.title, case).contenders(), *case.contenders())
        rows[case.title] = replace(case, only=tuple(dict.fromkeys(names)))
    return list(rows.values())


def large(case: Case) -> bool:
    return math.prod(case.shape) * case.dtype.itemsize >= MMAP_THRESHOLD


def goals(allocator: str, families: Sequence[str] = ()) -> list[Goal]:
    """Returns the goals under an allocator setting, of some families or of all."""
    every = (goal for name in families or FAMILIES for goal in family(name).MUST_SHOW)
    return [goal for goal in every if allocator in goal.at_least]


def weighed() -> list[Case]:
    """Returns the rows whose memory is measured, under the default allocator."""
    return [goal.case() for goal in goals("default") if goal.of_memory is not None]


def table(args: Namespace) -> list[Case]:
    """Returns the family's own ROWS, or each of its operations on each of its shapes."""
    module = family(args.suite)
    if hasattr(module, "ROWS"):
        rows = module.QUICK_ROWS if args.quick else module.ROWS
    else:
        shapes = module.QUICK_SHAPES if args.quick else module.SHAPES
        rows = list(_product(module.OPERATIONS, [torch.float32, torch.bfloat16], shapes))
    return rows if args.compile else [without_compile(row) for row in rows]


def launch(quick: bool, families: Sequence[str] = ()) -> list[Case]:
    tokens, hidden = ((1,), (64,)) if quick else (TOKENS, HIDDEN)
    every = [operation for name in families or FAMILIES for operation in family(name).LAUNCH]
    operations = [
        replace(operation, rows=partial(rows_of_few_tokens, rows=operation.rows))
        for operation in every
    ]
    return list(_product(operations, [torch.float32], [(t, n) for n in hidden for t in tokens]))


def rows_of_few_tokens(
    result: Tensor, rows: Callable[[Tensor], Tensor] = torch.Tensor.detach
) -> Tensor:
    """Returns a launch-table result in the yardstick's rows; a weight's gradient is one row.

    rows: the operation's own.

    Each row of that gradient is a sum over the tokens, times numbers that are rounded once for the
    whole row. With one token, its largest error is a single number's, which is chance.
    """
    by_row = rows(result)
    return by_row if by_row.dim() < 2 or len(by_row) <= max(TOKENS) else by_row.flatten()


def _product(
    operations: list[Operation], dtypes: list[torch.dtype], shapes: list[tuple[int, ...]]
) -> Iterator[Case]:
    for operation in operations:
        for mode in (FORWARD, TRAINING):
            for dtype in dtypes:
                for shape in shapes:
                    yield Case(operation, mode, dtype, shape)
