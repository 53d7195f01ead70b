"""Rotary-embedding tests that need a GPU: large tensors."""

import pytest
import torch

import fusedops
from fusedops.functional import rotary_embedding
from fusedops.testing import backends
from rotary.cases import LAYOUTS

BACKENDS = [name for name in backends("rotary_embedding") if name == "cuda"]
PAIRS = pytest.mark.parametrize("interleaved", LAYOUTS, ids=["halves", "interleaved"])


@pytest.mark.parametrize("backend", BACKENDS)
@PAIRS
def test_more_elements_than_int32_counts(backend, interleaved):
    """Positions are independent, so the last ones alone give the same bits."""
    batch, heads, seq, width = 2, 8, 2**20 + 3, 128 + 8
    if torch.cuda.mem_get_info()[0] < 5 * 2 * batch * heads * seq * width:
        pytest.skip("needs 24 GiB of free GPU memory")
    q = torch.randn(batch, heads, seq, width, dtype=torch.bfloat16, device="cuda")
    k = q[:, :1]
    angle = torch.randn(1, seq, 128, device="cuda")
    table = angle.cos().bfloat16(), angle.sin().bfloat16()
    with fusedops.backend(backend):
        actual = rotary_embedding(q, k, *table, interleaved=interleaved)
        few = (t[..., -7:, :] for t in (q, k, *table))
        expected = rotary_embedding(*few, interleaved=interleaved)
    assert all(torch.equal(y[..., -7:, :], e) for y, e in zip(actual, expected, strict=True))
