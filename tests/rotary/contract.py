"""rotary_embedding calls for the tests in tests/contract."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from contract.family import BF16, F32, Call, Family

from fusedops.functional import rotary_embedding
from fusedops.references.rotary import rotary_embedding_reference
from fusedops.testing import placed
from rotary.cases import inputs
from rotary.errors import ERRORS, OF_KERNELS

FUNCTIONS = rotary_embedding, rotary_embedding_reference


def drawn(part: bool, inside: bool, batch: tuple[int, ...], tiny: bool) -> tuple:
    """part: not all of the width is rotated. inside: the heads lie inside the sequence."""
    width, rotary = (6, 4) if tiny else (24, 20)
    heads = (2, 1) if tiny else (3, 2)
    q, k, *table = inputs(heads, *batch, width, rotary if part else width, batch=2 - tiny)
    if inside:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    return q, k, *table


def call(interleaved: bool, part: bool, inside: bool = False) -> Call:
    options = {"still": (2, 3), "kept": (2, 3), "options": {"interleaved": interleaved}}
    return Call("rotary_embedding", *FUNCTIONS, partial(drawn, part, inside), **options)


def kernels(
    interleaved: bool, dtype: torch.dtype, given: tuple[bool, bool], device: torch.device
) -> Iterator[tuple[str, tuple]]:
    q, k, cos, sin = placed(inputs((3, 2), 5, 24, 20, dtype, table=F32), device)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    yield "rotary_forward", (q, k, cos, sin, 1, interleaved)
    grads = (x.float() if g else None for x, g in zip((q, k), given, strict=True))
    yield "rotary_backward", (*grads, cos, sin, 1, interleaved, dtype)


def wide(*_: object) -> tuple:
    return inputs((32, 8), 64, 128)


PAIRS = {"halves": False, "interleaved": True}
FAMILY = Family(
    calls={
        name: call(interleaved, part=True, inside=not interleaved)
        for name, interleaved in PAIRS.items()
    },
    more={f"{name}, all of the width": call(PAIRS[name], part=False) for name in PAIRS},
    kernels={
        f"{name} {dtype} {given}": partial(kernels, PAIRS[name], dtype, given)
        for name in PAIRS
        for dtype in (F32, BF16)
        for given in ((True, True), (True, False), (False, True))
    },
    batches=((5,),),
    on_gpus={name: replace(call(PAIRS[name], part=False), draw=wide) for name in PAIRS},
    errors=ERRORS,
    kernel_errors=OF_KERNELS,
)
