"""cross_entropy_forward and cross_entropy_backward, and the launches that linear.py shares.

A program has a row. Two launches forward, one backward; a forward that makes the gradients of
"mean" has to know the total of all targets first, in a third. Nothing is read back to the host.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedops.triton.cross_entropy.kernels import backward_kernel, forward_kernel, reduce_kernel
from fusedops.triton.cross_entropy.tile import tile_of

NONE, MEAN = 0, 1  # as torch counts reductions
# Threads of a row at most. A row that is read again stays in the L2 cache until then: the more
# threads it has, the fewer rows are on their way at once.
THREADS, THREADS_OF_BOTH = 256, 512
REDUCE = 4096  # rows that the reduction takes in one step


def cross_entropy_forward(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: int,
    how: Sequence[float],
    dtype: torch.dtype,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The operator fusedops::cross_entropy_forward: csrc/ops/cross_entropy/operators.h.

    Returns (loss, lse, total, dinput), dinput None without with_gradient.
    """
    call = Call.of(target, weight, input.shape[1], ignore_index, reduction, how)
    loss, lse, total = call.outputs(dtype)
    dinput = empty_contiguous(input) if with_gradient else None
    losses = call.row_losses(loss)
    with torch.accelerator.device_index(input.device.index):
        if with_gradient and reduction == MEAN:
            call.reduce(None, total, None)
        call.forward(input, None, 0, None, losses, lse, dinput, total)
        call.reduce(losses, total, loss)
    return loss, lse, total, dinput


def cross_entropy_backward(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    total: Tensor,
    ignore_index: int,
    reduction: int,
    how: Sequence[float],
) -> Tensor:
    """The operator fusedops::cross_entropy_backward. Returns dinput."""
    call = Call.of(target, weight, input.shape[1], ignore_index, reduction, how)
    dinput = empty_contiguous(input)
    with torch.accelerator.device_index(input.device.index):
        call.backward(grad.contiguous(), input, None, 0, lse.contiguous(), total, dinput)
    return dinput


@dataclass(frozen=True)
class Call:
    """What the rows of a call have in common."""

    target: Tensor  # [rows]
    weight: Tensor | None  # [classes] float32
    whole: Tensor | None  # [] float64, the sum of the weights; None: the number of classes
    classes: int
    ignore_index: int
    reduction: int
    how: Sequence[float]  # label_smoothing, z_loss, scale, softcap

    @classmethod
    def of(
        cls,
        target: Tensor,
        weight: Tensor | None,
        classes: int,
        ignore_index: int,
        reduction: int,
        how: Sequence[float],
    ) -> "Call":
        if weight is not None:
            weight = weight.to(torch.float32).contiguous()
        smooth = weight is not None and how[0] != 0
        whole = weight.sum(dtype=torch.float64) if weight is not None and smooth else None
        return cls(target.contiguous(), weight, whole, classes, ignore_index, reduction, how)

    def outputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """loss, lse, total"""
        empty = functools.partial(torch.empty, device=self.target.device)
        loss = empty(self.target.shape if self.reduction == NONE else (), dtype=dtype)
        lse = empty(self.target.shape, dtype=torch.float64)
        return loss, lse, empty((), dtype=torch.float64)

    def row_losses(self, loss: Tensor) -> Tensor:
        """Where the rows' losses go: float64 if they are to be summed."""
        return (
            loss
            if self.reduction == NONE
            else loss.new_empty(self.target.shape, dtype=torch.float64)
        )

    def reduce(self, losses: Tensor | None, total: Tensor, loss: Tensor | None) -> None:
        """Writes total, and loss from the losses of the rows."""
        if self.reduction == NONE:
            losses = loss = None
        reduce_kernel[(1,)](
            self.target,
            self.weight,
            losses,
            total,
            loss,
            self.target.numel(),
            self.classes,
            self.ignore_index,
            self.reduction == MEAN,
            REDUCE,
            num_warps=16,
            enable_fp_fusion=False,
        )

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        first: int,
        state: Tensor | None,
        losses: Tensor,
        lse: Tensor,
        dx: Tensor | None,
        total: Tensor,
    ) -> None:
        """Of logits x [rows, n], those of the classes from `first` on."""
        if x.shape[0] == 0:
            return
        forward_kernel[(x.shape[0],)](
            x,
            self.target,
            self.weight,
            bias,
            self.whole,
            total,
            state,
            losses,
            lse,
            dx,
            *self._strides(x, dx),
            x.shape[1],
            first,
            x.shape[0],
            self.classes,
            self.ignore_index,
            *self._numbers(),
            MEAN=self.reduction == MEAN,
            **self._constants(x, dx),
            **self._options(bias),
            **_tile(x, dx, THREADS if dx is None else THREADS_OF_BOTH),
        )

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        bias: Tensor | None,
        first: int,
        lse: Tensor,
        total: Tensor,
        dx: Tensor,
    ) -> None:
        """dx [rows, n], of logits x of the classes from `first` on."""
        if x.numel() == 0:
            return
        backward_kernel[(x.shape[0],)](
            grad,
            x,
            self.target,
            self.weight,
            bias,
            self.whole,
            lse,
            total,
            dx,
            *self._strides(x, dx),
            x.shape[1],
            first,
            self.classes,
            self.ignore_index,
            *self._numbers(),
            PER_ROW=self.reduction == NONE,
            MEAN=self.reduction == MEAN,
            **self._constants(x, dx),
            **self._options(bias),
            **_tile(x, dx, THREADS),
        )

    def _strides(self, x: Tensor, dx: Tensor | None) -> tuple[int, int | None]:
        """Of x and dx, None where dx has that of x or there is none."""
        dstride = None if dx is None or dx.stride(0) == x.stride(0) else dx.stride(0)
        return x.stride(0), dstride

    def _numbers(self) -> tuple[float, ...]:
        """sharp, share, z_loss, inner, softcap, rate of the kernels."""
        smoothing, z_loss, scale, softcap = self.how
        inner = scale / softcap if softcap else scale
        return 1 - smoothing, smoothing / max(self.classes, 1), z_loss, inner, softcap, scale

    def _constants(self, x: Tensor, dx: Tensor | None) -> dict[str, bool | str]:
        smoothing, _, scale, softcap = self.how
        lengths = [x.shape[1], x.stride(0), x.stride(0) if dx is None else dx.stride(0)]
        return {
            "SMOOTH": smoothing != 0,
            "MAP": "capped" if softcap else "scaled" if scale != 1 else "none",
            "RAGGED": any(length % 16 for length in lengths),
        }

    def _options(self, bias: Tensor | None) -> dict[str, int | bool]:
        """How to compile. 80 registers are 24 warps a multiprocessor, but do not hold what the
        options need. Fused, z - base would not round z = x scale, but that of the target is
        rounded, and a loss near 0 is their difference."""
        smoothing, _, _, softcap = self.how
        few = smoothing == 0 and softcap == 0 and bias is None
        return {"maxnreg": 80 if few else 128, "enable_fp_fusion": False}


def _tile(x: Tensor, dx: Tensor | None, threads: int) -> dict[str, int]:
    """Of vectors of the smaller dtype: of the larger, one is two."""
    size = x.element_size() if dx is None else min(x.element_size(), dx.element_size())
    return tile_of(x.shape[1], size, threads)


def empty_contiguous(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)
