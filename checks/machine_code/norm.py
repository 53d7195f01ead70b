"""Launches of the Triton norm kernels, and memory accesses required of their machine code.

Global memory is accessed 16 bytes at a time, and each byte once, except that a long row is read
again.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checks.machine_code.gates import Demand
from checks.machine_code.launches import Launch
from fusedops.triton.norm import backward, forward
from fusedops.triton.norm.tile import tile_of

BYTES = {"*bf16": 2, "*fp32": 4}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Kind, dropout, dtype: the ones that need the most registers, and the one that most models run.
CHOICES = [("layer", 0.1, "bf16"), ("layer", 0.1, "fp32"), ("rms_llama", 0.0, "bf16")]


def calls(quick: bool) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """(variant, case, call): every tile that the launchers may choose; a selection if quick."""
    for kind, p, dtype in CHOICES[::2] if quick else CHOICES:
        choice = f"{kind}{', dropout' if p else ''}, {dtype}"
        for length, n in lengths(forward.LONGEST, quick):
            yield f"{choice}, {length}", f"n = {n}", partial(run_forward, n, kind, p, dtype)
        for length, n in lengths(backward.LONGEST, quick):
            for few in (False, True):
                case = f"n = {n}{', few rows' if few else ''}"
                yield f"{choice}, {length}", case, partial(run_backward, n, few, kind, p, dtype)


def lengths(longest: int, quick: bool) -> list[tuple[str, int]]:
    """Returns the longest row of each tile, with its range.

    Covers rows that share a program, have their own program, or are read block by block, each with
    whole vectors (n % 16 == 0) and ragged.
    """
    ranges: dict[tuple[bool, bool, bool], dict[tuple, list[int]]] = {}
    for n in range(1, longest + 17):
        tile, ragged = tile_of(n, longest), n % 16 != 0
        tiles = ranges.setdefault((ragged, bool(tile["LOOP"]), tile["ROWS"] == 1), {})
        tiles.setdefault((n == 1, *tile.values()), []).append(n)
    titled = []
    for (ragged, loop, _), tiles in sorted(ranges.items()):
        every = list(tiles.values())
        bound = f"n >= {every[0][0]}" if loop else f"n <= {every[-1][-1]}"
        lasts = [ns[-1] for ns in every]
        titled += [("ragged " * ragged + bound, n) for n in (lasts[-1:] if quick else lasts)]
    return titled


def run_forward(n: int, kind: str, p: float, dtype: str) -> None:
    x, weight, bias, seed = tensors(1, n, kind, p, dtype)
    forward.norm_forward(x, x, weight, bias, 1, 1e-5, kind, 0.0, p, seed)


def run_backward(n: int, few: bool, kind: str, p: float, dtype: str) -> None:
    """Runs the backward. few: one program handles all rows, and writes dweight and dbias itself."""
    rows = 1 if few else 5 * tile_of(n, backward.LONGEST)["ROWS"]
    x, weight, bias, seed = tensors(rows, n, kind, p, dtype)
    stats = torch.empty(1 if bias is None else 2, rows, dtype=torch.float64)
    mask = [True, p > 0, True, bias is not None]
    backward.norm_backward(x, x, x, weight, bias, stats, 1, 1e-5, kind, 0.0, p, seed, mask)


def tensors(
    rows: int, n: int, kind: str, p: float, dtype: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x [rows, n], weight [n], bias [n], seed []; None for what the kind and p do not use."""
    x, row = torch.empty(rows, n, dtype=DTYPES[dtype]), torch.empty(n, dtype=DTYPES[dtype])
    return x, row, row if kind == "layer" else None, torch.tensor(0) if p else None


def demand(launch: Launch) -> Demand:
    """Demands one 16-byte access per 16 bytes that a thread reads or writes."""
    if "n" not in launch.aligned:
        return Demand()
    loads, stores = TRAFFIC[launch.kernel.__name__](partial(vectors, launch), launch.constants)
    return Demand(loads=loads, stores=stores)


def vectors(launch: Launch, elements: int, names: str) -> int:
    """Whole 16-byte vectors per thread for `elements` of each given argument."""
    sizes = [BYTES.get(launch.types[name], 0) for name in names.split()]
    return sum(elements * size // (16 * 32 * launch.num_warps) for size in sizes)


def forward_traffic(of: Callable[[int, str], int], tile: dict[str, Any]) -> tuple[int, int]:
    whole = tile["ROWS"] * tile["BLOCK"]
    again = of(whole, "h") if tile["LOOP"] else 0
    return of(whole, "x residual weight bias") + again, of(whole, "y h")


def backward_traffic(of: Callable[[int, str], int], tile: dict[str, Any]) -> tuple[int, int]:
    whole = tile["ROWS"] * tile["BLOCK"]
    sums = of(tile["BLOCK"], "dweight dbias")
    again = of(whole, "dy h weight") + sums if tile["LOOP"] else 0
    return of(whole, "dy dh h weight") + again, of(whole, "dresidual dx") + sums


def reduce_traffic(of: Callable[[int, str], int], tile: dict[str, Any]) -> tuple[int, int]:
    rows, sums = tile["ROWS"] * tile["COLS"], tile["COLS"]
    return of(rows, "dweight_rows dbias_rows"), of(sums, "dweight dbias")


TRAFFIC = {
    "forward_kernel": forward_traffic,
    "backward_kernel": backward_traffic,
    "reduce_kernel": reduce_traffic,
}
