"""scaled_add matches its reference on every backend."""

import pytest
import torch

from fusedops.functional import scaled_add
from scaled_add.cases import BACKENDS, CASES, FLOATS, compare, inputs

SHAPES = [(1,), (), (7, 33), (2, 3, 1024), (3, 4099), (70001,)]


@pytest.mark.parametrize("backend,dtype", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients(backend, dtype, shape):
    compare(backend, inputs(shape, dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0,), (3, 0)], ids=str)
def test_empty(backend, shape):
    compare(backend, inputs(shape, torch.float32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    x, residual = inputs((64, 70), torch.float32)
    compare(backend, (x.t(), residual.t()))
    compare(backend, (x[:, 1:], residual[:, :-1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_misaligned(backend):
    x, residual = inputs((1025,), torch.float16)
    compare(backend, (x[1:], residual[1:]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_inf(backend, value):
    x, residual = inputs((5, 100), torch.float32)
    x[2, 50], residual[4, 99] = value, value
    compare(backend, (x, residual))


@pytest.mark.parametrize("dtype", [torch.float64, *FLOATS], ids=str)
def test_a_scale_of_zero_and_one(dtype):
    x, residual = inputs((33,), dtype)
    assert torch.equal(scaled_add(x, residual, 0.0), x)
    assert torch.equal(scaled_add(x, residual), x + residual)
