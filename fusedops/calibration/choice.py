"""Says whether our kernel or torch's code is faster for a call, by the loaded table.

The choice is a pure function of the call, the number of threads (one, or several) and the table.
"""

import warnings
from functools import lru_cache

import torch

from fusedops.calibration.table import Table, chosen, is_off
from fusedops.extension import _C

__all__ = [
    "attention_kind",
    "attention_pays",
    "head_kind",
    "head_pays",
    "load",
    "load_chosen",
    "with_threads",
]

ALONE, TOGETHER = " 1 thread", " threads"  # how the names of kinds end

_loaded: set[str] = set()  # kinds of call that the compiled part has


def load(table: Table | None) -> None:
    """Has this process choose by a table. None leaves every kind of timed call to torch's code.

    Where no calls were timed with several threads, those with one thread decide.
    """
    calls = dict(table.calls) if table else {}
    for kind, alone in [*calls.items()]:
        if kind.endswith(ALONE):
            calls.setdefault(kind.removesuffix(ALONE) + TOGETHER, alone)
    for kind in {*_loaded, *calls}:
        timed = calls.get(kind, [])
        sizes = [size for call in timed for size in call.sizes]
        _C.set_timed_calls(kind, sizes, [call.ratio for call in timed])
    _loaded.clear()
    _loaded.update(calls)
    _attention_pays.cache_clear()


def load_chosen() -> None:
    """Loads this CPU's table, unless FUSEDOPS_CALIBRATE=off leaves timed calls to torch's code."""
    choice = None if is_off() else chosen()
    if choice is not None and choice.refused:
        warnings.warn(f"fusedops: {choice.refused}", stacklevel=2)
    load(choice.table if choice else None)


def with_threads(kind: str, threads: int) -> str:
    """The kind of call for a number of threads: one, or several."""
    return kind + (ALONE if threads == 1 else TOGETHER)


def attention_kind(dtype: torch.dtype, trains: bool, mask: str, group: int) -> str:
    """trains: with its backward. mask: "none", "causal", "bool", "numbers" or "dropout".

    group: heads of queries for each head of keys.
    """
    name = f"{str(dtype).removeprefix('torch.')} {'backward' if trains else 'forward'} {mask}"
    return f"attention {name}{' grouped' if group > 1 else ''}"


def head_kind(dtype: torch.dtype, trains: bool) -> str:
    """A head's loss. trains: with its backward."""
    name = str(dtype).removeprefix("torch.")
    return f"cross_entropy {name} {'backward' if trains else 'forward'} head"


def head_pays(dtype: torch.dtype, trains: bool, sizes: tuple[int, ...]) -> bool:
    """Whether a head's loss without logits is faster than `cross_entropy` of its logits.

    sizes: rows, classes, depth.
    """
    return _C.timed_call_pays(
        with_threads(head_kind(dtype, trains), torch.get_num_threads()), sizes
    )


def attention_pays(
    dtype: torch.dtype, trains: bool, mask: str, query: torch.Size, key: torch.Size
) -> bool:
    """Whether our attention is faster than torch's. False if no such call was timed.

    dtype, trains, mask: see `attention_kind`. query, key: shapes, [B, heads, tokens, D].
    """
    return _attention_pays(dtype, trains, mask, query, key, torch.get_num_threads())


# A constant in a graph. torch.compiler's decorator would import Dynamo.
attention_pays._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(4096)  # a fifth of the time of a new call
def _attention_pays(
    dtype: torch.dtype, trains: bool, mask: str, query: torch.Size, key: torch.Size, threads: int
) -> bool:
    batch, heads, queries, width = query
    group = heads // key[1]
    kind = with_threads(attention_kind(dtype, trains, mask, group), threads)
    return _C.timed_call_pays(kind, (batch * heads, group, queries, key[2], width))
