"""experts and quantized_experts in plain PyTorch; the C++ version is in csrc/ops/experts."""

import torch

from fusedops.uncompiled.checks import ACTIVATIONS as OF_LINEAR
from fusedops.uncompiled.checks import (
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
from fusedops.uncompiled.quantized_linear import check_weight

ACTIVATIONS = *OF_LINEAR, "relu2"
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


def quantized_experts(
    hidden, index, slots, w1, s1, z1, w2, s2, z2, b1, b2, format, inner, group1, group2,
    compute=None, **options,
):  # fmt: skip
    """The reference on the codes. _1: of gate_up, _2: of down."""
    if compute not in (None, "exact", "bf16"):
        raise ValueError(f"experts: compute must be None, 'exact' or 'bf16', got '{compute}'")
    options |= {"gate_up_bias": b1, "down_bias": b2}
    _check_codes(
        hidden, index, slots, (w1, s1, z1), (w2, s2, z2), format, inner, group1, group2, **options
    )
    _check_index(index, len(w1))
    del options["gate_up_bias"], options["down_bias"]
    run = reference("experts", "quantized_experts_reference")
    weights = w1, s1, z1, w2, s2, z2, b1, b2, format, inner, group1, group2
    return run(hidden, index, slots, *weights, compute, **options).contiguous()


def _check_codes(hidden, index, slots, first, second, format, inner, group1, group2, **options):
    """Raises what csrc/ops/experts raises. Returns N."""
    for name, tensors in (("gate_up", first), ("down", second)):
        if tensors[0].dim() != 3:
            raise RuntimeError(
                f"experts: {name}.qweight must have 3 dimensions, got {describe(tensors[0])}"
            )
    wide = _check_rest(hidden, index, slots, len(first[0]), inner, **options)
    width = hidden.shape[1]
    layouts = (first, wide, width, group1), (second, width, inner, group2)
    for tensors, n, k, group in layouts if len(first[0]) else ():
        qweight, scales, zeros = (None if t is None else t[0] for t in tensors)
        check_weight(qweight, scales, zeros, format, n, k, group)
    return wide


def _quantized_outputs(hidden, index, slots, *arguments):
    *rest, keep_z = arguments
    n = _check_quantized(hidden, index, slots, *rest)
    z = hidden.new_empty((index.numel(), n)) if keep_z else None
    return hidden.new_empty(hidden.shape), z


def _check_quantized(
    hidden, index, slots, w1, s1, z1, w2, s2, z2, b1, b2, format, inner, group1, group2, compute,
    activation, gated, interleaved, transposed, limit, alpha, up_offset,
):  # fmt: skip
    if transposed:
        raise ValueError("experts: transposed needs weights that are tensors")
    options = {"activation": None if activation == "none" else activation, "gated": gated}
    options |= {"interleaved": interleaved, "limit": limit, "alpha": alpha}
    options |= {"up_offset": up_offset, "gate_up_bias": b1, "down_bias": b2}
    codes = (w1, s1, z1), (w2, s2, z2)
    return _check_codes(hidden, index, slots, *codes, format, inner, group1, group2, **options)


def _quantized_backward_outputs(dy, *arguments):
    *inputs, z, output_mask = arguments
    hidden, index = inputs[:2]
    n = _check_quantized(*inputs)
    _check_backward(dy, z, hidden, index, n)
    like = hidden, inputs[2], inputs[9], inputs[10]
    return _gradients(like, output_mask)


def _autocast(cast, hidden, top_k_index, top_k_weights, gate_up, down, **options):
    options |= {name: cast(options.get(name)) for name in ("gate_up_bias", "down_bias")}
    weights = cast(gate_up), cast(down)
    return torch.ops.fusedops.experts(cast(hidden), top_k_index, top_k_weights, *weights, **options)


def _quantized_autocast(cast, hidden, *arguments, **options):
    *tensors, b1, b2 = arguments[:10]
    run = torch.ops.fusedops.quantized_experts
    return run(cast(hidden), *tensors, cast(b1), cast(b2), *arguments[10:], **options)


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
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.dim() != 3:
            raise RuntimeError(f"experts: {name} must have 3 dimensions, got {describe(weight)}")
    inner = down.shape[1 if transposed else 2]
    options = {"activation": activation, "gated": gated, "interleaved": interleaved}
    options |= {"limit": limit, "alpha": alpha, "up_offset": up_offset}
    options |= {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    n = _check_rest(hidden, top_k_index, top_k_weights, len(gate_up), inner, **options)
    width = hidden.shape[1]
    for name, weight, (a, b) in (("down", down, (width, inner)), ("gate_up", gate_up, (n, width))):
        check_like("experts", name, weight, "hidden", hidden)
        check_shape("experts", name, weight, (len(gate_up), *((b, a) if transposed else (a, b))))
    return n


def _check_rest(
    hidden,
    index,
    slots,
    experts,
    inner,
    gate_up_bias=None,
    down_bias=None,
    activation="silu",
    gated=True,
    interleaved=False,
    limit=None,
    alpha=1.0,
    up_offset=0.0,
):
    """Checks what float and quantized weights share. Returns N."""
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
    if index.dtype != torch.int64 or index.dim() != 2 or len(index) != tokens:
        raise RuntimeError(
            f"experts: top_k_index must be int64 [{tokens}, k], got {describe(index)}"
        )
    check_same_device("experts", "top_k_index", index, "hidden", hidden)
    check_floating("experts", "top_k_weights", slots)
    check_same_device("experts", "top_k_weights", slots, "hidden", hidden)
    check_shape("experts", "top_k_weights", slots, index.shape)
    n = 2 * inner if gated else inner
    for name, bias, columns in (
        ("gate_up_bias", gate_up_bias, n),
        ("down_bias", down_bias, width),
    ):
        if bias is not None:
            check_like("experts", name, bias, "hidden", hidden)
            check_shape("experts", name, bias, (experts, columns))
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
    _check_backward(dy, z, hidden, index, n)
    return _gradients((hidden, *inputs[2:7]), output_mask)


def _check_backward(dy, z, hidden, index, n):
    for name, t, shape in (("dy", dy, hidden.shape), ("z", z, (index.numel(), n))):
        check_like("experts_backward", name, t, "hidden", hidden)
        check_shape("experts_backward", name, t, shape)


def _gradients(like, output_mask):
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
implement("quantized_experts", quantized_experts)
implement_autocast("quantized_experts", _quantized_autocast, "cpu", "cuda")
implement_kernel("quantized_experts_forward", _quantized_outputs)
implement_kernel("quantized_experts_backward", _quantized_backward_outputs)
