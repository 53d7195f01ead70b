"""quantized_linear's benchmarked operations, by format, with weights in memory or in cache.

A matmul has one right answer: every contender gets the dequantized weight. For int8 inputs, it also
gets x's rows already rounded (in float32; bfloat16 would round them again). The reference uses the
codes and rounds operands as compute=None may. If our error is more than twice the reference's, ours
is refused; a peer with such an error is timed and marked.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops
import fusedops.functional as ours
from benchmarks.harness.case import FORWARD, Contender, Operation, Run, compiled
from benchmarks.operators.quantized_linear import peers
from fusedops.functional.quantized_linear import check_format, product
from fusedops.references.quantized_linear import quantized_linear_reference
from fusedops.references.quantized_rows import rounded_rows

ROTATED = 1 << 28  # bytes of alternating weights, more than a last-level cache


@dataclass(frozen=True)
class Kind:
    """A format of the weight and of the input."""

    format: str
    input_format: str | None = None

    @property
    def name(self) -> str:
        return (
            self.format
            if self.input_format is None
            else f"{self.format}, {self.input_format} inputs"
        )

    def layout(self, weight: Tensor) -> tuple[str, int, int, int]:
        n, k = weight.shape
        return self.format, n, k, check_format(self.format, k, None, None)[0]

    def inputs(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """x, the dequantized weight, the bias, then the weight's codes and scales."""
        rows, depth, features = shape
        weight = torch.randn(features, depth, device=device) / depth**0.5
        codes = ours.quantize_weight(weight, self.format)
        x, bias = torch.randn(rows, depth, device=device), torch.randn(features, device=device)
        x = rounded_rows(x, self.input_format) if self.input_format else x
        held = ours.dequantize_weight(codes, dtype), bias.to(dtype), *codes.tensors().values()
        return x.to(dtype).requires_grad_(), *held

    def reference(self, x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Tensor:
        operands, layout = _operands(*codes), self.layout(weight)
        options = None, self.input_format, None
        return quantized_linear_reference(x, *operands, bias, *layout, *options)


def _operands(qweight: Tensor, scales: Tensor, zeros: Tensor | None = None):
    return qweight, scales, zeros


def bytes_moved(mode: str, x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> int:
    """Counts the codes once, x and y; in a backward the codes again, dy and dx."""
    forward = sum(t.nbytes for t in codes) + x.nbytes + x.shape[0] * bias.nbytes
    return forward if mode == FORWARD else 2 * forward


class Turns:
    """Alternates between calls with several weights, forever."""

    def __init__(self, call: Callable[..., Tensor], held: Sequence[tuple]) -> None:
        self.call, self.turn = call, itertools.cycle(held)

    def __call__(self, x: Tensor) -> Tensor:
        return self.call(x, *next(self.turn))


def rotated(contender: Contender, bits: int) -> Contender:
    """Calls with another copy of the operands after x each time, so that no cache has it."""

    def prepare(x: Tensor, weight: Tensor, *others: Tensor) -> Run:
        run: Any = contender.prepare(x, weight, *others)
        assert run.args[0] is x, "x comes first"
        copies = math.ceil(ROTATED / (weight.numel() * bits / 8))
        held = [run.args[1:], *(copy.deepcopy(run.args[1:]) for _ in range(copies - 1))]
        return partial(Turns(run.func, held), x)

    return replace(contender, prepare=prepare)


def in_bfloat16(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), weight, bias).to(x.dtype)


class Packed:
    """A weight in oneDNN's blocks. A copy is packed again: opaque tensors cannot be copied."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self.weight, self.rows = weight, rows
        self.blocks = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def __deepcopy__(self, memo: dict) -> "Packed":
        return Packed(self.weight, self.rows)


def prepacked(x: Tensor, weight: Packed, bias: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight.blocks, bias, "none", [], "")


def dense(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
    return partial(F.linear, x, weight, bias)


def dense_bfloat16(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
    return partial(in_bfloat16, x, weight.bfloat16(), bias.bfloat16())


def onednn(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
    return partial(prepacked, x, Packed(weight, x.shape[0]), bias)


def fused(kind: Kind) -> Contender:
    def prepare(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
        layout, options = kind.layout(weight), (None, kind.input_format, None)
        return partial(product, x, _operands(*codes), bias, layout, *options)

    return Contender(prepare)


BITS = {"int8": 8, "fp8": 8, "int4": 4, "nf4": 4}


def served(kind: Kind) -> Operation:
    """Returns a large model: a weight is no longer in a cache when it is used again."""
    bits = BITS[kind.format]
    eager = Contender(dense)
    rows = {
        "eager": rotated(eager, 32),
        "eager bfloat16": rotated(Contender(dense_bfloat16), 16),
        "oneDNN prepacked": rotated(Contender(onednn), 32),
        "compile(eager)": rotated(compiled(eager), 32),
        "fusedops": rotated(fused(kind), bits),
    }
    rows |= {name: rotated(peer, bits) for name, peer in peers.of(kind.name).items()}
    return Operation(
        f"quantized_linear {kind.name}", kind.inputs, kind.reference, bytes_moved, rows
    )


def small(kind: Kind) -> Operation:
    """Returns a small model: weights stay in the caches, where eager's 4x bytes cost least."""
    rows = {"eager": Contender(dense), "fusedops": fused(kind)}
    name = f"quantized_linear {kind.name}, cached"
    return Operation(name, kind.inputs, kind.reference, bytes_moved, rows)


INT8, INT4, NF4, FP8 = Kind("int8"), Kind("int4"), Kind("nf4"), Kind("fp8")
DYNAMIC, DYNAMIC_FP8 = Kind("int8", "int8"), Kind("fp8", "fp8")
KINDS = (INT8, DYNAMIC, INT4, NF4, FP8)


def launch() -> Operation:
    """Returns every way to call it: eager, torch.ops, the short path, and both modules."""

    def square(shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        return INT8.inputs((*shape, shape[-1]), dtype, device)

    def op(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
        run, layout = torch.ops.fusedops.quantized_linear, INT8.layout(weight)
        return partial(run, x, *_operands(*codes), bias, *layout, None, None, None)

    def functional(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
        return partial(
            ours.quantized_linear, x, _module(weight, bias, *codes).quantized_weight, bias
        )

    def module(x: Tensor, *held: Tensor) -> Run:
        return partial(_module(*held), x)

    rows = {
        "eager": Contender(dense),
        "fusedops torch.ops": Contender(op),
        "fusedops functional": Contender(functional),
        "fusedops module": Contender(module),
        "eager module": Contender(_linear),
    }
    return Operation("quantized_linear", square, INT8.reference, bytes_moved, rows)


def _module(weight: Tensor, bias: Tensor, qweight: Tensor, scales: Tensor) -> torch.nn.Module:
    n, k = weight.shape
    layer = fusedops.nn.QuantizedLinear(k, n, format=INT8.format, device=weight.device)
    layer.qweight, layer.scales = qweight, scales
    layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer


def _linear(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
    layer = torch.nn.Linear(*reversed(weight.shape), device="meta").requires_grad_(False)
    layer.weight, layer.bias = (torch.nn.Parameter(t, requires_grad=False) for t in (weight, bias))
    return partial(layer, x)
