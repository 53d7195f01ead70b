"""Gated-activation tests that need a GPU: large tensors."""

import pytest
import torch

import fusedops
from fusedops.functional import swiglu
from fusedops.testing import backends

BACKENDS = [name for name in backends("swiglu") if name == "cuda"]
FORMS = pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])


@pytest.mark.parametrize("backend", BACKENDS)
@FORMS
def test_more_elements_than_int32_counts(backend, packed):
    """Rows are independent, so the last ones alone give the same bits."""
    shape = (2**31 // 8192 + 3, 8192)
    if torch.cuda.mem_get_info()[0] < 2 * 8 * shape[0] * shape[1]:
        pytest.skip("needs 32 GiB of free GPU memory")
    wide = (shape[0], 2 * shape[1]) if packed else shape
    whole = [torch.randn(wide, dtype=torch.bfloat16, device="cuda") for _ in range(2 - packed)]
    with fusedops.backend(backend):
        args = [t.requires_grad_() for t in whole]
        y = swiglu(*args)
        grads = torch.autograd.grad(y, args, y.detach())
        few = [t[-7:].detach().requires_grad_() for t in whole]
        last = swiglu(*few)
        expected = torch.autograd.grad(last, few, last.detach())
    assert torch.equal(y[-7:], last)
    assert all(torch.equal(g[-7:], e) for g, e in zip(grads, expected, strict=True))
