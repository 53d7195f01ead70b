"""experts: the feed-forward block of a mixture of experts, with its reference."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.extension import _C, traced
from fusedops.functional.linear import ACTIVATIONS
from fusedops.functional.quantized_linear import QuantizedWeight
from fusedops.functional.traffic import Formula, Traffic, once

__all__ = ["experts"]


def experts(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str | None = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    """The chosen experts' MLPs of each token, summed with the routing weights.

        z = gate_up[e] x + gate_up_bias[e]              e = top_k_index[t, j], x = hidden[t]
        g, u = z's halves, or its even and odd elements if interleaved
        g = min(g, limit), u = clamp(u, -limit, limit)  with a limit
        h = activation(g) (u + up_offset)               gated=False: h = activation(z)
        y[t] = sum over j of top_k_weights[t, j] (down[e] h + down_bias[e])

    hidden: [tokens, H]. top_k_index: int64 [tokens, k], from 0 to E; a choice of E contributes
    nothing (expert parallelism marks other ranks' experts so). top_k_weights: [tokens, k], any
    floating dtype. gate_up: [E, 2 I, H], down: [E, H, I], any strides; transposed=True: [E, H, 2 I]
    and [E, I, H]; gated=False: I instead of 2 I. gate_up_bias: [E, 2 I], down_bias: [E, H].
    activation: `linear`'s; "silu" is g sigmoid(alpha g). float32, float16 and bfloat16 have
    kernels; torch's functions compute float64. Returns y, [tokens, H], contiguous, in hidden's
    dtype; sums are float32, the last one over a token's choices in their order. Only chosen
    experts' weights are read, and the others get gradients of 0. A token's result depends on other
    tokens only through the kernel that an expert's number of rows selects. Weights cannot be
    `QuantizedWeight`s yet. Raises RuntimeError if a shape or dtype does not fit, ValueError for an
    index outside 0 to E, an unknown activation or options that do not go together, and TypeError
    for a QuantizedWeight. Shazeer et al., arXiv:1701.06538; gpt-oss,
    arXiv:2508.10925.
    """
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if isinstance(weight, QuantizedWeight):
            raise TypeError(f"experts: {name} must be a tensor, got QuantizedWeight")
    tensors = hidden, top_k_index, top_k_weights, gate_up, down, gate_up_bias, down_bias
    op = torch.ops.fusedops.experts if traced(*tensors) else _C.experts
    return op(
        hidden,
        top_k_index,
        top_k_weights,
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        gated=gated,
        interleaved=interleaved,
        transposed=transposed,
        limit=limit,
        alpha=alpha,
        up_offset=up_offset,
    )


# Byte formulas, for calls that choose every expert; see fusedops/functional/traffic.py. Rows that
# are gathered, and what the products leave for each other, count as tiles in a cache.


def _backward_traffic(output_mask, **_):
    """The products need their other operand alone; z has the first bias."""
    needed_by = {"gate_up": 0, "hidden": 2, "down_bias": 1}
    unread = [name for name, place in needed_by.items() if not output_mask[place]]
    return Traffic(("gate_up_bias", *unread))


TRAFFIC: dict[str, Formula] = {"experts_forward": once, "experts_backward": _backward_traffic}


# Reference: plain PyTorch, exact for float64 inputs. Sums over a token's choices are float32, the
# products' results have the inputs' dtype, as in transformers' modules.


def experts_reference(
    hidden,
    top_k_index,
    top_k_weights,
    gate_up,
    down,
    *,
    gate_up_bias=None,
    down_bias=None,
    activation="silu",
    gated=True,
    interleaved=False,
    transposed=False,
    limit=None,
    alpha=1.0,
    up_offset=0.0,
):
    gate = (activation, gated, interleaved, limit, alpha, up_offset)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    y = torch.zeros_like(hidden, dtype=wide)
    for e in range(len(gate_up)):
        token, choice = torch.where(top_k_index == e)
        w_in, w_out = (w[e].t() if transposed else w[e] for w in (gate_up, down))
        b_in, b_out = (None if b is None else b[e] for b in (gate_up_bias, down_bias))
        h = gate_reference(F.linear(hidden[token], w_in, b_in), *gate)
        weight = top_k_weights[token, choice, None].to(wide)
        y = y.index_add(0, token, F.linear(h, w_out, b_out).to(wide) * weight)
    return y.to(hidden.dtype)


def gate_reference(z, activation, gated, interleaved, limit, alpha, up_offset):
    act = ACTIVATIONS[activation]
    if activation == "silu":

        def act(g):
            return g * torch.sigmoid(alpha * g)

    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    if not gated:
        return act(wide).to(z.dtype)
    g, u = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (act(g) * (u + up_offset)).to(z.dtype)
