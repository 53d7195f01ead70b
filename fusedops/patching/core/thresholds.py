"""Where a fused call is worth it: every size that decides between our kernels and torch's lines.

They were measured on CPUs, on one thread; on GPUs nobody has measured. `fuse_always` switches them
off.

Under torch.compile, and strict torch.export, which traces alike, an operator is opaque to Inductor.
Of small tensors, what Inductor would have fused costs more than the operator gains. Of large ones
its loops are as fast as our operators, and our products are faster than the ones that it calls.
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
from fusedops.extension import _C
from fusedops.patching.core.undo import afterwards

__all__ = [
    "attention_pays",
    "fuse_always",
    "inductor_fuses",
    "inductor_multiplies",
    "linear_loses",
    "logits_pay",
]

F32 = torch.float32

# Elements of what Inductor would fuse: a norm, a sum and its norm, a gated product, a rotation; and
# of a linear's input.
LOOP = 2**18
PRODUCT = 2**16

# Bytes of a head's logits in bfloat16: an AMD EPYC with 8192 columns, where a loss without logits
# took 1.4 times as long for 1024 rows and twice as long for 16.
LOGITS = 2**25

# Rows of input for which a linear is chosen: the tokens of a training step.
ROWS = 1024

# Attention: an AMD EPYC for a step of generation, an Intel Xeon for forward and backward.
FEW_QUERIES = 16
KEYS, KEYS_IN_TRAINING = 128, 512  # of few queries
SCORES, WIDE_SCORES = 128 * 128, 256 * 256  # queries times keys of many, in 16 bits and in 32

_blocks: set[object] = set()
_always = False  # whether there are any; torch.compile guards on it


@contextmanager
def fuse_always() -> Iterator[None]:
    """Run every fused site by its kernel, whatever its size.

    `patch` and the models that it has patched leave to torch what was measured to be as fast there:
    attention of few tokens, linears on some machines, small tensors under torch.compile. Within
    this block they do not, which may be slower: for tests, and to see what the kernels give. A
    linear is chosen when `patch` is called, everything else at each call.

    Process-wide until the block ends, for all threads. Blocks may be nested. Models that
    torch.compile has compiled are compiled again. FUSEDOPS_FUSE=always does the same for a process.
    """
    block = object()
    leave = partial(_leave, block)
    with afterwards(leave), afterwards(leave):
        _enter(block)
        yield


def _enter(block: object) -> None:
    _blocks.add(block)
    _follow()


def _leave(block: object) -> None:
    _blocks.discard(block)
    _follow()


def _follow() -> None:
    """Without a lock, which an interrupt could leave held: a thread that wrote looks again."""
    global _always
    while True:
        wanted = bool(_blocks)
        _always = wanted
        linear_of_any_size(wanted)
        if wanted == bool(_blocks):
            return


def _read_environment() -> None:
    asked = os.environ.get("FUSEDOPS_FUSE", "")
    if asked not in ("", "always"):
        raise ValueError(f"FUSEDOPS_FUSE must be 'always' or empty, got {asked!r}")
    if asked:
        _enter("FUSEDOPS_FUSE")


_read_environment()


def attention_pays(query: Tensor, key: Tensor) -> bool:
    """Whether `attention` takes no longer than sdpa. True of sizes that are symbols."""
    if _always:
        return True
    queries, keys = query.shape[2], key.shape[2]
    if query.device.type == "cuda":
        return False
    if _known(queries > FEW_QUERIES):
        return not _known(queries * keys < (WIDE_SCORES if query.dtype == F32 else SCORES))
    if torch.is_grad_enabled() and query.requires_grad:
        return not _known(keys < KEYS_IN_TRAINING)
    return _known(queries == 1) or not _known(keys < KEYS)


def logits_pay(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `cross_entropy` of a head's logits is faster than a loss without them: where they are
    few. In bfloat16 on CPUs, as the backward of the latter makes the product again.
    """
    few = len(weight) * (x.numel() // x.shape[-1]) * dtype.itemsize <= LOGITS
    return not _always and x.is_cpu and dtype == torch.bfloat16 and few


def linear_loses(weight: Tensor, transposed: bool) -> str:
    """Why the fused linear without an activation would be no faster here, empty where it is."""
    dtype, device = str(weight.dtype).removeprefix("torch."), weight.device.type
    columns, depth = weight.shape[::-1] if transposed else weight.shape
    if _always:
        return ""
    if device not in ("cpu", "meta") or weight.dtype != F32:
        where = {"cpu": "CPUs", "cuda": "GPUs"}.get(device, device)
        return f"for {dtype} on {where} torch's matmul is already as fast"
    if _C.own_product_pays(weight.dtype, ROWS, columns, depth, False):
        return ""
    return "torch's matmul of this size is as fast on this machine"


def inductor_fuses(x: Any) -> bool:
    """Whether Inductor's own loop over x is to run: also of a size that is a symbol."""
    return _may_compile(x) and not _known(x.numel() >= LOOP)


def inductor_multiplies(x: Any) -> bool:
    """Whether the product of x that Inductor calls is to run."""
    return _may_compile(x) and _known(x.numel() < PRODUCT)


def _may_compile(x: Any) -> bool:
    compiles = is_compiling() and isinstance(x, Tensor) and x.device.type == "cpu"
    return compiles and forced() is None and not _always


def _known(condition: Any) -> bool:
    """Whether a condition on sizes is true of all that a graph is for.

    A question about symbols would be a guard, for which a graph is made again or an export refused.
    torch.jit.trace makes tensors of sizes: of these nothing is known either.
    """
    if not is_compiling() and not isinstance(condition, SymBool):
        return condition is True
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return isinstance(condition, bool | SymBool) and statically_known_true(condition)
