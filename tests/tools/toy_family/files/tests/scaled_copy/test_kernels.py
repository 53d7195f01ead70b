"""scaled_copy matches its reference on every backend."""

from functools import partial

import pytest
import torch

from fusedops.functional import scaled_copy
from fusedops.references.scaled_copy import scaled_copy_reference
from fusedops.testing import check
from scaled_copy.cases import BACKENDS, CASES, drawn

SHAPES = [(1,), (), (0,), (7, 33), (2, 3, 1024), (3, 4099), (70001,)]


def compare(backend, x):
    """By the yardstick, with the gradient."""
    run, reference = (partial(f, scale=-0.75) for f in (scaled_copy, scaled_copy_reference))
    check(run, reference, (x,), backend)


@pytest.mark.parametrize("backend,dtype", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradient(backend, dtype, shape):
    compare(backend, drawn(shape, dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    compare(backend, drawn((64, 70)).t())
    compare(backend, drawn((64, 70))[:, 1:])
    compare(backend, drawn((1025,), torch.float16)[1:])  # misaligned


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_inf(backend, value):
    compare(backend, drawn((5, 100)).index_fill(1, torch.tensor(50), value))
