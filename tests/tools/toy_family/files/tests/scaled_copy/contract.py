"""scaled_copy calls for the tests in tests/contract."""

import torch
from contract.family import Call, Family

from fusedops.functional import scaled_copy
from fusedops.references.scaled_copy import scaled_copy_reference
from scaled_copy.cases import drawn


def inputs(batch, tiny):
    return (drawn((*batch, 3 if tiny else 40)),)


def kernels(device):
    yield "scaled_copy_forward", (drawn((4, 33)).to(device), 0.5)


HOW = {"options": {"scale": 0.5}, "kept": ()}
FAMILY = Family(
    calls={"scaled_copy": Call("scaled_copy", scaled_copy, scaled_copy_reference, inputs, **HOW)},
    kernels={"scaled_copy": kernels},
    errors={
        r"scaled_copy: x must be float32, .* got int64 \[2\]": lambda: scaled_copy(torch.arange(2))
    },
)
