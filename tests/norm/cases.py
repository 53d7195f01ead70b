"""Shared helpers for norm tests: functions, arguments, backends."""

import torch

from fusedops.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fusedops.references import norm
from fusedops.testing import backends, check

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
FUNCTIONS = {
    "layer_norm": (layer_norm, norm.layer_norm_reference),
    "rms_norm": (rms_norm, norm.rms_norm_reference),
    "add_layer_norm": (add_layer_norm, norm.add_layer_norm_reference),
    "add_rms_norm": (add_rms_norm, norm.add_rms_norm_reference),
}
CASES = [(op, name) for op in FUNCTIONS for name in backends(op) if name != "reference"]
BACKENDS = list(dict.fromkeys(name for _, name in CASES))
ADDS = [case for case in CASES if "add" in case[0]]


def inputs(op, shape, dtype, weight_dtype=None, residual_dtype=None):
    """Returns `op`'s arguments. eps is explicit, because float64 has another default."""
    draw = torch.Generator().manual_seed(12)
    x, residual = (torch.randn(shape, generator=draw) * 3 + 0.5 for _ in range(2))
    weight, bias = (torch.randn(shape[-1:], generator=draw) for _ in range(2))
    weight, bias = (t.to(weight_dtype or dtype) for t in (weight, bias))
    # all that a row of one element has of a gradient is its eps
    eps = 1e-6
    if shape[-1] == 1:
        x, residual, eps = x / 8, residual / 8, 0.5
    parameters = (weight, bias, eps) if "layer" in op else (weight, eps)
    x = x.to(dtype)
    if "add" in op:
        return (x, residual.to(residual_dtype or dtype), *parameters)
    return (x, shape[-1:], *parameters)


def compare(op, backend, args, **kwargs):
    function, reference = FUNCTIONS[op]
    check(function, reference, args, backend, **kwargs)
