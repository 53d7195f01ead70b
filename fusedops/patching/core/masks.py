"""Converts eager attention's masks to the simplest form that `attention` takes.

Eager code adds a mask of numbers to the scores: 0 where a key is visible, the dtype's smallest
number where it is not. `attention` is fastest with no mask or "causal". Bools take less memory.
"""

import threading

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fusedops.patching.core.probing import is_transformed

__all__ = ["simplest", "visible"]

INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # integers of the same size
STRIP = 128  # queries

Simple = tuple[Tensor | None, bool]


class _Thread(threading.local):
    """A thread's masks that were read. All layers share one tensor, so it is read once."""

    def __init__(self) -> None:
        # mask -> (its version, the scores' dtype, its meaning)
        self.meanings = WeakTensorKeyDictionary()


_thread = _Thread()


def simplest(mask: Tensor | None, scores: torch.dtype) -> Simple:
    """(mask, causal) for `attention`, from an eager function's mask [B or 1, .., Q, K].

    scores: the dtype of the scores to which the eager function adds the mask.
    A mask of only 0 and the smallest number becomes bools; it becomes causal if it is the square
    lower triangle, and None if every key is visible. Other masks stay numbers. So does a mask with
    a query that sees no key: the smallest number gives that query the mean of all values, bools
    would give zeros. So do all masks on other devices than CPUs and inside a graph or transform,
    where reading them is costly.
    """
    if mask is None or not mask.is_floating_point():
        return mask, False
    if not _readable(mask):
        return _numbers(mask, scores), False
    if mask.is_inference():  # it has no version counter
        return _meaning(mask, scores)
    *state, meaning = _thread.meanings.get(mask, (None, None, None))
    if state != [mask._version, scores]:
        meaning = _meaning(mask, scores)
        _thread.meanings[mask] = mask._version, scores, meaning
    return meaning


def visible(hidden: Tensor, zeros: bool) -> Simple | None:
    """(mask, causal) for `attention`, from bools [B or 1, .., Q, K] that are True at hidden keys.

    It is causal if it is the square lower triangle, and None if every key is visible. Returns None
    alone if a query sees no key, for which `attention` gives zeros. zeros: whether a mask that
    cannot be read, as in `simplest`, is taken to have no such query.
    """
    if not _readable(hidden):
        return (hidden.logical_not(), False) if zeros else None
    if hidden.dim() > 1 and _is_causal(
        hidden, torch.ones((), dtype=torch.bool, device=hidden.device)
    ):
        return None, True
    if hidden.all(-1).any():
        return None
    return (hidden.logical_not() if hidden.any() else None), False


def _numbers(mask: Tensor, scores: torch.dtype) -> Tensor:
    """The mask as numbers to add in float32, or in the scores' dtype.

    Eager code adds the smallest float16 to float16 scores in float16, which rounds the scores away.
    In float32 it would not, so the smallest float32 takes its place. To scores of another dtype
    than the mask's, eager code adds in float32 too (in float64 for one of float64).
    """
    if mask.dtype != scores:
        return mask.float()
    if scores != torch.float16:
        return mask
    least = torch.finfo(torch.float16).min
    return mask.float().masked_fill(mask == least, torch.finfo(torch.float32).min)


def _readable(mask: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and not is_transformed()
        and type(mask) is Tensor
        and mask.is_cpu
        and not mask.requires_grad
        and mask.numel() > 0
    )


def _meaning(mask: Tensor, scores: torch.dtype) -> Simple:
    bits = mask.view(INTEGERS[mask.itemsize])  # CPUs reduce integers fastest
    least = torch.full((), torch.finfo(mask.dtype).min, dtype=mask.dtype, device="cpu")
    hidden = least.view(bits.dtype)
    infinite = torch.full((), -torch.inf, dtype=mask.dtype, device="cpu").view(bits.dtype)
    is_infinite = bits.dim() > 1 and bits[..., 0, -1].flatten()[0] == infinite
    if _is_causal(bits, infinite if is_infinite else hidden):
        return None, True
    # As integers, negative floats sort in reverse: the smallest number and -inf come last.
    lowest = bits.amin()
    highest = mask.amax(-1)  # of each query
    if not (lowest >= hidden and highest.amax() <= 0):  # the second test is False for NaN
        return _numbers(mask, scores), False
    if lowest == 0:
        return None, False
    sees_nothing = highest.amin() < 0
    return (_numbers(mask, scores) if sees_nothing else mask.bool().logical_not_()), False


def _is_causal(bits: Tensor, hidden: Tensor) -> bool:
    """Whether each query sees exactly the keys up to its own. Checked strip by strip."""
    n, keys = bits.shape[-2:]
    if n != keys:
        return False
    side = min(STRIP, n)
    corner = hidden.expand(side, side).triu(1)
    for start in range(0, n, STRIP):
        end = min(start + STRIP, n)
        earlier, here, later = bits[..., start:end, :].tensor_split((start, end), -1)
        if not (
            torch.equal(here, corner[: end - start, : end - start].expand_as(here))
            and (start == 0 or _is_all(earlier, 0))
            and (end == n or _is_all(later, int(hidden)))
        ):
            return False
    return True


def _is_all(bits: Tensor, value: int) -> bool:
    return bits.amin().item() == value == bits.amax().item()
