"""Launches of the Triton attention kernels, and requirements on their machine code.

The kernels must not spill, except for the excused. In 16 bits, a dot with 64 or more rows must use
the architecture's own tensor cores. Smaller tiles (few queries, or many options) use sm_80's.
float32 uses no tensor cores, because its products must be float32.

Plain calls of width 128 or less use no other tensor cores.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from checks.machine_code.gates import Demand
from checks.machine_code.launches import Launch
from fusedops.triton.attention import (
    attention_backward,
    attention_forward,
    cached_attention_forward,
)

BF16, FP32 = torch.bfloat16, torch.float32
WIDTHS = (64, 128, 256, 512)
KEYS = 4096
# scalars: scale, softcap, dropout_p; window; whether there are a bias and sinks, or sequences.
OPTIONS = {
    "causal": ((0.125, 0.0, 0.0), (-1, 0), False, False),
    "sequences": ((0.125, 0.0, 0.0), (-1, 0), False, True),
    "bias": ((0.125, 0.0, 0.0), (-1, -1), True, False),
    "all options": ((0.125, 30.0, 0.1), (1024, 0), True, False),
}


def calls(quick: bool) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(variant, case, call): each kernel at each width; a selection if quick."""
    for name, dtype in {"bf16": BF16, "fp32": FP32}.items():
        for options in ("causal", "all options") if quick else OPTIONS:
            for width in WIDTHS[1:2] if quick else WIDTHS:
                variant, case = f"attention, {name}, {options}", f"width = {width}"
                for run in RUNS:
                    if options not in SKIPPED.get(run, ()):
                        yield f"{variant}{RUNS[run]}", case, partial(run, dtype, width, options)


def forward(dtype: torch.dtype, width: int, options: str, queries: int = KEYS) -> None:
    tensors, numbers = arguments(dtype, width, options, queries)
    attention_forward(*tensors, *numbers)


def decode(dtype: torch.dtype, width: int, options: str) -> None:
    forward(dtype, width, options, queries=1)


def backward(dtype: torch.dtype, width: int, options: str) -> None:
    tensors, numbers = arguments(dtype, width, options, KEYS)
    q, bias = tensors[0], tensors[3]
    lse = torch.empty(q.shape[:3], dtype=torch.float64)
    mask = [True, True, True, bias is not None, bias is not None]
    grad_lse = None if options == "causal" else lse  # a training step has none
    attention_backward(q, grad_lse, *tensors, q, lse, *numbers, mask)


def paged(dtype: torch.dtype, width: int, options: str, queries: int = KEYS) -> None:
    """A cache in pages, of four sequences."""
    scalars, window, _, varlen = OPTIONS[options]
    page, pages = 16, KEYS // 16
    k, v = (torch.empty(pages, 2, page, width, dtype=dtype) for _ in range(2))
    q = heads(dtype, queries, 8, width)
    q = q if varlen else q.expand(4, -1, -1, -1)
    cu_seqlens = torch.zeros(5, dtype=torch.int32) if varlen else None
    used, table = torch.zeros(4, dtype=torch.int32), torch.zeros(4, pages, dtype=torch.int32)
    cached_attention_forward(q, k, v, used, table, None, cu_seqlens, scalars[:2], window)


def paged_decode(dtype: torch.dtype, width: int, options: str) -> None:
    paged(dtype, width, options, queries=1)


RUNS = {
    **{forward: "", decode: ", few queries", backward: ""},
    **{paged: ", pages", paged_decode: ", pages, few queries"},
}
SKIPPED = {
    decode: ("sequences",),  # packed queries are not few
    paged: ("bias", "all options"),
    paged_decode: ("sequences", "bias", "all options"),
}


def arguments(dtype: torch.dtype, width: int, options: str, queries: int) -> tuple[tuple, tuple]:
    """Both operators' arguments, on the CPU: heads inside the sequence, four per k and v head."""
    scalars, window, biased, varlen = OPTIONS[options]
    q, k, v = (heads(dtype, n, of, width) for n, of in ((queries, 8), (KEYS, 2), (KEYS, 2)))
    bias = torch.empty(1, 8, queries, KEYS, dtype=dtype) if biased else None
    sinks = torch.empty(8) if biased else None
    cu_seqlens = torch.zeros(5, dtype=torch.int32) if varlen else None
    seed = torch.zeros((), dtype=torch.int64) if scalars[2] else None
    return (q, k, v, bias, sinks, cu_seqlens, cu_seqlens, seed), (0, 0, scalars, window, True)


def heads(dtype: torch.dtype, rows: int, count: int, width: int) -> Tensor:
    return torch.empty(1, rows, count, width, dtype=dtype).transpose(1, 2)


def demand(launch: Launch) -> Demand:
    # A dot's rows are the block's. The kernel that joins parts has none.
    rows = launch.constants.get("N" if launch.kernel.__name__ == "key_kernel" else "M", 0)
    if rows < 64 or launch.types["q"] == "*fp32":
        return Demand()
    if launch.constants["MAP"] != "folded" or launch.types["seed"] != "constexpr":
        return Demand(dot=True)
    plain = launch.types["bias"] == "constexpr" and launch.constants["D"] <= 128
    return Demand(dot=True, pure=plain)
