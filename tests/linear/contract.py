"""Calls of `linear` for the tests in tests/contract, always with fusedops' kernels."""

from collections.abc import Iterator
from functools import partial

import torch
from contract.family import Call, Family

from fusedops.functional import linear
from fusedops.references.linear import linear_reference
from linear.cases import BACKENDS, KINDS, inputs
from linear.errors import ERRORS, OF_KERNELS


def drawn(batch: tuple[int, ...], tiny: bool) -> tuple:
    depth, features = (5, 3) if tiny else (40, 30)
    return inputs((*batch, depth), features, torch.float32)


def kernels(kind: str, mask: list[bool], device: torch.device) -> Iterator[tuple[str, tuple]]:
    x, weight, bias = (t.to(device) for t in inputs((2, 5, 20), 12, torch.float32))
    for keep_z in (True, False):
        yield "linear_forward", (x, weight, bias, kind, keep_z)
    y, z = torch.ops.fusedops.linear_forward(x, weight, bias, kind, True)
    z = None if kind == "none" else z
    for same in (weight, weight.t().contiguous().t()):
        yield "linear_backward", (y, x, same, z, kind, mask)


def call(kind: str | None) -> Call:
    options = {"options": {"activation": kind}, "kept": (0, 1), "smooth": kind != "relu"}
    return Call("linear", linear, linear_reference, drawn, **options)


FAMILY = Family(
    calls={str(kind): call(kind) for kind in KINDS},
    kernels={
        f"{kind} {mask}": partial(kernels, kind, mask)
        for kind in ("none", "relu", "gelu", "gelu_tanh", "silu")
        for mask in ([True, True, True], [True, False, False], [False, True, True])
    },
    backends=tuple(BACKENDS),
    batches=((6,), (2, 3), ()),
    draws=8,
    errors=ERRORS,
    kernel_errors=OF_KERNELS,
)
