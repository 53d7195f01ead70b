"""swiglu and geglu calls for the tests in tests/contract."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from contract.family import Call, CodedRows, Family

from fusedops.functional import swiglu
from fusedops.references.gated_activation import swiglu_reference
from fusedops.testing import placed
from gated_activation.cases import GPT_OSS, KINDS, inputs
from gated_activation.errors import ERRORS, OF_KERNELS


def drawn(packed: bool, batch: tuple[int, ...], tiny: bool) -> tuple:
    return inputs((*batch, 3 if tiny else 24), torch.float32, packed)


def call(kind: str, packed: bool) -> Call:
    function, reference, options = KINDS[kind]
    settings = {"options": options, "kept": (0,) if packed else (0, 1)}
    return Call(kind.split()[0], function, reference, partial(drawn, packed), **settings)


def kernels(
    kind: str, mask: list[bool], packed: bool, device: torch.device
) -> Iterator[tuple[str, tuple]]:
    args = (*placed(inputs((5, 20), torch.float32, packed), device), *[None] * packed)
    settings = (kind, 0.7 if kind == "swiglu" else None, 1.5, 0.5)
    yield "gated_activation_forward", (*args, *settings)
    for format in ("int8", "fp8"):
        yield "gated_activation_quantized", (*args, *settings, format)
    yield "swiglu_quantized", args
    yield "gated_activation_backward", (torch.randn(5, 20, device=device), *args, *settings, mask)


def wide(packed: bool, *_: object) -> tuple:
    return inputs((64, 4096), torch.float32, packed)


def exact_rows(args: tuple, **options: float) -> torch.Tensor:
    return swiglu_reference(*(a.double() for a in args), **options)


def coded_rows(packed: bool) -> CodedRows:
    both, draw = (swiglu, swiglu_reference), partial(inputs, packed=packed)
    return CodedRows("swiglu", *both, draw, exact_rows, ({}, GPT_OSS))


FORMS = {"separate": False, "packed": True}
FAMILY = Family(
    calls={f"{kind} {form}": call(kind, FORMS[form]) for kind in KINDS for form in FORMS},
    on_gpus={
        f"{kind} {form}": replace(call(kind, FORMS[form]), draw=partial(wide, FORMS[form]))
        for kind in KINDS
        for form in FORMS
    },
    kernels={
        f"{kind} {mask} {form}": partial(kernels, kind, mask, FORMS[form])
        for kind in ("swiglu", "geglu", "geglu_tanh")
        for mask in ([True, True], [True, False], [False, True], [False, False])
        for form in FORMS
    },
    errors=ERRORS,
    coded_rows={f"swiglu {form}": coded_rows(FORMS[form]) for form in FORMS},
    kernel_errors=OF_KERNELS,
)
