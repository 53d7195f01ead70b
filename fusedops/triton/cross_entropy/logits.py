"""Launches the Triton kernels of cross_entropy, which linear_cross_entropy uses too.

Two launches forward: one program per row, then one program that sums the rows. One launch backward.
A forward that computes the gradients of "mean" must know the total of all targets first, in a third
launch. Nothing is read back to the host.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedops.triton.cross_entropy.kernels import backward_kernel, forward_kernel, reduce_kernel
from fusedops.triton.cross_entropy.tile import tile_of

NONE, MEAN = 0, 1  # torch's numbering of reductions
# Most threads per row. A row that is read again must stay in the L2 cache until then: more threads
# per row means fewer rows in flight.
THREADS, THREADS_OF_BOTH = 256, 512
REDUCE = 4096  # rows per step of the reduction


def cross_entropy_forward(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: int,
    scalars: Sequence[float],
    dtype: torch.dtype,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """fusedops::cross_entropy_forward; see csrc/ops/cross_entropy/operators.h.

    Returns (loss, lse, total, dinput); dinput is None without with_gradient.
    """
    call = LossLaunch.of(target, weight, input.shape[1], ignore_index, reduction, scalars)
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
    scalars: Sequence[float],
) -> Tensor:
    """The operator fusedops::cross_entropy_backward. Returns dinput."""
    call = LossLaunch.of(target, weight, input.shape[1], ignore_index, reduction, scalars)
    dinput = empty_contiguous(input)
    with torch.accelerator.device_index(input.device.index):
        call.backward(grad.contiguous(), input, None, 0, lse.contiguous(), total, dinput)
    return dinput


@dataclass(frozen=True)
class LossLaunch:
    """A call's arguments, shared by all its rows."""

    target: Tensor  # [rows]
    weight: Tensor | None  # [classes] float32
    whole: Tensor | None  # [] float64, the sum of the weights; None: the number of classes
    classes: int
    ignore_index: int
    reduction: int
    scalars: Sequence[float]  # label_smoothing, z_loss, scale, softcap

    @classmethod
    def of(
        cls,
        target: Tensor,
        weight: Tensor | None,
        classes: int,
        ignore_index: int,
        reduction: int,
        scalars: Sequence[float],
    ) -> "LossLaunch":
        if weight is not None:
            weight = weight.to(torch.float32).contiguous()
        smooth = weight is not None and scalars[0] != 0
        whole = weight.sum(dtype=torch.float64) if weight is not None and smooth else None
        return cls(target.contiguous(), weight, whole, classes, ignore_index, reduction, scalars)

    def outputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Allocates loss, lse and total."""
        empty = functools.partial(torch.empty, device=self.target.device)
        loss = empty(self.target.shape if self.reduction == NONE else (), dtype=dtype)
        lse = empty(self.target.shape, dtype=torch.float64)
        return loss, lse, empty((), dtype=torch.float64)

    def row_losses(self, loss: Tensor) -> Tensor:
        """Memory for the rows' losses: float64 if they are to be summed."""
        return (
            loss
            if self.reduction == NONE
            else loss.new_empty(self.target.shape, dtype=torch.float64)
        )

    def reduce(self, losses: Tensor | None, total: Tensor, loss: Tensor | None) -> None:
        """Writes total, and the loss from the rows' losses."""
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
        """Processes logits x [rows, n], which are the classes from `first` on."""
        if x.shape[0] == 0:
            return
        tile = _tile(x, dx, THREADS if dx is None else THREADS_OF_BOTH)
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
            **self._options(x, bias, dx, tile["LANES"]),
            **tile,
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
        """Writes the gradient dx [rows, n] of logits x, which are the classes from `first` on."""
        if x.numel() == 0:
            return
        tile = _tile(x, dx, THREADS)
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
            **self._options(x, bias, dx, tile["LANES"]),
            **tile,
        )

    def _strides(self, x: Tensor, dx: Tensor | None) -> tuple[int, int | None]:
        """Row strides of x and dx; None where dx shares x's or does not exist."""
        dstride = None if dx is None or dx.stride(0) == x.stride(0) else dx.stride(0)
        return x.stride(0), dstride

    def _numbers(self) -> tuple[float, ...]:
        """The kernels' sharp, share, z_loss, inner, softcap and rate."""
        smoothing, z_loss, scale, softcap = self.scalars
        inner = scale / softcap if softcap else scale
        return 1 - smoothing, smoothing / max(self.classes, 1), z_loss, inner, softcap, scale

    def _constants(self, x: Tensor, dx: Tensor | None) -> dict[str, bool | str]:
        smoothing, _, scale, softcap = self.scalars
        lengths = [x.shape[1], x.stride(0), x.stride(0) if dx is None else dx.stride(0)]
        return {
            "SMOOTH": smoothing != 0,
            "MAP": "capped" if softcap else "scaled" if scale != 1 else "none",
            "RAGGED": any(length % 16 for length in lengths),
        }

    def _options(
        self, x: Tensor, bias: Tensor | None, dx: Tensor | None, threads: int
    ) -> dict[str, int | bool]:
        """Compile options. 80 registers allow 3 rows of THREADS per multiprocessor, if the options
        fit in them. A tile of float32 logits with narrower gradients does not fit. Rows of twice as
        many threads have a multiprocessor to themselves, with 80 registers or 128.

        With fused multiply-add, z - base would not round z = x scale, but the target's z is
        rounded, and a loss near 0 is their difference.
        """
        smoothing, _, _, softcap = self.scalars
        narrower = dx is not None and dx.element_size() < x.element_size()
        plain = smoothing == 0 and softcap == 0 and bias is None
        few = plain and not narrower and threads == THREADS
        return {"maxnreg": 80 if few else 128, "enable_fp_fusion": False}


def _tile(x: Tensor, dx: Tensor | None, threads: int) -> dict[str, int]:
    """The tile in vectors of the smaller dtype; each is two vectors of a larger one."""
    size = x.element_size() if dx is None else min(x.element_size(), dx.element_size())
    return tile_of(x.shape[1], size, threads)


def empty_contiguous(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)
