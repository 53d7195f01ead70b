"""quantized_linear's functions and modules for the memory-growth tests in tests/growth."""

import torch
from growth.subject import N, Subject, fixed, leaf, nn_module, rows

from fusedops import functional as F
from fusedops import nn

LONG_TO_COMPILE = {"compiled": "Inductor compiles the search for scales in half a minute"}


def quantized_linear(format: str, **options):
    """With an input of the weight's format, and codes that are new in each call."""

    def run(x, bias, qweight, scales, zeros=None):
        weight = F.QuantizedWeight(format, 32, N, size, qweight, scales, zeros)
        return F.quantized_linear(x, weight, bias, **options)

    def codes():
        return F.quantize_weight(fixed(32, N), format)

    def inputs():
        return [leaf(8, N), leaf(32), *codes().tensors().values()]

    size = codes().group_size
    return Subject(run, inputs, flexible=2)


def quantizing(format: str, left=None):
    """Quantizes and dequantizes. x, one number, has a gradient; codes have none."""

    def run(x, weight):
        q = F.quantize_weight(weight, format).to("cpu")
        return x * F.dequantize_weight(q)

    return Subject(run, lambda: [leaf(), fixed(32, N)], left=left or {})


def quantized_module(format: str):
    layer = nn.QuantizedLinear.from_linear(torch.nn.Linear(N, 32), format, activation="gelu")
    return nn_module(layer, rows)


OPERATORS = {
    "quantized_linear, int8 by int8": lambda: quantized_linear("int8", input_format="int8"),
    "quantized_linear, fp8 by fp8": lambda: quantized_linear("fp8", input_format="fp8"),
    "quantize_weight, int4": lambda: quantizing("int4", LONG_TO_COMPILE),
    "quantize_weight, nf4": lambda: quantizing("nf4"),
    "dequantize_weight, int8": lambda: quantizing("int8"),
    "dequantize_weight, fp8": lambda: quantizing("fp8"),
    "QuantizedWeight": lambda: quantized_linear("int4"),
}  # fmt: skip

MODULES = {
    "QuantizedLinear, int8": lambda: quantized_module("int8"),
    "QuantizedLinear, int4": lambda: quantized_module("int4"),
    "QuantizedLinear, nf4": lambda: quantized_module("nf4"),
    "QuantizedLinear, fp8": lambda: quantized_module("fp8"),
}
