"""Calls of `experts`, the mixture-of-experts function, for the tests in tests/contract."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from contract.family import Call, Family

from experts.cases import BACKENDS, FORMATS, KINDS, Shape, inputs, kernel_options, quantized
from experts.errors import ERRORS, OF_KERNELS
from fusedops.functional import QuantizedWeight, dequantize_experts, experts
from fusedops.references.experts import experts_reference

CONTRACTED = ("silu", "gelu_tanh transposed", "gpt_oss", "plain silu transposed")
NAMES = "gate_up_bias", "down_bias"


def drawn(kind: str, batch: tuple[int, ...], tiny: bool) -> tuple:
    (tokens,) = batch
    shape = Shape(tokens, 2, 3, 3, 2, True) if tiny else Shape(tokens, 2, 5, 24, 14, True)
    return inputs(shape, **KINDS[kind])


def call(kind: str) -> Call:
    return Call(
        "experts",
        experts,
        experts_reference,
        partial(drawn, kind),
        options=KINDS[kind],
        names=NAMES,
        kept=(0, 2, 3, 4, 5, 6),
    )


SIZES = Shape(6, 2, 5, 24, 14, True), Shape(6, 2, 3, 3, 2, True)


class OfSizes:
    """experts, or its reference, of the codes that go with the sizes."""

    def __init__(self, kind: str, run: Callable) -> None:
        each = (quantized(kind, *inputs(shape)[3:5]) for shape in SIZES)
        self.of_width = {first.in_features: (first, second) for first, second in each}
        self.run = run

    def __call__(self, hidden: torch.Tensor, index, weights, **biases):
        codes = (w.to(hidden.device) for w in self.of_width[hidden.shape[1]])
        return self.run(hidden, index, weights, *codes, **biases)


def by_codes(hidden, index, weights, *codes: QuantizedWeight, **biases):
    return experts(hidden, index, weights, *codes, **biases, compute="exact")


def by_floats(hidden, index, weights, *codes: QuantizedWeight, **biases):
    """In lines that functorch differentiates."""
    floats = (dequantize_experts(w, hidden.dtype) for w in codes)
    return experts_reference(hidden, index, weights, *floats, **biases)


def call_of_codes(kind: str) -> Call:
    def draw(batch: tuple[int, ...], tiny: bool) -> tuple:
        args = drawn("silu", batch, tiny)
        return (*args[:3], *args[5:])

    both = OfSizes(kind, by_codes), OfSizes(kind, by_floats)
    return Call("experts", *both, draw, names=NAMES, kept=(0, 2, 3, 4))


def kernels_of_codes(
    kind: str, mask: list[bool], device: torch.device
) -> Iterator[tuple[str, tuple]]:
    *args, gate_up, down, first, second = inputs(Shape(5, 2, 3, 12, 8, True))
    codes = [w.to(device) for w in quantized(kind, gate_up, down)]
    tensors = [t for w in codes for t in (w.qweight, w.scales, w.zeros)]
    args = (*(t.to(device) for t in args), *tensors, first.to(device), second.to(device))
    layout = codes[0].format, 8, *(w.group_size for w in codes), "any"
    options = (*layout, "silu", True, False, False, None, 1.0, 0.0)
    for keep_z in (True, False):
        yield "quantized_experts_forward", (*args, *options, keep_z)
    y, z = torch.ops.fusedops.quantized_experts_forward(*args, *options, True)
    yield "quantized_experts_backward", (y, *args, *options, z, mask)


def kernels(kind: str, mask: list[bool], device: torch.device) -> Iterator[tuple[str, tuple]]:
    args = inputs(Shape(5, 2, 3, 12, 8, True), **KINDS[kind])
    args = tuple(t.to(device) for t in args)
    options = kernel_options(kind)
    for keep_z in (True, False):
        yield "experts_forward", (*args, *options, keep_z)
    y, z = torch.ops.fusedops.experts_forward(*args, *options, True)
    yield "experts_backward", (y, *args, *options, z, mask)


FAMILY = Family(
    calls={kind: call(kind) for kind in CONTRACTED},
    twice={kind: call_of_codes(kind) for kind in FORMATS},
    further={kind: call_of_codes(kind) for kind in FORMATS},
    kernels={
        f"{kind} {mask}": partial(kernels, kind, mask)
        for kind in CONTRACTED
        for mask in ([True] * 6, [True, False] * 3, [False, True] * 3)
    }
    | {
        f"{kind} {mask}": partial(kernels_of_codes, kind, mask)
        for kind in FORMATS
        for mask in ([True] * 4, [True, False] * 2, [False, True] * 2)
    },
    backends=tuple(BACKENDS),
    draws=32,
    errors=ERRORS,
    kernel_errors=OF_KERNELS,
)
