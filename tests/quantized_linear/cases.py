"""Shared helpers for quantized_linear tests: weights, arguments, backends."""

import math

import torch
from contract.interpreter import interpreted

import fusedops
from fusedops import _C
from fusedops.functional import quantize_weight, quantized_linear
from fusedops.references.quantized_linear import quantized_linear_reference
from fusedops.testing import backends, check, poisoned, yardstick

GEMV_ROWS = max(m for m in range(64) if _C.quantized_linear_gpu_kernel(m, "none", "any") == "gemv")
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BACKENDS = [name for name in backends("quantized_linear") if name != "reference"]

# Format -> quantize_weight's options.
FORMATS = {
    "int8": ("int8", {}),
    "int8 in groups": ("int8", {"group_size": 48}),
    "int4": ("int4", {}),
    "int4 in groups of 32": ("int4", {"group_size": 32}),
    "nf4": ("nf4", {}),
    "nf4 by mse": ("nf4", {"scale": "mse"}),
    "fp8": ("fp8", {}),
}
CASES = [(kind, name) for kind in FORMATS for name in BACKENDS]

# (input_format, compute) that every format has.
PRECISIONS = [(None, None), (None, "exact"), (None, "bf16"), ("int8", None), ("int8", "exact")]
PRECISIONS += [("fp8", None), ("fp8", "exact")]


def runs(kind, backend, dtype, shape, features, **_):
    """Whether the emulator has a kernel for the rows, and the interpreter is quick enough.

    test_tensor_cores.py tests the emulator's kernel for up to 16 rows.
    """
    if backend == "simt":
        return math.prod(shape[:-1]) <= GEMV_ROWS
    again = kind in ("int4 in groups of 32", "nf4 by mse") or dtype != torch.float16
    size = math.prod(shape) * features
    return not interpreted(backend) or size <= (9000 if again else 24000)


def quantized(kind, weight):
    format, options = FORMATS[kind]
    return quantize_weight(weight, format, **options)


def random_weight(features, depth):
    draw = torch.Generator().manual_seed(11)
    return torch.randn(features, depth, generator=draw) / max(depth, 1) ** 0.5


def inputs(shape, features, dtype, bias=True):
    """x of `shape` and a bias: results are about as large as 1."""
    draw = torch.Generator().manual_seed(12)
    x = torch.randn(shape, generator=draw) + 0.25
    shift = torch.randn(features, generator=draw) if bias else None
    return x.to(dtype), None if shift is None else shift.to(dtype)


def functions(weight, **kwargs):
    """quantized_linear and its reference as functions of x and bias."""
    sizes = weight.format, weight.out_features, weight.in_features, weight.group_size
    parts = {device: weight.to(device) for device in ("cpu", *_accelerators())}

    def function(x, bias):
        weight = parts.get(x.device.type) or parts["cpu"].to(x.device)
        return quantized_linear(x, weight, bias, **kwargs)

    def reference(x, bias):
        q = parts[x.device.type]
        return quantized_linear_reference(x, q.qweight, q.scales, q.zeros, bias, *sizes, **kwargs)

    return function, reference


def compare(weight, backend, args, **kwargs):
    if backend == "simt":
        compare_forward(*functions(weight, **kwargs), args)
    else:
        check(*functions(weight, **kwargs), args, backend)


def compare_forward(run, reference, args):
    """Checks the emulator's forward, with and without requires_grad. Its backward is ATen calls."""
    with fusedops.backend("simt"), poisoned():
        actual = run(*args)
        again = run(args[0].detach().requires_grad_(), args[1])
    eager, exact = (reference(*to) for to in (args, [t if t is None else t.double() for t in args]))
    assert actual.dtype == eager.dtype and actual.shape == eager.shape
    assert (complaint := yardstick(actual, eager, exact)) is None, complaint
    torch.testing.assert_close(again.detach(), actual, rtol=0, atol=0, equal_nan=True)


def _accelerators():
    return ("cuda",) if torch.cuda.is_available() else ()


def layer(kind, k=70, n=33, **kwargs):
    """Returns a QuantizedLinear, the Linear that it was made from, and x."""
    format, options = FORMATS[kind]
    linear = torch.nn.Linear(k, n)
    with torch.no_grad():
        linear.weight.copy_(random_weight(n, k))
    module = fusedops.nn.QuantizedLinear.from_linear(linear, format, **options, **kwargs)
    return module, linear, torch.randn(5, k)


def tensors(module):
    return {name: t.reshape(-1).view(torch.uint8) for name, t in module.state_dict().items()}


def same(a, b):
    a, b = tensors(a), tensors(b)
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())
