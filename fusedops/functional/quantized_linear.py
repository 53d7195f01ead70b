"""quantized_linear: a matmul with a 4- or 8-bit weight, and the weight's formats.

A weight w [N, K] is stored as codes q and scales s. Groups of codes along K share a scale:

    format  qweight                    scales, float32      w
    int8    int8 [N, K]                scales [N, groups]   q s, q from -127 to 127
    int4    uint8 [N, ceil(K / 2)]     scales [N, groups]   (q - z) s, zeros z uint8 [N, groups]
    nf4     uint8 [ceil(N K / 2), 1]   absmax [blocks]      NF4[q] s
    fp8     float8_e4m3fn [N, K]       scales [N, 1]        q s

Default groups: a row for int8, 64 elements for int4 (or 32 or 128), a row for fp8. An nf4 block is
64 elements of the flattened weight, for any shape; with scale="absmax" every byte equals
bitsandbytes'. The first of two codes in a byte is the high half. The last group of a row may be
shorter. The tensors have the same layout on every device.

A group with a NaN or infinity is entirely NaN. A group whose scale would be below 1e-38 is all
zeros, except in nf4.
"""

import dataclasses

import torch
from torch import Tensor

from fusedops.exporting import exports_onnx
from fusedops.extension import _C, ops, traced
from fusedops.functional.jagged import operator
from fusedops.functional.quantized_rows import ROW_FORMATS, PickledCodes, QuantizedRows, pair_of
from fusedops.references.quantized_linear import (
    FORMATS,
    dequantize_weight_reference,
    in_groups,
    quantize_groups_reference,
)

__all__ = ["QuantizedWeight", "dequantize_weight", "quantize_weight", "quantized_linear"]


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight(PickledCodes):
    """A quantized weight [out_features, in_features]; the module describes its tensors.

    scales: for nf4, the absmax. zeros: int4's. experts: of `quantize_experts`, how many there are.
    """

    format: str
    out_features: int
    in_features: int
    group_size: int
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    experts: int | None = None

    @property
    def shape(self) -> torch.Size:
        leading = () if self.experts is None else (self.experts,)
        return torch.Size((*leading, self.out_features, self.in_features))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by their names in a state dict."""
        named = {"qweight": self.qweight, scales_name(self.format): self.scales}
        return named if self.zeros is None else {**named, "zeros": self.zeros}

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same weight on another device; copies only if the device differs."""
        qweight, scales = self.qweight.to(device), self.scales.to(device)
        zeros = None if self.zeros is None else self.zeros.to(device)
        return dataclasses.replace(self, qweight=qweight, scales=scales, zeros=zeros)


def scales_name(format: str) -> str:
    return FORMATS[format].scales_name


def quantize_weight(
    weight: Tensor, format: str, *, group_size: int | None = None, scale: str | None = None
) -> QuantizedWeight:
    """Quantizes a weight. The bytes are the same on every device.

    weight: [N, K], floating-point, any strides; rounded to float32 first. format: "int8", "int4",
    "nf4" or "fp8", described in the module. group_size: any for int8 (default: a row); 32, 64
    (default) or 128 for int4; fixed for the others. scale: how a group's scale is chosen. "absmax"
    is the scale that just covers the group, as in bitsandbytes; it is the only choice for int8 and
    fp8, and nf4's default. "mse" keeps the scale near it with the least squared error; it is int4's
    default. With nf4, it is still bitsandbytes' format, with different codes. int4's zero is one of
    its codes, so ranges include 0: uniform weights from 3 to 4 have four times the error of a range
    of their own. Raises TypeError if weight is no floating-point matrix or is a DTensor, or if
    group_size is no int, and ValueError for an invalid format, group_size or scale. No gradient.
    Dettmers et al., arXiv:2208.07339, 2305.14314 (nf4); Micikevicius et al., arXiv:2209.05433.
    """
    check_weight(weight)
    size, scale = check_format(format, weight.shape[1], group_size, scale)
    kernel = weight.is_cpu and _C.cpu_isa() != "none" and not (traced(weight) or exports_onnx())
    run = ops.quantize_groups if kernel else quantize_groups_reference
    with torch.no_grad():
        tensors = in_groups(run, weight, format, size, scale)
    return QuantizedWeight(format, weight.shape[0], weight.shape[1], size, *tensors)


def dequantize_weight(qweight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dequantized weight [N, K]: products in float32, rounded once to `dtype`.

    dtype: any floating-point dtype; for torch.float64, products are float64. Raises TypeError if
    qweight is not a QuantizedWeight, and RuntimeError for another dtype.
    """
    check_quantized("dequantize_weight", qweight)
    run = dequantize_weight_reference if exports_onnx() else ops.dequantize_weight
    return run(*_operands(qweight), *_layout(qweight), dtype)


def quantized_linear(
    x: Tensor | QuantizedRows,
    qweight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    input_format: str | None = None,
    compute: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A linear layer with a quantized weight, bias and activation.

        z = x w^T + bias            w: the dequantized weight
        y = activation(z)           None, "relu", "gelu", "gelu_tanh" or "silu", as in `linear`

    x: [..., K], any strides, float32, float16, bfloat16 or float64. bias: [N], like x. Returns y,
    [..., N], in x's dtype; z is rounded to it before the activation. x and bias get gradients,
    computed from the same codes; a QuantizedWeight has none.

    input_format: first rounds each row of x, in float32, to codes times a step. "int8" uses
    multiples of the row's largest absolute value / 127; "fp8" uses float8_e4m3fn scaled so that
    this value is 448. The gradient ignores this rounding. A row that is not finite gives NaN.

    x may also be (codes, scale), from `output_format` of `add_rms_norm`, `rms_norm` or `swiglu`:
    codes int8 or float8_e4m3fn [..., K], scale float32 [..., 1]. They multiply as `input_format`'s
    codes do, without gradient. y has out_dtype, by default the bias's or float32; autocast's wins.

    compute: the precision of the matmul's operands. Sums are float32, with two exceptions on GPUs:
    above 1024 rows, torch's bfloat16 matmul may add partial sums in bfloat16 (see
    torch.backends.cuda.matmul), and fp8 by fp8 adds 128 products at a time in the tensor cores,
    with fewer digits on sm_90.
        "exact"  no rounding: float32 products of x and w
        "bf16"   x and w (or its codes) are rounded to bfloat16; backward: dy and w
        "int8"   codes multiply as integers, or in float32 if groups have scales or the CPU lacks
                 AVX-512 BF16; for input_format="int8", int8 or int4 weights. Backward: as None
        None     the fastest of these on this machine, never below "bf16". bfloat16 moves an
                 output by 0.2 % of its size; the codes move it by 0.8 % (int8) to 9 % (4 bits)
    float64 is computed in float64.

    Raises TypeError if qweight is not a QuantizedWeight or x is neither a tensor nor a pair,
    RuntimeError if a shape, dtype or device does not match or codes would need a gradient, and
    ValueError for an invalid activation, input_format or compute. See `quantize_weight` for papers.
    """
    check_quantized("quantized_linear", qweight)
    operands, layout = _operands(qweight), _layout(qweight)
    return product(x, operands, bias, layout, activation, input_format, compute, out_dtype)


def product(
    x: Tensor | QuantizedRows,
    operands: tuple[Tensor, Tensor, Tensor | None],
    bias: Tensor | None,
    layout: tuple[str, int, int, int],
    activation: str | None = None,
    input_format: str | None = None,
    compute: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """quantized_linear for a weight given as separate tensors and layout."""
    scale = None
    if not isinstance(x, Tensor):
        x, scale = pair_of("quantized_linear", x)
        input_format = input_format or ROW_FORMATS.get(x.dtype)
        out_dtype = out_dtype or (torch.float32 if bias is None else bias.dtype)
    seen = traced(x, bias, scale, *operands)
    op = operator("quantized_linear", x, bias, scale) if seen else _C.quantized_linear
    return op(x, *operands, bias, *layout, activation, input_format, compute, scale, out_dtype)


def _operands(q: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    return q.qweight, q.scales, q.zeros


def _layout(q: QuantizedWeight) -> tuple[str, int, int, int]:
    return q.format, q.out_features, q.in_features, q.group_size


def check_quantized(op: str, qweight: QuantizedWeight) -> None:
    if not isinstance(qweight, QuantizedWeight) or qweight.experts is not None:
        got = "experts" if isinstance(qweight, QuantizedWeight) else type(qweight).__name__
        raise TypeError(f"{op}: qweight must be a QuantizedWeight from quantize_weight, got {got}")


def check_weight(weight: Tensor) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        got = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight)
        raise TypeError(
            f"quantize_weight: weight must be a floating-point matrix [N, K], got {got}"
        )
    if hasattr(weight, "full_tensor"):
        raise TypeError(
            "quantize_weight: weight must be a full tensor, got a DTensor (use full_tensor())"
        )


def check_format(
    format: str, in_features: int, group_size: int | None, scale: str | None
) -> tuple[int, str]:
    """The group_size and scale for a format: those given, or its defaults."""
    if format not in FORMATS:
        allowed = ", ".join(map(repr, FORMATS))
        raise ValueError(f"quantize_weight: format must be one of {allowed}, got {format!r}")
    properties = FORMATS[format]
    default = properties.group_size or max(in_features, 1)
    if not isinstance(group_size, int | None):
        got = type(group_size).__name__
        raise TypeError(f"quantize_weight: group_size must be an int or None, got {got}")
    size = default if group_size is None else group_size
    choices = (default,) if properties.group_sizes == () else properties.group_sizes
    if size < 1 or (choices and size not in choices):
        sizes = "1 or more" if choices is None else _choices_text(choices)
        raise ValueError(f"quantize_weight: group_size of {format} must be {sizes}, got {size}")
    scale = scale or properties.scales[0]
    if scale not in properties.scales:
        allowed = " or ".join(map(repr, sorted(properties.scales)))
        raise ValueError(f"quantize_weight: scale of {format} must be {allowed}, got {scale!r}")
    return size, scale


def _choices_text(group_sizes: tuple[int, ...]) -> str:
    *first, last = group_sizes
    return f"{', '.join(map(str, first)) or 'None'} or {last}"
