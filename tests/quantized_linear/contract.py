"""quantized_linear calls in every format, for the tests in tests/contract."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from contract.family import F32, F64, Call, Family

from fusedops.functional import QuantizedWeight
from fusedops.references.linear import linear_reference
from fusedops.references.quantized_linear import dequantize_weight_reference
from quantized_linear.cases import (
    BACKENDS,
    FORMATS,
    PRECISIONS,
    functions,
    inputs,
    quantized,
    random_weight,
)


def drawn(batch: tuple[int, ...], tiny: bool) -> tuple:
    depth, features = (5, 3) if tiny else (40, 30)
    return inputs((*batch, depth), features, F32)


def kernel(weight: QuantizedWeight, activation: str | None) -> Callable:
    return functions(weight, activation=activation, compute="exact")[0]


def by_float_weight(weight: QuantizedWeight, activation: str | None) -> Callable:
    """In lines that functorch differentiates."""
    parts = weight.qweight, weight.scales, weight.zeros
    sizes = weight.format, weight.out_features, weight.in_features, weight.group_size
    dense = {to: dequantize_weight_reference(*parts, *sizes, to) for to in (F32, F64)}

    def reference(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, F32)
        args = x.to(wide), dense[wide].to(x.device), bias.to(wide)
        return linear_reference(*args, activation).to(x.dtype)

    return reference


class OfSizes:
    """A function of x and bias, of the weight that goes with their sizes."""

    def __init__(self, kind: str, which: int, activation: str | None) -> None:
        weights = (quantized(kind, random_weight(*size)) for size in ((30, 40), (3, 5)))
        make = (kernel, by_float_weight)[which]
        self.of_depth = {w.in_features: make(w, activation) for w in weights}
        self.other = self.of_depth[40]  # which refuses any other depth

    def __call__(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.of_depth.get(x.shape[-1], self.other)(x, bias)


def call(kind: str, activation: str | None) -> Call:
    both = (OfSizes(kind, which, activation) for which in (0, 1))
    return Call("quantized_linear", *both, drawn, kept=())


def at_precision(kind: str, input_format: str | None, compute: str | None) -> Call:
    options = {"input_format": input_format, "compute": compute}
    both = functions(quantized(kind, random_weight(30, 40)), **options)
    return Call("quantized_linear", *both, drawn, kept=())


def kernels(
    kind: str, dtype: torch.dtype, rows: int, device: torch.device
) -> Iterator[tuple[str, tuple]]:
    q = quantized(kind, random_weight(30, 40)).to(device)
    x, bias = (t.to(device) for t in inputs((rows, 40), 30, dtype))
    parts = q.qweight, q.scales, q.zeros
    sizes = q.format, q.out_features, q.in_features, q.group_size
    options = "gelu", "none", "any"
    yield "quantized_linear_forward", (x, *parts, bias, *sizes, *options, True)
    yield "quantized_linear_tiles", (x, *parts, bias, *sizes, *options, True)
    pair = x[:, :40].round().to(torch.int8), torch.ones(rows, 1, device=device)
    for name in ("quantized_linear_forward", "quantized_linear_tiles"):
        coded_options = "gelu", "int8", "any", False, pair[1], dtype
        yield name, (pair[0], *parts, bias, *sizes, *coded_options)
    yield "quantized_linear", (pair[0], *parts, bias, *sizes, None, "int8", None, pair[1], dtype)
    for leaf in (x, x.clone().requires_grad_()):
        yield "quantized_linear", (leaf, *parts, bias, *sizes, "gelu", None, "exact")
    z, mask = torch.randn(rows, 30).to(x), [True, True]
    yield "quantized_linear_backward", (z, *parts, z, *sizes, "gelu", "any", mask)
    yield "dequantize_weight", (*parts, *sizes, dtype)


def captured(kind: str, rows: int) -> Call:
    """Of sizes for which a row's scale and its codes fill whole vectors."""
    both = functions(quantized(kind, random_weight(64, 96)), activation="gelu")
    draw = lambda batch, tiny: inputs((rows, 96), 64, F32)  # noqa: E731
    return Call("quantized_linear", *both, draw, kept=())


FAMILY = Family(
    calls={kind: call(kind, "gelu") for kind in FORMATS},
    twice={
        f"{kind} {activation}": call(kind, activation)
        for kind in FORMATS
        for activation in (None, "silu")
    },
    further={
        f"{kind}, {input_format}, {compute}": at_precision(kind, input_format, compute)
        for kind in FORMATS
        for input_format, compute in PRECISIONS
    },
    kernels={
        f"{kind} {dtype} {rows} rows": partial(kernels, kind, dtype, rows)
        for kind in FORMATS
        if kind != "nf4 by mse"  # other scales for the same kernels
        for dtype, rows in ((torch.float32, 3), (torch.bfloat16, 6))
    },
    graphs={  # by rows in registers, with a split depth, in tiles
        f"{kind} of {rows} rows": captured(kind, rows) for kind in FORMATS for rows in (3, 20, 100)
    },
    backends=tuple(BACKENDS),
    whole=False,
    symbolic=False,
    batches=((6,), (2, 3), ()),
    draws=8,
    compilers=tuple({"dynamic": dynamic, "backend": "aot_eager"} for dynamic in (False, True)),
)
