"""Modules as growth subjects: created once, fresh inputs in each call."""

import torch

from fusedops import nn
from growth.subject import fixed, leaf, numbers, of_module

ROWS, N = 16, 64


def rows():
    return [leaf(ROWS, N)]


def two():
    return [leaf(ROWS, N), leaf(ROWS, N)]


def logits():
    return [leaf(ROWS, N), numbers(ROWS, below=N)]


def sequence():
    return [leaf(2, 8, 32)]


class SelfAttention(nn.MultiheadAttention):
    """MultiheadAttention over one tensor. weights: whether it returns attention weights."""

    weights = False

    def forward(self, x):
        return super().forward(x, x, x, need_weights=self.weights)


class WithWeights(SelfAttention):
    weights = True


def quantized(format: str):
    layer = nn.QuantizedLinear.from_linear(torch.nn.Linear(N, 32), format, activation="gelu")
    return of_module(layer, rows)


MODULES = {
    "AddLayerNorm": lambda: of_module(nn.AddLayerNorm(N, dropout_p=0.1), two),
    "AddRMSNorm": lambda: of_module(nn.AddRMSNorm(N), two),
    "CrossEntropyLoss": lambda: of_module(nn.CrossEntropyLoss(fixed(N).abs()), logits),
    "GEGLU": lambda: of_module(nn.GEGLU(), two),
    "LayerNorm": lambda: of_module(nn.LayerNorm(N), rows),
    "Linear": lambda: of_module(nn.Linear(N, 32), rows),
    "Linear, gelu": lambda: of_module(nn.Linear(N, 32, activation="gelu"), rows),
    "LinearCrossEntropyLoss": lambda: of_module(
        nn.LinearCrossEntropyLoss(N, 48, bias=True, z_loss=1e-4),
        lambda: [leaf(ROWS, N), numbers(ROWS, below=48)],
    ),
    "MultiheadAttention": lambda: of_module(SelfAttention(32, 4, batch_first=True), sequence),
    "MultiheadAttention, sequence first": lambda: of_module(
        SelfAttention(32, 4, dropout=0.1, add_bias_kv=True), sequence
    ),
    "MultiheadAttention, weights": lambda: of_module(WithWeights(32, 4), sequence),
    "QuantizedLinear, int8": lambda: quantized("int8"),
    "QuantizedLinear, int4": lambda: quantized("int4"),
    "QuantizedLinear, nf4": lambda: quantized("nf4"),
    "QuantizedLinear, fp8": lambda: quantized("fp8"),
    "RMSNorm": lambda: of_module(nn.RMSNorm(N), rows),
    "SwiGLU": lambda: of_module(nn.SwiGLU(limit=7.0), lambda: [leaf(ROWS, 2 * N)]),
}
