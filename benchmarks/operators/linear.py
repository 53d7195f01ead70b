"""Benchmarks of fusedops' linear against F.linear plus activation, with and without torch.compile.

Compute-bound: the figure that matters is the ratio to eager, not the fraction of copy bandwidth. A
shape is (rows, depth, features). The sweep covers decode to training, odd sizes, and shapes on both
sides of every threshold in csrc/ops/linear/rule.cpp. That rule is based on the sweep, in which no
row may be below 0.97.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

import fusedops
import fusedops.functional as ours
from benchmarks.harness.case import (
    BACKWARD,
    FORWARD,
    TRAINING,
    Case,
    Contender,
    Operation,
    calling,
    compiled,
)
from benchmarks.harness.goals import Goal
from fusedops.references.linear import linear_reference

SHAPES = [
    (1, 384, 1536),
    (1, 4096, 4096),
    (7, 513, 1025),
    (32, 384, 1536),
    (64, 127, 257),
    (128, 1536, 384),
    (256, 513, 1025),
    (1024, 384, 1536),
    (1024, 1536, 384),
    (4096, 768, 768),
]
QUICK_SHAPES = [(1, 384, 1536), (256, 384, 1536)]


def inputs(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    rows, depth, features = shape
    x = torch.randn(rows, depth, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(features, depth, dtype=dtype, device=device) / depth**0.5
    return x, Parameter(weight), Parameter(torch.randn(features, dtype=dtype, device=device))


def bytes_moved(mode: str, x: Tensor, weight: Tensor, bias: Tensor) -> int:
    """Counts each tensor once: forward reads 3 and writes y; backward reads dy, z and 2 more."""
    y = x.shape[0] * weight.shape[0] * x.itemsize
    forward, backward = x.nbytes + weight.nbytes + y, 2 * (x.nbytes + weight.nbytes + y)
    return {FORWARD: forward, BACKWARD: backward, TRAINING: forward + backward}[mode]


def lines(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Code as it is in models."""
    return lambda x, weight, bias: activation(F.linear(x, weight, bias))


def operation(name: str, activation: str | None, lines: Callable[..., Tensor]) -> Operation:
    eager = calling(lines)
    fused = Contender(lambda *tensors: partial(ours.linear, *tensors, activation))
    rows = {"eager": eager, "compile(eager)": compiled(eager), "fusedops": fused}
    reference = partial(linear_reference, activation=activation)
    return Operation(name, inputs, reference, bytes_moved, rows)


PLAIN = operation("linear", None, F.linear)
GELU = operation("linear + gelu", "gelu", lines(F.gelu))
TANH = operation("linear + gelu_tanh", "gelu_tanh", lines(partial(F.gelu, approximate="tanh")))
SILU = operation("linear + silu", "silu", lines(F.silu))
RELU = operation("linear + relu", "relu", lines(F.relu))
OPERATIONS = [PLAIN, GELU, SILU, RELU]


def launch(base: Operation, activation: str | None) -> Operation:
    """Returns every way to call it: eager, torch.ops, the short path, and both modules."""

    def through(module: type, **options) -> Contender:
        def prepare(x: Tensor, weight: Tensor, bias: Tensor):
            layer = module(weight.shape[1], weight.shape[0], **options)
            layer.weight, layer.bias = weight, bias
            return partial(layer, x)

        return Contender(prepare)

    op = torch.ops.fusedops.linear
    rows = {
        "eager": base.contenders["eager"],
        "fusedops torch.ops": Contender(lambda x, w, b: partial(op, x, w, b, activation)),
        "fusedops functional": base.contenders["fusedops"],
        "fusedops module": through(fusedops.nn.Linear, activation=activation),
    }
    if activation is None:
        rows["eager module"] = through(torch.nn.Linear)

    def square(shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        return inputs((*shape, shape[-1]), dtype, device)

    return replace(base, inputs=square, contenders=rows)


LAUNCH = [launch(PLAIN, None), launch(GELU, "gelu")]

F32, BF16 = torch.float32, torch.bfloat16
# Goals for CPUs on which MKL is far below the peak, as on AMD CPUs with 512-bit units (Zen 5).
MUST_SHOW = [
    Goal(GELU, TRAINING, F32, shape, "eager", {"default": 1.9, "keep": 1.9})
    for shape in ((1024, 384, 1536), (1024, 1536, 384))
]
MUST_SHOW += [
    Goal(PLAIN, mode, F32, (1, 384, 1536), "eager", {"default": 0.97})
    for mode in (FORWARD, TRAINING)
]

GPU_ROWS = [
    Case(op, mode, BF16, shape, only=("eager", "compile(eager)", "fusedops"), clock="device")
    for op in (GELU, TANH)
    for mode in (FORWARD, TRAINING)
    for shape in ((8192, 4096, 4096), (8192, 4096, 14336))
]
