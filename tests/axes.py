"""Parametrizes a test over the values of several axes, pair by pair, in one line."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
import torch

Row = tuple[int, ...]  # for each axis, the place of its value


def grid(
    *first: Any, only: Callable[..., bool] | None = None, **others: Iterable[Any]
) -> pytest.MarkDecorator:
    """`grid("op,backend", CASES, dtype=FLOATS)` runs a test for each case in each dtype.

    From three axes on the cases are not the product: they are as few as have, on each backend,
    every value of an axis with every value of each other axis. Stack two grids where a test needs
    the product.

    first: parametrize marks, or names and values of axes that have several names. A value's id is
    its text or its name, or the axis's name with the value's number.
    only: returns whether the values that it gets by name go together. The others make no case.
    """
    columns = [*_columns(first), *(_Column(name, values) for name, values in others.items())]
    rows = list(product(*(range(len(column.values)) for column in columns)))
    if only:
        rows = [row for row in rows if only(**_by_name(columns, row))]
    if len(columns) > 2:
        rows = _pairwise_per_backend(columns, rows)
    names = [name for column in columns for name in column.names]
    indirect = [name for column in columns if column.indirect for name in column.indirect]
    return pytest.mark.parametrize(names, [_case(columns, row) for row in rows], indirect=indirect)


class _Column:
    """An axis: the names that a test's arguments have, and their values with an id for each.

    ids: as parametrize takes them; indirect: the names that are fixtures.
    """

    def __init__(
        self,
        names: str,
        values: Iterable[Any],
        ids: Any = None,
        indirect: Sequence[str] = (),
    ) -> None:
        self.names = [name.strip() for name in names.split(",")]
        self.values = [tuple(v) if len(self.names) > 1 else (v,) for v in values]
        places = range(len(self.values))
        if ids is None or ids is str:
            self.ids = ["-".join(self._parts(i)) for i in places]
        else:
            self.ids = [ids(v[0]) for v in self.values] if callable(ids) else list(ids)
        self.indirect = indirect

    def _parts(self, place: int) -> Iterator[str]:
        for name, value in zip(self.names, self.values[place], strict=True):
            yield _named(value) or f"{name}{place}"


def _columns(first: Sequence[Any]) -> Iterator[_Column]:
    rest = iter(first)
    for names in rest:
        if isinstance(names, str):
            yield _Column(names, next(rest))
        else:
            yield _Column(*names.args, **names.kwargs)


def _by_name(columns: list[_Column], row: Row) -> dict[str, Any]:
    cells = zip(columns, row, strict=True)
    return {n: v for c, i in cells for n, v in zip(c.names, c.values[i], strict=True)}


def _case(columns: list[_Column], row: Row) -> Any:
    text = "-".join(column.ids[i] for column, i in zip(columns, row, strict=True))
    return pytest.param(*_by_name(columns, row).values(), id=text)


def _pairwise_per_backend(columns: list[_Column], rows: list[Row]) -> list[Row]:
    """Few rows of each backend, which is other code."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(_by_name(columns, row).get("backend"), []).append(row)
    chosen = {row for group in groups.values() for row in _pairwise(group)}
    return [row for row in rows if row in chosen]


def _pairwise(rows: list[Row]) -> set[Row]:
    """Few of the rows, but every pair of values that some row has. The same ones at each run."""
    shuffled = Random(0).sample(rows, len(rows))
    seen: set[tuple] = set()
    chosen: set[Row] = set()
    axes = len(rows[0])
    for least in range(axes * (axes - 1) // 2, 0, -1):
        for row in shuffled:
            pairs = set(combinations(enumerate(row), 2))
            if len(pairs - seen) >= least:
                seen |= pairs
                chosen.add(row)
    return chosen


def _named(value: Any) -> str | None:
    """A text that is the same in every process; None where the value has to be numbered."""
    if isinstance(value, str):
        return value
    if _is_plain(value):
        return str(value)
    return getattr(value, "__name__", None)


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(isinstance(part, str) or _is_plain(part) for part in value)
    return value is None or isinstance(value, bool | int | float | torch.dtype | torch.device)
