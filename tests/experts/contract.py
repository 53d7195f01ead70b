"""experts calls for the tests in tests/contract."""

from collections.abc import Iterator
from functools import partial

import torch
from contract.family import Call, Family

from experts.cases import BACKENDS, KINDS, Shape, inputs
from experts.errors import ERRORS, OF_KERNELS
from fusedops.functional import experts
from fusedops.functional.experts import experts_reference

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


def kernels(kind: str, mask: list[bool], device: torch.device) -> Iterator[tuple[str, tuple]]:
    args = inputs(Shape(5, 2, 3, 12, 8, True), **KINDS[kind])
    args = tuple(t.to(device) for t in args)
    o = {"activation": "silu", "gated": True, "interleaved": False, "transposed": False}
    o |= {"limit": None, "alpha": 1.0, "up_offset": 0.0} | KINDS[kind]
    options = (o["activation"] or "none", *list(o.values())[1:])
    for keep_z in (True, False):
        yield "experts_forward", (*args, *options, keep_z)
    y, z = torch.ops.fusedops.experts_forward(*args, *options, True)
    yield "experts_backward", (y, *args, *options, z, mask)


FAMILY = Family(
    calls={kind: call(kind) for kind in CONTRACTED},
    kernels={
        f"{kind} {mask}": partial(kernels, kind, mask)
        for kind in CONTRACTED
        for mask in ([True] * 6, [True, False] * 3, [False, True] * 3)
    },
    backends=tuple(BACKENDS),
    draws=8,
    errors=ERRORS,
    kernel_errors=OF_KERNELS,
)
