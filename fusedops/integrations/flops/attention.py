"""FLOP formulas of attention, and of torch's fused attention on CPUs."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = ["FORMULAS"]

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
    """Products with the used keys; with all that there is room for if the counts are not known."""
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
    of_scores = any((dq, dk, *others))  # the gradient of out times v
    products = (3, 2) if _torch_fuses(**call) else (dq + dk, dv + of_scores)
    return sum(_products(*shapes, *products) for shapes in _sequences(**call))


def sdpa_forward(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> int:
    return _products(query.shape, key.shape, value.shape, 1, 1)


def sdpa_backward(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> int:
    return _products(query.shape, key.shape, value.shape, 3, 2)


def _products(q: Shape, k: Shape, v: Shape, of_width: int, of_value: int) -> int:
    """of_width products of all queries and keys over q's width, of_value over v's."""
    return 2 * prod(q[:3]) * k[2] * (of_width * q[3] + of_value * v[3])


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
    of_q = _lengths(cu_seqlens_q, max_q or q.shape[2])
    of_k = _lengths(cu_seqlens_k, max_k or k.shape[2])
    for queries, keys in zip(of_q, of_k, strict=True):
        yield _of(q, queries), _of(k, keys), _of(v, keys)


def _of(packed: Tensor, length: int) -> Shape:
    return 1, packed.shape[1], length, packed.shape[3]


def _lengths(offsets: Tensor, longest: int) -> list[int]:
    """Each sequence's length; all as long as the longest if offsets cannot be read."""
    if not _known(offsets):
        return [longest] * (len(offsets) - 1)
    return offsets.diff().tolist()


def _known(t: Tensor) -> bool:
    return not (t.is_meta or isinstance(t, FakeTensor | FunctionalTensor))


FORMULAS: dict[str, Callable[..., int]] = {
    "fusedops::attention_forward": attention_forward,
    "fusedops::attention_backward": attention_backward,
    "fusedops::cached_attention_forward": cached_attention_forward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": sdpa_forward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward,
}
