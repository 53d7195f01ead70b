"""experts in plain PyTorch, as csrc/ops/experts."""

import torch

from fusedops.uncompiled.checks import (
    ACTIVATIONS,
    check_floating,
    check_like,
    check_same_device,
    check_shape,
    describe,
)
from fusedops.uncompiled.library import (
    define,
    implement,
    implement_autocast,
    implement_kernel,
    reference,
)

_OPTIONS = (
    " str activation, bool gated, bool interleaved, bool transposed, float? limit, float alpha,"
    " float up_offset,"
)
_QUANTIZED = (
    "Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up,"
    " Tensor gate_up_scales, Tensor? gate_up_zeros, Tensor down, Tensor down_scales,"
    " Tensor? down_zeros, Tensor? gate_up_bias, Tensor? down_bias, str format, SymInt inner,"
    " int gate_up_group_size, int down_group_size, "
)
define(
    "experts(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor down,"
    " *, Tensor? gate_up_bias=None, Tensor? down_bias=None, str? activation='silu',"
    " bool gated=True, bool interleaved=False, bool transposed=False, float? limit=None,"
    " float alpha=1.0, float up_offset=0.0) -> Tensor",
    "experts_forward(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up,"
    f" Tensor down, Tensor? gate_up_bias, Tensor? down_bias,{_OPTIONS} bool keep_z)"
    " -> (Tensor y, Tensor z)",
    "experts_backward(Tensor dy, Tensor hidden, Tensor top_k_index, Tensor top_k_weights,"
    " Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias,"
    f"{_OPTIONS} Tensor z, bool[6] output_mask)"
    " -> (Tensor dhidden, Tensor dtop_k_weights, Tensor dgate_up, Tensor ddown,"
    " Tensor dgate_up_bias, Tensor ddown_bias)",
    f"quantized_experts({_QUANTIZED}str? compute=None, str? activation='silu', bool gated=True,"
    " bool interleaved=False, float? limit=None, float alpha=1.0, float up_offset=0.0) -> Tensor",
    f"quantized_experts_forward({_QUANTIZED}str compute,{_OPTIONS} bool keep_z)"
    " -> (Tensor y, Tensor z)",
    f"quantized_experts_backward(Tensor dy, {_QUANTIZED}str compute,{_OPTIONS} Tensor z,"
    " bool[4] output_mask) -> (Tensor dhidden, Tensor dtop_k_weights, Tensor dgate_up_bias,"
    " Tensor ddown_bias)",
)


def experts(hidden, top_k_index, top_k_weights, gate_up, down, **options):
    _check(hidden, top_k_index, top_k_weights, gate_up, down, **options)
    _check_index(top_k_index, len(gate_up))
    run = reference("experts", "experts_reference")
    return run(hidden, top_k_index, top_k_weights, gate_up, down, **options).contiguous()


def _autocast(cast, hidden, top_k_index, top_k_weights, gate_up, down, **options):
    options |= {name: cast(options.get(name)) for name in ("gate_up_bias", "down_bias")}
    weights = cast(gate_up), cast(down)
    return torch.ops.fusedops.experts(cast(hidden), top_k_index, top_k_weights, *weights, **options)


def _check_index(index, experts):
    if index.is_meta or not index.numel():
        return
    low, high = index.min(), index.max()
    if low < 0 or high > experts:
        got = int(low if low < 0 else high)
        raise ValueError(f"experts: top_k_index must be from 0 to {experts}, got {got}")


def _check(
    hidden,
    top_k_index,
    top_k_weights,
    gate_up,
    down,
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
    """Raises what csrc/ops/experts raises. Returns N."""
    if activation not in (None, *ACTIVATIONS):
        known = ", ".join(map(repr, (None, *ACTIVATIONS[:-1])))
        raise ValueError(
            f"experts: activation must be {known} or {ACTIVATIONS[-1]!r}, got '{activation}'"
        )
    if limit is not None and not limit >= 0:
        raise ValueError(f"experts: limit must be at least 0, got {limit:g}")
    if not gated and (limit is not None or up_offset or interleaved):
        raise ValueError("experts: limit, up_offset and interleaved need gated=True")
    if activation != "silu" and alpha != 1:
        raise ValueError(f"experts: alpha needs activation='silu', got alpha {alpha:g}")
    check_floating("experts", "hidden", hidden)
    if hidden.dim() != 2:
        raise RuntimeError(f"experts: hidden must be [tokens, H], got {describe(hidden)}")
    tokens, width = hidden.shape
    index = top_k_index
    if index.dtype != torch.int64 or index.dim() != 2 or len(index) != tokens:
        raise RuntimeError(
            f"experts: top_k_index must be int64 [{tokens}, k], got {describe(index)}"
        )
    check_same_device("experts", "top_k_index", index, "hidden", hidden)
    check_floating("experts", "top_k_weights", top_k_weights)
    check_same_device("experts", "top_k_weights", top_k_weights, "hidden", hidden)
    check_shape("experts", "top_k_weights", top_k_weights, index.shape)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.dim() != 3:
            raise RuntimeError(f"experts: {name} must have 3 dimensions, got {describe(weight)}")
    inner = down.shape[1 if transposed else 2]
    n = 2 * inner if gated else inner
    for name, weight, (a, b) in (("down", down, (width, inner)), ("gate_up", gate_up, (n, width))):
        check_like("experts", name, weight, "hidden", hidden)
        check_shape("experts", name, weight, (len(gate_up), *((b, a) if transposed else (a, b))))
    for name, bias, columns in (
        ("gate_up_bias", gate_up_bias, n),
        ("down_bias", down_bias, width),
    ):
        if bias is not None:
            check_like("experts", name, bias, "hidden", hidden)
            check_shape("experts", name, bias, (len(gate_up), columns))
    return n


def _outputs(hidden, top_k_index, *arguments):
    *rest, keep_z = arguments
    n = _check(hidden, top_k_index, *rest)
    z = hidden.new_empty((top_k_index.numel(), n)) if keep_z else None
    return hidden.new_empty(hidden.shape), z


def _backward_outputs(dy, *arguments):
    *inputs, z, output_mask = arguments
    hidden, index = inputs[:2]
    n = _check(*inputs)
    for name, t, shape in (("dy", dy, hidden.shape), ("z", z, (index.numel(), n))):
        check_like("experts_backward", name, t, "hidden", hidden)
        check_shape("experts_backward", name, t, shape)
    like = (hidden, *inputs[2:7])
    if any(wanted and t is None for wanted, t in zip(output_mask, like, strict=True)):
        raise RuntimeError("experts_backward: the gradient of a bias needs that bias")
    return tuple(
        t.new_empty(t.shape) if wanted else None
        for wanted, t in zip(output_mask, like, strict=True)
    )


implement("experts", experts)
implement_autocast("experts", _autocast, "cpu", "cuda")
implement_kernel("experts_forward", _outputs)
implement_kernel("experts_backward", _backward_outputs)
