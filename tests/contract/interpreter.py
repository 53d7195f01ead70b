"""Detects Triton's interpreter, and the cases that it gets wrong: it truncates bfloat16."""

from typing import Any

import torch

from fusedops.testing import device_of


def interpreted(backend: str) -> bool:
    """Whether a backend is Triton's interpreter, which is slow."""
    return backend == "triton" and device_of(backend).type == "cpu"


def rounds_right(backend: str, **values: Any) -> bool:
    """Whether a backend rounds a case's dtypes, which are among its values, when it stores them."""
    return not (interpreted(backend) and torch.bfloat16 in values.values())
