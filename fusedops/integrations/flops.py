"""FLOP formulas for fusedops' operators, for torch's flop counter.

Imported after torch.utils.flop_counter (see AFTER_IMPORT), so FlopCounterMode and every tool that
reads its table count our operators. The conventions are torch's:

- A product [m, k] x [k, n] is 2 m n k. What a kernel computes twice where separate operators
  compute it once (the logits of linear_cross_entropy) is counted once.
- Elementwise and row-wise operators have no formula, so they count as 0 (norms, activations, rotary
  embeddings, cross_entropy, AdamW, quantize_weight and dequantize_weight).
- Attention counts every query with every key of its sequence, whatever causal, window and masks
  hide, and counts each query head of grouped heads. Its backward counts as the backward that torch
  would run for the call: fused kernels compute the scores a second time, separate operators do not.

torch up to 2.13 has no formula for its own fused attention on CPUs; later versions have one. It is
added here: otherwise a model's attention would count after patch but not before.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

__all__ = ["FORMULAS"]

Shape = Sequence[int]


def linear_forward(input: Tensor, weight: Tensor, **_: Any) -> int:
    return 2 * input.numel() * weight.shape[0]


def linear_backward(
    dy: Tensor, input: Tensor | None, weight: Tensor | None, output_mask: Sequence[bool], **_: Any
) -> int:
    """The node keeps the input for the weight's gradient, and the weight for the input's."""
    products = sum(output_mask[:2])
    held = weight if input is None else input
    return 2 * dy.numel() * held.shape[-1] * products if products and held is not None else 0


def quantized_linear_forward(x: Tensor, out_features: int, **_: Any) -> int:
    return 2 * x.numel() * out_features


def quantized_linear_backward(
    dy: Tensor, in_features: int, output_mask: Sequence[bool], **_: Any
) -> int:
    return 2 * dy.numel() * in_features * output_mask[0]


def linear_cross_entropy_forward(
    input: Tensor, linear_weight: Tensor, gradients: Sequence[bool], **_: Any
) -> int:
    """gradients: those that the forward computes; the backward then only scales them."""
    return 2 * input.numel() * linear_weight.shape[0] * (1 + sum(gradients[:2]))


def linear_cross_entropy_backward(
    input: Tensor, linear_weight: Tensor, output_mask: Sequence[bool], **_: Any
) -> int:
    return 2 * input.numel() * linear_weight.shape[0] * sum(output_mask[:2])


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
    q: Tensor, v: Tensor, sinks: Any, how: Sequence[float], output_mask: Sequence[bool], **_: Any
) -> bool:
    """Whether scaled_dot_product_attention runs a fused kernel for the call.

    No fused kernel takes softcaps, sinks or meta tensors. The CPU kernel takes no dropout, no
    gradient of the mask, and no v whose width differs from q's.
    """
    _scale, softcap, dropout = how
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
    "fusedops::linear_forward": linear_forward,
    "fusedops::linear_backward": linear_backward,
    "fusedops::quantized_linear_forward": quantized_linear_forward,
    "fusedops::quantized_linear_tiles": quantized_linear_forward,
    "fusedops::quantized_linear_backward": quantized_linear_backward,
    "fusedops::linear_cross_entropy_forward": linear_cross_entropy_forward,
    "fusedops::linear_cross_entropy_backward": linear_cross_entropy_backward,
    "fusedops::attention_forward": attention_forward,
    "fusedops::attention_backward": attention_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": sdpa_forward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward,
}


def _register(name: str, formula: Callable[..., int]) -> None:
    """formula: takes the operator's arguments by their names in its schema."""
    library, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, library), operator)
    names = [argument.name for argument in packet.default._schema.arguments]

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(**dict(zip(names, args, strict=False)), **kwargs)

    if packet not in flop_registry:  # torch raises for a second formula
        register_flop_formula(packet, get_raw=True)(count)


for _name, _formula in FORMULAS.items():
    _register(_name, _formula)
