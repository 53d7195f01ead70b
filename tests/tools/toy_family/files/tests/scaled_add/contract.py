"""scaled_add calls for the tests in tests/contract."""

from collections.abc import Iterator

import torch
from contract.family import Call, Family

from fusedops.functional import scaled_add
from fusedops.functional.scaled_add import scaled_add_reference
from scaled_add.cases import inputs


def drawn(batch: tuple[int, ...], tiny: bool) -> tuple:
    return inputs((*batch, 3 if tiny else 40), torch.float32)


def kernels(device: torch.device) -> Iterator[tuple[str, tuple]]:
    x, residual = (t.to(device) for t in inputs((4, 33), torch.float32))
    yield "scaled_add_forward", (x, residual, 0.5)
    yield "scaled_add_backward", (x, 0.5)


ERRORS = {
    r"scaled_add: x must be float32, .* got int64 \[2\]": lambda: scaled_add(
        torch.arange(2), torch.arange(2)
    ),
    r"scaled_add: residual must .* got float16 \[2\]": lambda: scaled_add(
        torch.ones(2), torch.ones(2).half()
    ),
    r"scaled_add: residual must .* got float32 \[3\]": lambda: scaled_add(
        torch.ones(2), torch.ones(3)
    ),
}
HOW = {"options": {"scale": 0.5}, "kept": ()}
FAMILY = Family(
    calls={"scaled_add": Call("scaled_add", scaled_add, scaled_add_reference, drawn, **HOW)},
    kernels={"scaled_add": kernels},
    errors=ERRORS,
)
