"""Quantized-linear benchmarks against F.linear, torch.compile, bitsandbytes and torchao.

Few rows are bound by the weight's bytes, many by arithmetic. The figure that matters is the ratio
to eager in the same dtype; many CPUs run eager's float32 far below their peak, so bfloat16 is
shown too. A shape is (rows, depth, features). Training computes only x's gradient, as with an
adapter: the weight has no gradient, not in eager either.

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
from benchmarks.harness.case import (
    FORWARD,
    TRAINING,
    Case,
    Contender,
    Operation,
    Run,
    calling,
    compiled,
    find,
    gpu_row,
    need_compiler,
)
from benchmarks.harness.goals import Goal
from fusedops.functional.quantized_linear import check_format, product
from fusedops.references.quantized_linear import (
    FORMATS,
    quantize_weight_reference,
    quantized_linear_reference,
)
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


def dense(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
    return partial(F.linear, x, weight, bias)


def dense_bfloat16(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
    return partial(in_bfloat16, x, weight.bfloat16(), bias.bfloat16())


def fused(kind: Kind) -> Contender:
    def prepare(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
        layout, options = kind.layout(weight), (None, kind.input_format, None)
        return partial(product, x, _operands(*codes), bias, layout, *options)

    return Contender(prepare)


# Other libraries' quantized linears; missing ones are skipped. bitsandbytes has nf4 with the same
# bytes as ours: a Linear4bit in eval mode, which packs itself in its first call without gradients.
# torchao has int8 with its own codes; its code is compiled, as its documentation recommends.


def bitsandbytes(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
    n, k = weight.shape
    form = {"quant_type": "nf4", "compress_statistics": False}
    layer = find("bitsandbytes.nn", "Linear4bit")(k, n, device="meta", **form)
    held = find("bitsandbytes.nn", "Params4bit")(weight, requires_grad=False, **form)
    layer.weight = held.to(weight.device)  # this quantizes it
    layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return partial(layer_call, x, layer.eval())


def layer_call(x: Tensor, layer: torch.nn.Module) -> Tensor:
    """It packs itself if x requires no gradient; under no_grad it still checks x."""
    return layer(x if torch.is_grad_enabled() else x.detach())


def torchao(config: str, x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
    options = find("torchao.quantization", config)
    quantize = find("torchao.quantization", "quantize_")
    need_compiler("torchao's compiled code")
    layer = torch.nn.Linear(*reversed(weight.shape), device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize(layer, options())
    torch.compiler.reset()
    return partial(torch.compile(F.linear, dynamic=False), x, layer.weight.detach(), bias)


PEERS = {
    "nf4": {"bitsandbytes": Contender(bitsandbytes)},
    "int8": {"compile(torchao)": Contender(partial(torchao, "Int8WeightOnlyConfig"))},
    "int8, int8 inputs": {
        "compile(torchao)": Contender(partial(torchao, "Int8DynamicActivationInt8WeightConfig"))
    },
}


def peers(kind: Kind) -> dict[str, Contender]:
    return PEERS.get(kind.name, {})


def served(kind: Kind) -> Operation:
    """Returns a large model: a weight is no longer in a cache when it is used again."""
    bits = FORMATS[kind.format].bits
    eager = Contender(dense)
    rows = {
        "eager": rotated(eager, 32),
        "eager bfloat16": rotated(Contender(dense_bfloat16), 16),
        "compile(eager)": rotated(compiled(eager), 32),
        "fusedops": rotated(fused(kind), bits),
    }
    rows |= {name: rotated(peer, bits) for name, peer in peers(kind).items()}
    return Operation(
        f"quantized_linear {kind.name}", kind.inputs, kind.reference, bytes_moved, rows
    )


def small(kind: Kind) -> Operation:
    """Returns a small model: weights stay in the caches, where eager's 4x bytes cost least."""
    rows = {"eager": Contender(dense), "fusedops": fused(kind)}
    name = f"quantized_linear {kind.name}, cached"
    return Operation(name, kind.inputs, kind.reference, bytes_moved, rows)


# quantize_weight, against its reference and, for nf4, bitsandbytes.


def quantize(format: str) -> Operation:
    """Quantizes a weight [features, depth]; the results are codes, scales and zeros."""
    contenders = {
        "eager": calling(partial(by_reference, format=format)),
        "fusedops": calling(partial(fused_codes, format=format)),
    }
    if format == "nf4":
        contenders["bitsandbytes"] = Contender(bitsandbytes_codes)

    def bytes_moved(mode: str, weight: Tensor) -> int:
        """Counts the weight once, and its codes."""
        return weight.nbytes + weight.numel() * FORMATS[format].bits // 8

    return Operation(
        f"quantize_weight {format}",
        weight_inputs,
        partial(by_reference, format=format),
        bytes_moved,
        contenders,
        rows=torch.Tensor.float,
    )


def weight_inputs(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    return (torch.randn(*shape, device=device).to(dtype),)


def by_reference(weight: Tensor, format: str) -> tuple[Tensor, ...]:
    size, scale = check_format(format, weight.shape[1], None, None)
    return tuple(t for t in quantize_weight_reference(weight, format, size, scale) if t is not None)


def fused_codes(weight: Tensor, format: str) -> tuple[Tensor, ...]:
    return tuple(ours.quantize_weight(weight, format).tensors().values())


def bitsandbytes_codes(weight: Tensor) -> Run:
    return partial(_bitsandbytes, find("bitsandbytes.functional", "quantize_4bit"), weight)


def _bitsandbytes(quantize_4bit: Callable[..., Any], weight: Tensor) -> tuple[Tensor, ...]:
    form = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": False}
    packed, state = quantize_4bit(weight, **form)
    return packed, state.absmax


INT8, INT4, NF4, FP8 = Kind("int8"), Kind("int4"), Kind("nf4"), Kind("fp8")
DYNAMIC, DYNAMIC_FP8 = Kind("int8", "int8"), Kind("fp8", "fp8")
KINDS = (INT8, DYNAMIC, INT4, NF4, FP8)

F32, BF16, EAGER = torch.float32, torch.bfloat16, "eager"
WIDE = 4096
DIFFERENTIABLE = ("eager", "eager bfloat16", "compile(eager)", "bitsandbytes", "fusedops")

# Kind, mode, dtype -> {rows: required speedup over eager}.
ASKED = [
    (DYNAMIC, FORWARD, F32, {1: 7.0, 16: 13.0, 256: 9.0}),
    (INT8, FORWARD, F32, {1: 6.0, 16: 6.0}),
    (INT8, FORWARD, BF16, {1: 4.0, 16: 1.2}),
    (NF4, FORWARD, F32, {1: 9.0, 16: 7.0, 256: 4.0}),
    (INT4, FORWARD, F32, {1: 9.0, 16: 7.0, 256: 4.0}),
    (NF4, TRAINING, F32, {16: 3.0, 256: 3.5}),
]
SERVED = {kind: served(kind) for kind in KINDS}
LARGE = [
    Goal(SERVED[kind], mode, dtype, (rows, WIDE, WIDE), EAGER, {"default": ratio})
    for kind, mode, dtype, asked in ASKED
    for rows, ratio in asked.items()
]

# BERT: depth and features of a layer's linears. No format may be slower than eager.
SMALL = {kind: small(kind) for kind in KINDS}
BERT = [(384, 384), (384, 1536), (1536, 384), (768, 768), (768, 3072), (3072, 768)]
CHOSEN = [(1, 384, 384), (1, 3072, 768), (8, 768, 768), (32, 384, 1536), (128, 768, 3072)]
CHOSEN += [(512, 1536, 384), (512, 384, 384)]
QUANTIZE = {kind: quantize(kind.format) for kind in (INT8, INT4, NF4, FP8)}
MUST_SHOW = LARGE + [
    Goal(SMALL[kind], FORWARD, F32, shape, EAGER, {"default": 1.0})
    for kind in KINDS
    for shape in CHOSEN
]
# The goal is the time; eager is the reference's code.
MUST_SHOW += [Goal(QUANTIZE[NF4], FORWARD, F32, (WIDE, WIDE), EAGER, {"default": 1.0}, ms=40)]
ROWS = [
    Case(SERVED[kind], FORWARD, dtype, (rows, WIDE, WIDE))
    for kind, mode, dtype, asked in ASKED
    if mode == FORWARD
    for rows in asked
]
ROWS += [
    Case(SERVED[NF4], TRAINING, F32, (rows, WIDE, WIDE), only=DIFFERENTIABLE) for rows in (16, 256)
]
ROWS += [
    Case(SMALL[kind], FORWARD, F32, (rows, *layer))
    for kind in KINDS
    for layer in BERT
    for rows in (1, 8, 32, 128, 512)
]
ROWS += [Case(operation, FORWARD, F32, (WIDE, WIDE)) for operation in QUANTIZE.values()]
QUICK_ROWS = [Case(SMALL[kind], FORWARD, F32, (8, 384, 384)) for kind in KINDS]


# Small-batch calls.


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


LAUNCH = [launch()]


# Rows on a GPU, against bfloat16 eager.

GPU_WIDE = 8192


# On both sides of each threshold in csrc/ops/quantized_linear/gpu_kernel.cpp, which these rows set.
LIMITS = (4, 8, 128, 1024, 2048)
GPU_SERVED = {kind: served(kind) for kind in (INT8, DYNAMIC, DYNAMIC_FP8, INT4, NF4, FP8)}


def row(kind: Kind, rows: int) -> Case:
    only = ("eager", "compile(eager)", *peers(kind), "fusedops")
    shape = rows, GPU_WIDE, GPU_WIDE
    return replace(gpu_row(GPU_SERVED[kind], FORWARD, shape, "device"), only=only)


GPU_ROWS = [
    *(row(kind, rows) for kind in GPU_SERVED for rows in (1, 16, 64, 512, 4096)),
    *(row(kind, rows) for kind in (INT8, INT4, NF4) for rows in LIMITS),
]
