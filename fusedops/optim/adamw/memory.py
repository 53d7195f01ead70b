"""Makes AdamW's loaded tensors safe to update in place.

State dicts can hold expanded tensors, tensors with the negative bit, and the same tensor twice.
In-place operators refuse the first two, and would apply two updates to the third.
"""

from bisect import bisect_right

import torch
from torch import Tensor

from fusedops.optim.adamw.shard import local, with_local

__all__ = ["Claims", "separate", "writable"]


def writable(t: Tensor, contiguous: bool = False) -> Tensor:
    """t, or a dense copy if operators cannot write t in place."""
    old = local(t)
    part = old.resolve_conj().resolve_neg()
    if contiguous:
        part = part.contiguous()
    elif not torch.ops.aten.is_non_overlapping_and_dense(part):
        part = part.clone()
    return t if part is old else with_local(t, part)


class Claims:
    """Address ranges that tensors own. No two ranges overlap."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def claim(self, t: Tensor) -> bool:
        """Claims the memory of this rank's part; False if an earlier tensor owns some of it."""
        part = local(t)
        if not _has_addresses(part):
            return True
        last = sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True))
        start = part.data_ptr()
        end = start + (last + 1) * part.element_size()
        i = bisect_right(self.starts, start)
        if (i > 0 and self.ends[i - 1] > start) or (i < len(self.starts) and self.starts[i] < end):
            return False
        self.starts.insert(i, start)
        self.ends.insert(i, end)
        return True


def separate(t: Tensor, claims: Claims) -> Tensor:
    """t, or a copy if it shares memory with an earlier tensor."""
    return t if claims.claim(t) else with_local(t, local(t).clone())


def _has_addresses(t: Tensor) -> bool:
    """Whether t has elements with addresses: subclasses may have no memory of their own."""
    plain = type(t) in (Tensor, torch.nn.Parameter) and not (t.is_meta or t.is_nested)
    return plain and t.layout == torch.strided and t.numel() > 0
