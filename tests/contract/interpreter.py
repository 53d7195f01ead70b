"""Detects Triton's interpreter, and skips tests of bfloat16, which the interpreter truncates."""

import pytest
import torch

from fusedops.testing import device_of


def interpreted(backend: str) -> bool:
    """Whether a backend is Triton's interpreter, which is slow."""
    return backend == "triton" and device_of(backend).type == "cpu"


def needs_right_bf16(backend: str, *dtypes: torch.dtype) -> None:
    """Skips bfloat16, which the interpreter truncates when it stores it."""
    if interpreted(backend) and torch.bfloat16 in dtypes:
        pytest.skip("the interpreter's bfloat16 is wrong")
