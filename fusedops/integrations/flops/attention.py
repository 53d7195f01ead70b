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
    if offsets.is_meta or isinstance(offsets, FakeTensor | FunctionalTensor):
        return [longest] * (len(offsets) - 1)
    return offsets.diff().tolist()


FORMULAS: dict[str, Callable[..., int]] = {
    "fusedops::attention_forward": attention_forward,
    "fusedops::attention_backward": attention_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": sdpa_forward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward,
}
