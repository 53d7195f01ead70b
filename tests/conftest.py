"""Triton kernels run in the interpreter where there is no GPU, if asked for before the import."""

import os
from unittest import mock

import pytest
import torch

# A graph that was compiled for another build of the operators must not stand in for this one's.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def seeded():
    """Max norms over few elements are a matter of luck: the draw is the same at each run."""
    torch.manual_seed(0)


@pytest.fixture
def sums():
    """Counts the fused sums of patched layers."""
    from fusedops.patching import residual

    run = residual._fused_sum
    with mock.patch.object(residual, "_fused_sum", side_effect=run) as counted:
        yield counted
