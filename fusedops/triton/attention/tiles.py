"""The tiles of the kernels, by the size of a number, the padded width, and whether a call has a
bias, a dropout or a softcap, which take registers of their own.

M queries by N keys, warps, and stages of loads on their way. They are as large as they are without
spilling registers (checks/machine_code/attention.py). On sm_90 a product of 16 bits needs 64 rows
for four warps.
"""

from typing import Any

from torch import Tensor

from fusedops.triton.attention.call import Call

# Width: the tile of plain calls, that of the others.
FORWARD = {
    64: ((128, 128, 8, 2), (128, 64, 8, 2)),
    128: ((128, 64, 8, 2), (64, 64, 8, 2)),
    256: ((64, 32, 4, 2), (64, 32, 4, 1)),
    512: ((64, 32, 8, 1), (64, 16, 8, 1)),
}
QUERIES = {
    64: ((128, 64, 8, 2), (64, 32, 8, 2)),
    128: ((128, 64, 8, 2), (64, 16, 4, 2)),
    256: ((64, 32, 4, 1), (64, 16, 4, 1)),
    512: ((64, 16, 8, 1), (64, 16, 8, 1)),
}
KEYS = {
    64: ((128, 64, 8, 1), (32, 32, 4, 1)),
    128: ((128, 32, 8, 1), (32, 32, 4, 1)),
    256: ((128, 32, 8, 1), (32, 32, 4, 1)),
    512: ((64, 16, 4, 1), (32, 16, 4, 1)),
}
# Of float32, for all calls.
FORWARD32 = {128: (64, 16, 8, 1), 256: (32, 16, 8, 1), 512: (16, 16, 8, 1)}
QUERIES32 = {128: (64, 16, 8, 1), 256: (32, 16, 8, 1), 512: (16, 16, 8, 1)}
KEYS32 = {128: (16, 32, 8, 1), 256: (16, 16, 8, 1), 512: (16, 16, 8, 1)}
WHOLE = 64  # the widest of which a program has both sums, of dk and of dv


def forward_tile(call: Call) -> dict[str, Any]:
    return chosen(call, FORWARD, FORWARD32)


def query_tile(call: Call) -> dict[str, Any]:
    return chosen(call, QUERIES, QUERIES32)


def key_launches(call: Call, dk: Tensor | None, dv: Tensor | None) -> list[dict[str, Any]]:
    """Their tile, and the gradients that each launch makes."""
    tile = chosen(call, KEYS, KEYS32)
    both = [(None, dv), (dk, None)] if call.width > WHOLE else [(dk, dv)]
    return [tile | {"dk": k, "dv": v} for k, v in both if k is not None or v is not None]


def chosen(call: Call, halves: dict, floats: dict) -> dict[str, Any]:
    table = floats if call.q.dtype.itemsize == 4 else halves
    entry = next(table[width] for width in table if call.width <= width)
    tile = entry if table is floats else entry[call.rich]
    return dict(zip(("M", "N", "num_warps", "num_stages"), tile, strict=True)) | OPTIONS


OPTIONS = {"enable_fp_fusion": True}  # triton's default, which 3.9 warns about
