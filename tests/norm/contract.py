"""Norm calls for the tests in tests/contract."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from contract.family import Call, CodedRows, Family

from fusedops.references import norm
from norm.cases import BACKENDS, FUNCTIONS, inputs
from norm.errors import ERRORS

# The last two are walked: in shared memory past 48 KiB, and in global memory.
SHAPES = [(3, 70), (64, 4096), (16384, 1024), (16, 16384), (3, 70001), (2, 262144)]


def shape_inputs(op: str, shape: tuple[int, ...], *_: object) -> tuple:
    return inputs(op, shape, torch.float32)


def drawn(op: str, batch: tuple[int, ...], tiny: bool) -> tuple:
    args = inputs(op, (*batch, 3 if tiny else 40), torch.float32)
    return args if "add" in op else (args[0], [*args[1]], *args[2:])


def kernels(kind: str, add: bool, device: torch.device) -> Iterator[tuple[str, tuple]]:
    x, residual, dy = torch.randn(3, 5, 20, device=device)
    weight, seed = torch.randn(20).to(x), torch.tensor(7, device=device)
    p, seed = (0.5, seed) if add else (0.0, None)
    settings = (1, 1e-5, kind, 0.0, p, seed)
    args = (x, residual if add else None, weight, None, *settings)
    if kind != "layer":
        yield from (("norm_quantized", (*args, format)) for format in ("int8", "fp8"))
        yield (
            ("add_rms_norm_quantized", args[:3])
            if add
            else ("rms_norm_quantized", (x, (20,), weight))
        )
    yield "norm_forward", args
    _, h, stats = torch.ops.fusedops.norm_forward(*args)
    mask = [True, add, True, False]
    kept = (h if add else x, weight, None, stats)
    yield "norm_backward", (dy, None, *kept, *settings, mask)


CALLS = {  # the sum is kept, not what it is made of
    op: Call(op, *both, partial(drawn, op), kept=(2,) if "add" in op else (0, 2))
    for op, both in FUNCTIONS.items()
}


def exact_rows(
    args: tuple, rounding: str = "torch", offset: float = 0.0, dropout_p: float = 0.0
) -> torch.Tensor:
    """y in float64, with llama's rounding of the normalised row in its dtype."""
    x, other, weight, eps = args
    add = isinstance(other, torch.Tensor)
    h = other + norm.dropout_reference(x, dropout_p) if add else x
    dtype = norm._stream_dtype(x, h, weight) if add else x.dtype
    n = h.double() * (h.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    n = n.to(dtype).double() if rounding == "llama" else n
    return n if weight is None else n * (offset + weight.double())


def coded_rows(op: str) -> CodedRows:
    """With the rounding always given, because add_rms_norm's default is another."""
    options = {"rounding": "torch"}, {"rounding": "llama"}
    return CodedRows(op, *FUNCTIONS[op], partial(inputs, op), exact_rows, options)


GEMMA = {"rounding": "llama", "offset": 1.0}
FAMILY = Family(
    calls=CALLS,
    more={
        "rms_norm of Gemma": replace(CALLS["rms_norm"], options=GEMMA),
        "add_rms_norm of Gemma": replace(CALLS["add_rms_norm"], options=GEMMA | {"dropout_p": 0.3}),
    }
    | {
        f"{op} with dropout": replace(call, options={"dropout_p": 0.3})
        for op, call in CALLS.items()
        if "add" in op
    },
    kernels={
        f"{kind}{' of a sum' * add}": partial(kernels, kind, add)
        for kind in ("layer", "rms", "rms_llama")
        for add in (True, False)
    },
    draws=4,
    keeps_outputs=True,
    on_gpus={
        f"{op} {shape}": replace(call, draw=partial(shape_inputs, op, shape))
        for op, call in CALLS.items()
        for shape in SHAPES
    },
    launches=None,
    backends=tuple("default" if name == "cpu" else name for name in BACKENDS),
    errors=ERRORS,
    coded_rows={op: coded_rows(op) for op in ("rms_norm", "add_rms_norm")},
)
