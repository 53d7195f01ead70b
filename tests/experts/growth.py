"""Mixture-of-experts functions and modules for the memory-growth tests in tests/growth."""

import torch
from growth.subject import ROWS, N, Subject, fixed, leaf, nn_module

from fusedops import functional as F
from fusedops import nn

E, K, INNER = 6, 2, 24


def chosen() -> torch.Tensor:
    return torch.rand(ROWS, E).argsort(1)[:, :K].contiguous()


def module_call(module):
    return lambda hidden, weights, index: module(hidden, index, weights)


def rows() -> list[torch.Tensor]:
    return [leaf(ROWS, N), leaf(ROWS, K), chosen()]


def quantized_call() -> Subject:
    codes = [F.quantize_experts(torch.randn(*s), "nf4") for s in ((E, 2 * INNER, N), (E, N, INNER))]
    run = lambda hidden, weights, index: F.experts(hidden, index, weights, *codes)  # noqa: E731
    return Subject(run, rows, flexible=2)


def quantizing() -> Subject:
    """Quantizes and dequantizes. x, one number, has a gradient; codes have none."""
    run = lambda x, w: x * F.dequantize_experts(F.quantize_experts(w, "int8"))  # noqa: E731
    return Subject(run, lambda: [leaf(), fixed(3, 8, N)])


OPERATORS = {
    "experts, quantized": quantized_call,
    "quantize_experts": quantizing,
    "dequantize_experts": quantizing,
}
MODULES = {
    "Experts": lambda: nn_module(nn.Experts(E, N, INNER), rows, bind=module_call, flexible=1),
    "Experts, bias": lambda: nn_module(
        nn.Experts(E, N, INNER, bias=True), rows, bind=module_call, flexible=1
    ),
    "QuantizedExperts": lambda: nn_module(
        nn.QuantizedExperts(E, N, INNER, bias=True), rows, bind=module_call, flexible=1
    ),
}
