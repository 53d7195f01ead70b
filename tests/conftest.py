"""Triton kernels run in the interpreter where there is no GPU, if asked for before the import."""

import os

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
