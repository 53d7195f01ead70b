"""Triton linear_cross_entropy: torch's matmuls, with cross_entropy's kernels in between.

The logits exist one tile at a time, in float32. Their gradients have input's dtype, because 16-bit
matmuls need 16-bit operands. Matmuls sum in float32.

- In a forward without gradients, and in a backward, a tile is all rows of a stripe of classes. Row
  sums continue from stripe to stripe. A stripe's weight gradient is complete after one matmul,
  which rounds it. The input's gradient accumulates in float32 [rows, H].
- A forward that computes the gradients needs a row's lse before any of its gradient, so a tile is
  all classes of some rows. Their input gradient is complete after one matmul. The weight's gradient
  accumulates in float32 [C, H], in place if the weight is float32.

A row whose target is ignored is processed as zeros: to skip it, the host would have to wait for the
number of remaining rows.

The cost for M rows and V classes in 16 bits: 8 M H V operations in four matmuls, because the
backward makes the logits again. Float32 heads and frozen bfloat16 ones need no matmul twice. The
row kernels read 4 bytes per logit forward; backward they read 4 and write 2. With M = 8192,
H = 4096, V = 131072 that is 35.2 TFLOP and 10.7 GB. At 780 TFLOP/s and 4.3 TB/s they take 45 and
2.5 ms: 555 TFLOP/s, if three matmuls are counted. The matmuls' own traffic, 17 GB of logits and
their gradients and 8.6 GB of the input's gradient, overlaps with their arithmetic. Extra memory:
128 MiB of logits, 64 of their gradients, and 128 for the input's sum.

Why the forward does not compute a 16-bit weight's gradient, which would save the fourth matmul: in
tiles of this memory, 256 rows of 131072 classes, it would read and write the float32 sum [C, H] 32
times, 137 GB. That takes 32 ms, and the whole 58 ms instead of 48. From 726 rows per tile on, the
matmul hides that traffic: with 1024 rows the whole would take 37 ms, but with 2.9 GB of extra
memory instead of 0.34.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops.triton.cross_entropy.logits import LossLaunch, empty_contiguous

TILE_ON_CPU = 2**19  # logits, in the interpreter
LEAST = 128  # classes per stripe, or rows

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def linear_cross_entropy_forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    reduction: int,
    scalars: Sequence[float],
    dtype: torch.dtype,
    gradients: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """fusedops::linear_cross_entropy_forward; see csrc/ops/cross_entropy/operators.h.

    Returns (loss, lse, total, dinput, dlinear_weight, dlinear_bias), None for gradients that were
    not requested.
    """
    call = LossLaunch.of(target, weight, linear_weight.shape[0], ignore_index, reduction, scalars)
    loss, lse, total = call.outputs(dtype)
    rows = Rows(lse, call.row_losses(loss), total)
    head = Head(input, linear_weight, linear_bias)
    head_gradients = head.empty_gradients(gradients)
    with torch.accelerator.device_index(input.device.index):
        if any(gradients):
            call.reduce(None, total, None)
            make_gradients(call, head, rows, head_gradients)
        else:
            make_losses(call, head, rows)
        call.reduce(rows.losses, total, loss)
    return loss, lse, total, *head_gradients


def linear_cross_entropy_backward(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    lse: Tensor,
    total: Tensor,
    ignore_index: int,
    reduction: int,
    scalars: Sequence[float],
    output_mask: Sequence[bool],
) -> Gradients:
    """The operator fusedops::linear_cross_entropy_backward.

    Returns (dinput, dlinear_weight, dlinear_bias), None where output_mask is False.
    """
    call = LossLaunch.of(target, weight, linear_weight.shape[0], ignore_index, reduction, scalars)
    head = Head(input, linear_weight, linear_bias)
    dinput, dlinear_weight, dlinear_bias = head_gradients = head.empty_gradients(output_mask)
    grad, lse = grad.contiguous(), lse.contiguous()
    sum_of_dinput = float32_like(dinput)
    with torch.accelerator.device_index(input.device.index):
        for first, x, dx in head.stripes():
            call.backward(grad, x, head.bias, first, lse, total, dx)
            classes = slice(first, first + x.shape[1])
            if sum_of_dinput is not None:
                product(dx, linear_weight[classes], sum_of_dinput, add=first > 0)
            if dlinear_weight is not None:
                product(dx.t(), input, dlinear_weight[classes])
            if dlinear_bias is not None:
                dlinear_bias[classes].copy_(dx.sum(0, dtype=torch.float32))
        put(sum_of_dinput, dinput)
    return head_gradients


class Rows(NamedTuple):
    """The kernels' per-row outputs, and the total."""

    lse: Tensor
    losses: Tensor
    total: Tensor


class Head:
    """input [rows, H], weight [C, H], bias [C] or None, and the tiles of their logits."""

    def __init__(self, input: Tensor, weight: Tensor, bias: Tensor | None):
        self.input, self.weight = input, weight
        self.bias = None if bias is None else bias.contiguous()

    def empty_gradients(self, output_mask: Sequence[bool]) -> Gradients:
        of = (self.input, self.weight, self.bias)
        x, w, b = (
            empty_contiguous(t) if needed and t is not None else None
            for needed, t in zip(output_mask, of, strict=True)
        )
        return x, w, b

    def stripes(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields each stripe of classes: first class, logits without bias, gradient memory.

        The logits are [rows, n].
        """
        rows, classes = self.input.shape[0], self.weight.shape[0]
        step = max(power_of_two(tile_size(self.input.device) // max(rows, 1)), LEAST)
        tile, gradients = self._tiles(rows, min(step, classes))
        for first in range(0, max(classes, 1), step):  # one stripe even if there are no classes
            weight = self.weight[first : first + step]
            x = tile[:, : weight.shape[0]]
            product(self.input, weight.t(), x)
            yield first, x, gradients[:, : weight.shape[0]]

    def whole_rows(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields groups of rows: which, their logits [n, C] without bias, gradient memory."""
        rows, classes = self.input.shape[0], self.weight.shape[0]
        step = max(power_of_two(tile_size(self.input.device) // max(classes, 1)), LEAST)
        tile, gradients = self._tiles(min(step, rows), classes)
        for first in range(0, max(rows, 1), step):
            input = self.input[first : first + step]
            x = tile[: input.shape[0]]
            product(input, self.weight.t(), x)
            yield slice(first, first + step), x, gradients[: input.shape[0]]

    def _tiles(self, rows: int, classes: int) -> tuple[Tensor, Tensor]:
        """Memory for logits [rows, classes], in rows of whole vectors, and their gradients.

        Both share memory if both are float32.
        """
        shape = (rows, -(-classes // 16) * 16)
        logits = self.input.new_empty(shape, dtype=torch.float32)
        in_place = self.input.dtype == torch.float32
        gradients = logits if in_place else self.input.new_empty(shape)
        return logits[:, :classes], gradients[:, :classes]


def make_losses(call: LossLaunch, head: Head, rows: Rows) -> None:
    state = None
    for first, x, _ in head.stripes():
        if x.shape[1] < call.classes and state is None:
            state = rows.lse.new_empty((5, *rows.lse.shape))
        call.forward(x, head.bias, first, state, rows.losses, rows.lse, None, rows.total)


def make_gradients(call: LossLaunch, head: Head, rows: Rows, head_gradients: Gradients) -> None:
    dinput, *weight_gradients = head_gradients
    dweight, dbias = (float32_like(t) for t in weight_gradients)
    for part, x, dx in head.whole_rows():
        part_call = replace(call, target=call.target[part])
        part_call.forward(x, head.bias, 0, None, rows.losses[part], rows.lse[part], dx, rows.total)
        again = part.start > 0
        if dinput is not None:
            product(dx, head.weight, dinput[part])
        if dweight is not None:
            product(dx.t(), head.input[part], dweight, add=again)
        if dbias is not None:
            sums = dx.sum(0, dtype=torch.float32)
            dbias.copy_(dbias + sums if again else sums)
    put(dweight, head_gradients[1])
    put(dbias, head_gradients[2])


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a b, or with `add` out += a b. Autocast does not affect calls with an `out`."""
    to: dict[str, Any] = {}
    if a.dtype != out.dtype:
        if a.is_cuda:
            to = {"out_dtype": out.dtype}
        else:
            a, b = a.to(out.dtype), b.to(out.dtype)
    if add:
        torch.addmm(out, a, b, out=out, **to)
    else:
        torch.mm(a, b, out=out, **to)


def float32_like(t: Tensor | None) -> Tensor | None:
    """The float32 memory in which a gradient accumulates: t itself if it is float32."""
    return t if t is None or t.dtype == torch.float32 else t.new_empty(t.shape, dtype=torch.float32)


def put(total: Tensor | None, into: Tensor | None) -> None:
    if total is not None and into is not None and total is not into:
        into.copy_(total)


@functools.cache
def tile_size(device: torch.device) -> int:
    """Logits per tile: as many as the L2 cache has bytes.

    The matmuls then run at full speed, and the tiles need little memory. It does not depend on free
    memory, which would change the order of sums.
    """
    if device.type == "cpu":
        return TILE_ON_CPU
    return power_of_two(torch.cuda.get_device_properties(device).L2_cache_size)


def power_of_two(n: int) -> int:
    """The largest power of two up to n; 0 for 0."""
    return 1 << n.bit_length() - 1 if n else 0
