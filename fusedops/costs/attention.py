"""FLOP and byte formulas of attention, and of torch's fused attention on CPUs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf, prod
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fusedops.costs.traffic import Formula, Traffic, moved, passes

__all__ = ["FLOPS", "TRAFFIC"]

Shape = Sequence[int]


def attention_forward(**call: Any) -> int:
    return sum(_products(*shapes, 1, 1) for shapes in _sequences(**call))


def cached_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    **_: Any,
) -> int:
    """Products with the used keys; with the whole cache if their numbers cannot be read."""
    room = k.shape[2] * (1 if block_table is None else block_table.shape[1])
    width, tokens = q.shape[3] + v.shape[3], q.shape[0] * q.shape[2]
    if not _known(seqused_k) or not (cu_seqlens_q is None or _known(cu_seqlens_q)):
        return 2 * q.shape[1] * tokens * room * width
    used = seqused_k.tolist()
    each = [q.shape[2]] * len(used) if cu_seqlens_q is None else cu_seqlens_q.diff().tolist()
    pairs = sum(queries * keys for queries, keys in zip(each, used, strict=True))
    return 2 * q.shape[1] * pairs * width


def attention_backward(**call: Any) -> int:
    dq, dk, dv, *others = call["output_mask"]
    score_gradient = any((dq, dk, *others))  # the gradient of out times v
    products = (3, 2) if _torch_fuses(**call) else (dq + dk, dv + score_gradient)
    return sum(_products(*shapes, *products) for shapes in _sequences(**call))


def sdpa_forward(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> int:
    return _products(query.shape, key.shape, value.shape, 1, 1)


def sdpa_backward(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> int:
    return _products(query.shape, key.shape, value.shape, 3, 2)


def _products(q: Shape, k: Shape, v: Shape, width_products: int, value_products: int) -> int:
    """FLOPs of q-by-k products: width_products of them over q's width, value_products over v's."""
    return 2 * prod(q[:3]) * k[2] * (width_products * q[3] + value_products * v[3])


def _torch_fuses(
    q: Tensor,
    v: Tensor,
    sinks: Any,
    scalars: Sequence[float],
    output_mask: Sequence[bool],
    **_: Any,
) -> bool:
    """Whether scaled_dot_product_attention runs a fused kernel for the call.

    No fused kernel takes softcaps, sinks or meta tensors. The CPU kernel takes no dropout, no
    gradient of the mask, and no v whose width differs from q's.
    """
    _scale, softcap, dropout = scalars
    if softcap or sinks is not None or q.is_meta:
        return False
    return q.device.type != "cpu" or not (dropout or output_mask[3] or q.shape[3] != v.shape[3])


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q: int,
    max_k: int,
    **_: Any,
) -> Iterator[tuple[Shape, Shape, Shape]]:
    """The shapes of q, k and v: one triple, or one per sequence of cu_seqlens."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        yield q.shape, k.shape, v.shape
        return
    q_lengths = _sequence_lengths(cu_seqlens_q, max_q or q.shape[2])
    k_lengths = _sequence_lengths(cu_seqlens_k, max_k or k.shape[2])
    for queries, keys in zip(q_lengths, k_lengths, strict=True):
        yield _of(q, queries), _of(k, keys), _of(v, keys)


def _of(packed: Tensor, length: int) -> Shape:
    return 1, packed.shape[1], length, packed.shape[3]


def _sequence_lengths(offsets: Tensor, longest: int) -> list[int]:
    """Each sequence's length; all as long as the longest if offsets cannot be read."""
    if not _known(offsets):
        return [longest] * (len(offsets) - 1)
    return offsets.diff().tolist()


def _known(t: Tensor) -> bool:
    return not (t.is_meta or isinstance(t, FakeTensor | FunctionalTensor))


FLOPS: dict[str, Callable[..., int]] = {
    "fusedops::attention_forward": attention_forward,
    "fusedops::attention_backward": attention_backward,
    "fusedops::cached_attention_forward": cached_attention_forward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": sdpa_forward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward,
}


# Byte formulas. A block of a head's queries reads the keys and values that it sees again, and each
# head reads a mask that the heads share.

QUERIES = 64  # per block, in csrc/cpu
FEW = 64  # up to this many queries of a head of k read k and v once, as in generation


def _forward_traffic(q, k, v, bias, cu_seqlens_q, **call):
    lengths = _lengths(q, k, cu_seqlens_q, call["cu_seqlens_k"])
    group = q.shape[1] // max(k.shape[1], 1)
    decodes = all(queries * group <= FEW for queries, _ in lengths)
    row = _row(k) + _row(v)
    seen = 0 if decodes else _seen_by_blocks(q, lengths, QUERIES, **call)
    head = max((keys for _, keys in lengths), default=0) * row
    return Traffic(again=passes((seen, row, head)) + _mask_again(q, bias, lengths, 1, **call))


def _cached_traffic(q, k, v, seqused_k, cu_seqlens_q, window, **_):
    """k and v count whole, used or not."""
    queries = [q.shape[2]] * q.shape[0]
    if cu_seqlens_q is not None:
        queries = cu_seqlens_q.diff().tolist()
    group = q.shape[1] // max(k.shape[1], 1)
    lengths = [(n, keys) for n, keys in zip(queries, seqused_k.tolist(), strict=True)
               if n * group > FEW]  # fmt: skip
    row = _row(k) + _row(v)
    seen = _seen_by_blocks(q, lengths, QUERIES, window=window, bottom_right=True)
    return Traffic(again=passes((seen, row, max((n for _, n in lengths), default=0) * row)))


def _backward_traffic(grad, q, k, v, bias, cu_seqlens_q, output_mask, **call):
    """It reads k twice for each head, and what a block of queries sees twice for each block."""
    lengths = _lengths(q, k, cu_seqlens_q, call["cu_seqlens_k"])
    rows = (1 + output_mask[0]) * _row(k) + _row(v)
    seen = _seen_by_blocks(q, lengths, QUERIES, **call)
    keys = max((keys for _, keys in lengths), default=0)
    unread = ("out", *["lse"] * (not output_mask[4])) if q.is_cpu else ()
    again = passes(
        (1, moved(k), keys * _row(k)),
        (1, moved(q, grad), QUERIES * (_row(q) + _row(grad))),
        (seen, rows, keys * rows),
    )
    return Traffic(unread, again + _mask_again(q, bias, lengths, 2, **call))


def _row(t):
    return t.shape[-1] * t.element_size()


def _mask_again(q, bias, lengths, times, **call):
    """`times`: how often a head reads its part of the mask."""
    if bias is None:
        return ()
    read = times * _seen_by_blocks(q, lengths, 1, **call) * bias.element_size()
    head_bytes = max((queries * keys for queries, keys in lengths), default=0) * bias.element_size()
    return passes((1, read - moved(bias), min(moved(bias), head_bytes)))


def _lengths(q, k, cu_seqlens_q, cu_seqlens_k):
    """Queries and keys of each sequence, or of each batch entry."""
    if cu_seqlens_q is None:
        return [(q.shape[2], k.shape[2])] * q.shape[0]
    return list(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True))


def _seen_by_blocks(q, lengths, block, window, bottom_right, **_):
    """The keys that blocks of queries see, summed over blocks, heads and sequences."""
    left, right = (inf if side < 0 else side for side in window)
    seen = 0
    for (queries, keys), times in Counter(lengths).items():
        shift = keys - queries if bottom_right else 0
        for first in range(0, queries, block):
            last = min(first + block, queries) - 1
            begin, end = max(0, first + shift - left), min(keys, last + shift + right + 1)
            seen += times * max(0, end - begin)
    return int(seen) * q.shape[1]


TRAFFIC: dict[str, Formula] = {
    "attention_forward": _forward_traffic,
    "attention_backward": _backward_traffic,
    "cached_attention_forward": _cached_traffic,
}
