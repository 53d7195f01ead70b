"""Chooses between our kernels and torch's code, by timed calls and by sizes.

`fusedops calibrate` timed calls on CPUs. The sizes for torch.compile were measured with one thread.
Nothing was measured on GPUs, where torch's code runs if it has fast kernels. `fuse_always` has
every call run our kernel.

Under torch.compile (and strict torch.export, which traces alike) an operator is opaque to Inductor.
For small tensors, this loses more of Inductor's own fusion than the operator gains. For large ones,
Inductor's loops are as fast as our operators, but our matmuls are faster than the ones it calls.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import SymBool, Tensor
from torch.compiler import is_compiling

from fusedops.backends import forced, linear_of_any_size
from fusedops.calibration import choice
from fusedops.extension import _C
from fusedops.measuring.undo import afterwards

__all__ = [
    "attention_pays",
    "attention_unmeasured",
    "fuse_always",
    "inductor_fuses",
    "inductor_multiplies",
    "linear_loses",
    "logits_pay",
]

F32, F64 = torch.float32, torch.float64

# Elements of a loop that Inductor would fuse (a norm, a sum and its norm, a gated product, a
# rotation), and of a linear's input.
LOOP = 2**18
PRODUCT = 2**16

LOGITS = 2**25  # bytes of a head's logits that may be kept for the backward

# Input rows assumed when choosing linears: the tokens of a training step.
ROWS = 1024

# Attention on GPUs: the widest 16-bit rows for which a forward with a bias or a softcap has tiles
# of 64 queries, as sm_90's fast matmuls need (FORWARD of fusedops/triton/attention/call.py). Tensor
# cores do not multiply float32.
WIDEST_ON_TENSOR_CORES = 128

FEW_ROWS = (32, 16, 8, 4, 2, 1)  # tried in turn, to find the most that the kernel takes
EVERY = -1  # torch has no product of a 16-bit dtype for some CPUs, so ours is always faster
_few_rows: dict[tuple, int] = {}  # (dtype, columns, depth, transposed) -> the most rows

_blocks: set[object] = set()
_always = False  # whether _blocks has any; torch.compile guards on it


@contextmanager
def fuse_always() -> Iterator[None]:
    """Run every fused site with its kernel, whatever its size.

    By default, `patch` and patched models leave to torch what was measured to be as fast there:
    attention over few tokens, linears on some machines, small tensors under torch.compile. Inside
    this block they do not, which may be slower. It is for tests, and for seeing what the kernels
    compute. Whether a linear is fused is decided when `patch` is called, everything else in each
    call.

    The setting is process-wide, for all threads, until the block ends. Blocks may be nested. Models
    compiled by torch.compile are recompiled. FUSEDOPS_FUSE=always does the same for a whole
    process.
    """
    block = object()
    with afterwards(partial(_leave, block)):
        _enter(block)
        yield


def _enter(block: object) -> None:
    _blocks.add(block)
    _follow()


def _leave(block: object) -> None:
    _blocks.discard(block)
    _follow()


def _follow() -> None:
    """Runs `linear` at any size exactly while there are blocks.

    It takes no lock, which an interrupt could leave held, so it re-checks after writing.
    """
    global _always
    while True:
        any_size = bool(_blocks)
        _always = any_size
        linear_of_any_size(any_size)
        if any_size == bool(_blocks):
            return


def _read_environment() -> None:
    asked = os.environ.get("FUSEDOPS_FUSE", "")
    if asked not in ("", "always"):
        raise ValueError(f"FUSEDOPS_FUSE must be 'always' or empty, got {asked!r}")
    if asked:
        _enter("FUSEDOPS_FUSE")


_read_environment()


def attention_pays(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
) -> bool:
    """Whether `attention` is at least as fast as sdpa on a CPU. True for symbolic sizes.

    query, key: [B, heads, tokens, D]. mask: bool, or numbers to add.
    """
    queries, keys = query.shape, key.shape
    if _always or not _are_certain(queries, keys):
        return True
    dtype = query.dtype
    if torch.is_autocast_enabled("cpu") and dtype != F64:
        dtype = torch.get_autocast_dtype("cpu")
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    kind = "dropout" if trains and dropout_p else _mask_kind(mask, causal)
    return choice.attention_pays(dtype, trains, kind, queries, keys)


def _mask_kind(mask: Tensor | None, causal: bool) -> str:
    if mask is None:
        return "causal" if causal else "none"
    return "bool" if mask.dtype == torch.bool else "numbers"


def attention_unmeasured(query: Tensor, value: Tensor, plain: bool, device: str = "cuda") -> bool:
    """Whether to leave a call on a GPU to torch, since nobody has timed `attention` there.

    plain: torch has fast kernels for the call, as it has neither softcap, sinks nor position bias.
    Other calls run in eager code there, and are left to it if our tiles are slow too. device: of
    the autocast that may be on.
    """
    if _always:
        return False
    autocast = torch.is_autocast_enabled(device) and query.dtype != F64
    dtype = torch.get_autocast_dtype(device) if autocast else query.dtype
    narrow = max(query.shape[3], value.shape[3]) <= WIDEST_ON_TENSOR_CORES
    return plain or not (narrow and dtype.itemsize == 2)


def logits_pay(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `cross_entropy` of a head's logits beats the loss without logits.

    Many logits and those in float32 are never made, because of their memory. Meta tensors stand for
    a CPU's.
    """
    rows = x.numel() // x.shape[-1]
    large = dtype.itemsize > 2 or len(weight) * rows * dtype.itemsize > LOGITS
    if _always or large or x.device.type not in ("cpu", "meta"):
        return False
    trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return not choice.head_pays(dtype, trains, (rows, len(weight), x.shape[-1]))


def linear_loses(weight: Tensor, transposed: bool) -> str:
    """Why a fused linear without an activation would be no faster here; empty if it is."""
    dtype, device = str(weight.dtype).removeprefix("torch."), weight.device.type
    columns, depth = weight.shape[::-1] if transposed else weight.shape
    if _always:
        return ""
    if device not in ("cpu", "meta") or weight.dtype not in (F32, torch.bfloat16, torch.float16):
        where = {"cpu": "CPUs", "meta": "CPUs", "cuda": "GPUs"}.get(device, device)
        return f"for {dtype} on {where} torch's matmul is already as fast"
    few = _note_few_rows(weight, transposed)
    if few or _C.own_product_pays(weight.dtype, ROWS, columns, depth, not transposed):
        return ""
    return "torch's matmul of this size is as fast on this machine"


def _note_few_rows(weight: Tensor, transposed: bool) -> int:
    """The most rows for which our product is faster in a graph too; 0 if there are none.

    It is kept for `inductor_multiplies`, since torch.compile cannot trace a call of the library.
    """
    columns, depth = weight.shape[::-1] if transposed else weight.shape
    pays = partial(_C.few_rows_pay, weight.dtype)
    limit = next((n for n in FEW_ROWS if pays(n, columns, depth, transposed)), 0)
    if weight.dtype != F32 and _C.own_product_pays(
        weight.dtype, ROWS, columns, depth, not transposed
    ):
        limit = EVERY
    _few_rows[weight.dtype, columns, depth, transposed] = limit
    return limit


def inductor_fuses(x: Any) -> bool:
    """Whether to leave a loop over x to Inductor; also for symbolic sizes."""
    return _may_compile(x) and not _certain(x.numel() >= LOOP)


def inductor_multiplies(x: Any, weight: Tensor, transposed: bool) -> bool:
    """Whether to leave the product to the matmul that Inductor calls; few rows have a kernel.

    weight: [columns, depth], transposed if the module keeps it as [depth, columns].
    """
    if not _may_compile(x) or not _certain(x.numel() < PRODUCT):
        return False
    columns, depth = weight.shape
    limit = _few_rows.get((weight.dtype, columns, depth, transposed), 0)
    return limit != EVERY and not _certain(x.numel() <= limit * x.shape[-1])


def _may_compile(x: Any) -> bool:
    compiles = is_compiling() and isinstance(x, Tensor) and x.device.type == "cpu"
    return compiles and forced() is None and not _always


def _are_certain(query: torch.Size, key: torch.Size) -> bool:
    """Whether attention's shapes are the same in all calls that a graph serves."""
    if not is_compiling():  # torch.jit.trace makes sizes tensors
        return type(query[0]) is int and type(query[2]) is int and type(key[2]) is int
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imports sympy

    return all(has_static_value(size) for size in (*query, *key))


def _certain(condition: Any) -> bool:
    """Whether a condition on sizes holds for all sizes that a graph serves.

    Evaluating a symbol would add a guard, which causes recompilation or makes an export fail.
    torch.jit.trace makes sizes tensors; nothing is known about those either.
    """
    if not is_compiling() and not isinstance(condition, SymBool):
        return condition is True
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return isinstance(condition, bool | SymBool) and statically_known_true(condition)
